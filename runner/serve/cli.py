"""``eagle3-serve``: serves an artifact behind OpenAI's API."""

import errno
import importlib.util
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import click

from eagle3.runner.artifact.opening import find_model
from eagle3.runner.commands.flags import Size, chain_len_option, ngram_option
from eagle3.runner.serve.process import ModelProcess, Settings
from eagle3.runner.system.command import (
    OneLineFailures,
    cuda_graph_option,
    packed_weights_option,
    runtime_option,
    tell,
    version_option,
)

EPILOG = """
\b
Examples:
  eagle3-serve out
  eagle3-serve out --port 8001 --model-id gemma --default temperature=0.7
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Open a file."}], "stream": true}'
"""
NEEDED = ("starlette", "uvicorn", "httptools", "openai", "prometheus_client")
HEADINGS = {"host": "Network and queue", "given": "Requests", "chain_len": "Running the artifact"}
PARSERS = (
    "auto", "gemma", "glm", "gpt-oss", "hermes", "kimi", "kimi-k3", "lfm2", "llama", "mistral", "nemotron-2", "qwen",
)  # fmt: skip


def defaults(_ctx: click.Context, _param: click.Parameter, given: tuple[str, ...]) -> dict[str, Any]:
    found = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals:
            raise click.BadParameter(f"{each!r}: expected NAME=VALUE such as temperature=0.7")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found


@click.command(cls=OneLineFailures, epilog=EPILOG, headings=HEADINGS)
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; 0.0.0.0 is every network (then give --api-key-file).",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Port to listen on; 0 takes a free one.",
)
@click.option(
    "--allowed-hosts",
    multiple=True,
    metavar="NAME",
    help="A host name that requests may use besides localhost and IP addresses; * allows any; repeatable.",
)
@click.option(
    "--allowed-origins",
    multiple=True,
    metavar="ORIGIN",
    help="An origin such as https://chat.example whose pages may send requests (CORS); repeatable.",
)
@click.option("--model-id", metavar="NAME", help="The model's name in requests. Default: the target's.")
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A file with the key that requests must send.",
)
@click.option(
    "--parallel",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="The number of requests that are computed at a time.",
)
@click.option(
    "--max-queue", type=click.IntRange(0), default=64, show_default=True, help="The number of requests that may wait."
)
@click.option(
    "--sessions",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Keep the caches of the last dialogues in DIR as well as in memory, so that they outlive the server.",
)
@click.option(
    "--sessions-size",
    type=Size(),
    default="2G",
    show_default=True,
    help="The most bytes of kept dialogues, in memory and again in DIR; 0 keeps none.",
)
@click.option(
    "--grace",
    type=click.IntRange(0),
    default=30,
    show_default=True,
    help="Seconds that requests have to finish after SIGTERM.",
)
@click.option(
    "--default",
    "given",
    multiple=True,
    callback=defaults,
    metavar="NAME=VALUE",
    help="The value of a field that a request leaves out, such as temperature=0; repeatable.",
)
@click.option(
    "--tool-parser",
    type=click.Choice(PARSERS),
    default="auto",
    show_default=True,
    help="The form of the model's tool calls; auto reads it from the chat template.",
)
@chain_len_option
@ngram_option
@runtime_option
@cuda_graph_option
@packed_weights_option
@click.option("--verify", is_flag=True, help="Read every file first, however large, and compare it with export.json.")
@version_option
def main(
    artifact: Path,
    host: str,
    port: int,
    allowed_hosts: tuple[str, ...],
    allowed_origins: tuple[str, ...],
    model_id: str | None,
    api_key_file: Path | None,
    parallel: int,
    max_queue: int,
    sessions: Path | None,
    sessions_size: int,
    grace: int,
    given: dict[str, Any],
    tool_parser: str,
    chain_len: int | str | None,
    ngram: bool | None,
    runtime: str,
    cuda_graph: str,
    packed_weights: Path | None,
    verify: bool,
) -> None:
    """Serve an artifact of eagle3-export, its folder or its model.pte, behind OpenAI's API.

    The endpoints are chat completions, completions, responses, Anthropic's messages, models, /health and /metrics.
    The answers equal those without speculation, token for token.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise click.ClickException(f"{missing[0]} is not installed: type pip install 'eagle3-export[serve]'")
    try:
        key = None if api_key_file is None else read_key(api_key_file)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    find_model(artifact)
    listening = bind(host, port)

    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # only the model's process imports it
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # one says that torch is missing
    common = {name: value for name, value in (("chain_len", chain_len), ("ngram", ngram)) if value is not None}
    loading = {"runtime": runtime, "cuda_graph": cuda_graph, "packed_weights": packed_weights, "verify": verify}
    verbose = click.get_current_context().meta.get("verbose", False)
    process = ModelProcess(Settings(artifact, parallel, common, loading, verbose, sessions, sessions_size))
    if key is None and host not in ("127.0.0.1", "localhost", "::1"):
        tell(f"Anyone who reaches {host} may use this model: give --api-key-file to change that.")
    try:
        from eagle3.runner.serve.server import serve  # takes a second, in which the model is loaded

        serve(
            process, artifact, listening, model_id, key, parallel, max_queue, grace, given, tool_parser,
            ("localhost", host, *allowed_hosts), allowed_origins,
        )  # fmt: skip
    finally:
        process.close()
        listening.close()


def read_key(file: Path) -> str:
    """Return the key that requests must send. Raises ValueError for a file without a key."""
    key = file.read_text(encoding="utf-8").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise ValueError(f"{file} has no key: give it a line of printable ASCII")
    return key


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address, before anything is loaded. Raises ClickException if the address is invalid
    or in use."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family)
    except OSError as error:
        raise click.ClickException(f"{host} is no address of this machine: {error.strerror or error}") from error
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
        listening.listen(1)  # makes the bind of a second server fail now
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise click.ClickException(
                f"{host} is no address of this machine: give --host 0.0.0.0 for all of its networks, or "
                "127.0.0.1 for this machine alone"
            ) from error
        raise click.ClickException(
            f"port {port} of {host} cannot be used ({error.strerror}): give another --port, 0 for a free one"
        ) from error
    return listening
