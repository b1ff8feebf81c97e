"""llama.cpp as a way through the prompts: its build, the checkpoints as GGUF files, its server and what that says."""

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.runner.bench.ways import Workload
from eagle3.runner.model import Model, Result
from eagle3.runner.options import Options
from eagle3.runner.prompts import Prompt
from eagle3.runner.statistics import GenerationStats
from eagle3.targets import TARGETS

CONVERTER = "convert_hf_to_gguf.py"
PART = "{part}"
WEIGHT_TYPES = "f32", "q8_0"
CACHE_TYPES = "f32", "f16"
START_SECONDS = 60
DRAFTED = re.compile(r"statistics +draft-eagle3: .*#acc rate/pos = \(([^)]+)\)")


@dataclass(frozen=True)
class Build:
    """A folder that CMake built llama.cpp in, and the sources that it was built of."""

    folder: Path
    source: Path

    @classmethod
    def found(cls, folder: Path) -> "Build":
        """Raises FileNotFoundError where something is missing."""
        folder = folder.absolute()
        cache = folder / "CMakeCache.txt"
        if not cache.is_file():
            raise FileNotFoundError(f"{cache} is missing: give the folder that CMake built llama.cpp in")
        source = source_of(cache.read_text(encoding="utf-8"))
        for path in (folder / "bin" / "llama-server", folder / "bin" / "llama-quantize", source / CONVERTER):
            if not path.is_file():
                raise FileNotFoundError(f"{path} is missing: build llama.cpp as --help says")
        return cls(folder, source)

    def tool(self, name: str) -> str:
        return str(self.folder / "bin" / name)


def source_of(cmake_cache: str) -> Path:
    """The sources' folder, by CMakeCache.txt."""
    return Path(re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.*)$", cmake_cache, re.MULTILINE)[1])


def convert(build: Build, shipped: str, folder: Path, weights: str) -> list[Path]:
    """The shipped target and its draft as GGUF files in ``folder``, those that are not there yet: f32, or quantized
    from it."""
    spec = TARGETS[shipped]
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: [folder / f"{part}-{name}.gguf" for part in ("target", "draft")] for name in ("f32", weights)}
    with tempfile.TemporaryDirectory() as temporary:
        target = with_accepted_tokenizer(spec.checkpoint, Path(temporary))
        for checkpoint, file in zip((target, spec.draft), files["f32"], strict=True):
            command = [sys.executable, str(build.source / CONVERTER), str(checkpoint), "--outtype", "f32"]
            make(file, [*command, "--target-model-dir", str(target), "--outfile", PART])
    for full, file in zip(files["f32"], files[weights], strict=True):
        make(file, [build.tool("llama-quantize"), str(full), PART, weights])
    return files[weights]


def epilog(doc: str) -> str:
    """A script's docstring behind its first paragraph, for ``--help``: click keeps its lines."""
    return "\n\n".join(f"\b\n{paragraph}" for paragraph in doc.split("\n\n")[1:])


def make(file: Path, command: Sequence[str]) -> None:
    """Run a command that writes ``PART``, which becomes the file; nothing where that is there already."""
    if not file.is_file():
        part = file.with_suffix(".part")
        run([str(part) if word == PART else word for word in command])
        part.rename(file)


def with_accepted_tokenizer(checkpoint: Path, folder: Path) -> Path:
    """The checkpoint with a tokenizer that llama.cpp's converter takes a Gemma 4 with. gemma4-tiny's is of another
    kind; prompts and answers are token ids here, so nothing hangs on what they spell."""
    for file in checkpoint.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokenizer["model"]["byte_fallback"] = True
    tokenizer["decoder"] = {"type": "Sequence", "decoders": []}
    path.unlink()
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder


def run(command: Sequence[str]) -> None:
    """Raises ValueError with the last line of what a failing command says."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        raise ValueError(f"{Path(command[0]).name} {command[1]} failed: {last_line(done.stdout)}")


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it says nothing")


@dataclass(frozen=True)
class Server:
    """How llama-server is run: ``threads``, ``weights`` (WEIGHT_TYPES), its ``cache`` (CACHE_TYPES)."""

    build: Build
    threads: int
    weights: str
    cache: str

    @contextmanager
    def started(
        self, model: Model, chain_len: int, target: Path, draft: Path | None, folder: Path
    ) -> Iterator["LlamaWay"]:
        """A server until the end of the context; its log is written into ``folder``."""
        port, log = free_port(), folder / f"llama-server-{chain_len}.log"
        command = [*self.command(target, model.metadata.max_seq_len), "--port", str(port)]
        if draft:
            command += self.speculation(draft, chain_len)
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "LLAMA_ARG_"))}
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        try:
            wait_until_up(process, port, log)
            yield LlamaWay(f"llama.cpp {self.weights}", model, chain_len, port, log)
        finally:
            process.terminate()
            process.wait()

    def command(self, target: Path, context: int) -> list[str]:
        """One slot, nothing kept of an earlier prompt; ``-lv 4`` logs acceptance by position."""
        given = {"-m": target, "-c": context, "-np": 1, "-t": self.threads, "-ctk": self.cache, "-ctv": self.cache}
        given |= {"--cache-ram": 0, "--ctx-checkpoints": 0, "-lv": 4}
        return [self.build.tool("llama-server"), *flags(given)]

    def speculation(self, draft: Path, chain_len: int) -> list[str]:
        given = {"-md": draft, "--spec-type": "draft-eagle3", "--spec-draft-n-max": chain_len}
        return flags(given | {"-ctkd": self.cache, "-ctvd": self.cache})


def flags(given: dict[str, Any]) -> list[str]:
    return [str(part) for pair in given.items() for part in pair]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_up(process: subprocess.Popen, port: int, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < end:
        try:
            if request(port, "GET", "/health")[0] == http.client.OK:
                return
        except OSError:
            pass
        time.sleep(0.05)
    raise ValueError(f"llama-server does not start: {last_line(log.read_text(encoding='utf-8', errors='replace'))}")


@dataclass(frozen=True)
class LlamaWay:
    """llama-server as a way through the prompts (``eagle3.runner.bench.ways.Way``). ``model``: the artifact, whose
    tokenizer and context are taken."""

    artifact: str
    model: Model
    chain_len: int
    port: int
    log: Path

    def answer(self, workload: Workload, prompt: Prompt) -> list[Result]:
        ids = self.model.encode(prompt.first_turn)
        options = Options.of(**workload.options)
        asked = {"prompt": ids, "n_predict": options.max_new_tokens, "temperature": 0, "cache_prompt": False}
        status, reply = request(self.port, "POST", "/completion", asked | {"return_tokens": True})
        if status != http.client.OK:
            raise ValueError(f"llama-server refuses the prompt of line {prompt.line}: {reply}")
        return [result(ids, json.loads(reply), options)]

    @property
    def acceptance(self) -> list[float]:
        """Of all drafts since the first prompt, the share accepted at each position."""
        return acceptance(self.log.read_text(encoding="utf-8", errors="replace"))


def request(port: int, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request(method, path, body and json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def result(prompt: list[int], reply: dict[str, Any], options: Options) -> Result:
    """From llama-server's answer. Its ``predicted_ms`` begins at the first token, as our ``decode_seconds`` does."""
    timings = reply["timings"]
    stats = GenerationStats(
        generations=1,
        prompt_tokens=len(prompt),
        generation_tokens=len(reply["tokens"]),
        prefill_seconds=timings["prompt_ms"] / 1000,
        decode_seconds=timings["predicted_ms"] / 1000,
    )
    finish = "length" if reply["stop_type"] == "limit" else "stop"
    return Result(prompt, reply["tokens"], None, finish, None, options, stats)


def acceptance(log: str) -> list[float]:
    """By the last statistics that a server wrote, which are over all of its prompts."""
    said = DRAFTED.findall(log)
    if not said:
        raise ValueError("llama-server wrote no statistics of its drafts: is this the llama.cpp of 0.3.36?")
    return [float(rate) for rate in said[-1].split(",")]
