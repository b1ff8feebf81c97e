"""Measures llama.cpp as a configuration: starts its server, sends prompts and reads the answers."""

import http.client
import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_build import Build, GgufFiles, last_line

from eagle3.runner.bench.measure import Workload
from eagle3.runner.model import Model, Result
from eagle3.runner.options import Options
from eagle3.runner.rounds.statistics import GenerationStats
from eagle3.runner.text.prompts import Prompt

CACHE_TYPES = "f32", "f16"
START_SECONDS, ANSWER_SECONDS, STOP_SECONDS = 60, 600, 10
DRAFTED = re.compile(r"statistics +draft-eagle3: .*#acc rate/pos = \(([^)]+)\)")


@dataclass(frozen=True)
class Setting:
    """The settings of a llama.cpp server: the type of the target's ``weights`` (WEIGHT_TYPES) and the most draft
    tokens per round (``chain_len``, 0 for no speculation). With speculation they also include the type of the draft
    head's weights (``draft``, DRAFT_TYPES), and ``backend_sampling``: draft tokens are chosen within llama.cpp's graph,
    as llama.cpp does by default."""

    weights: str
    chain_len: int = 0
    draft: str | None = None
    backend_sampling: bool = True

    @property
    def drafting(self) -> str:
        """The setting without the weights and the chain length, as text."""
        sampling = "backend sampling" if self.backend_sampling else "no backend sampling"
        return f"draft {self.draft}, {sampling}" if self.chain_len else "no speculation"

    def __str__(self) -> str:
        chain = f", chain length {self.chain_len}" if self.chain_len else ""
        return f"{self.weights}, {self.drafting}{chain}"


class ServerError(ValueError):
    """Raised if llama-server with ``setting`` does not start, ends early, or refuses a prompt."""

    def __init__(self, setting: Setting, reason: str):
        super().__init__(f"llama.cpp {setting}: {reason}")
        self.setting, self.reason = setting, reason


@dataclass(frozen=True)
class Server:
    """The part of llama-server's command line that all settings share: build, files, number of ``threads``, type of the
    KV ``cache`` (CACHE_TYPES). ``model``: the artifact, whose tokenizer and context length are used. Logs go into
    ``logs``."""

    build: Build
    files: GgufFiles
    threads: int
    cache: str
    model: Model
    logs: Path

    @contextmanager
    def started(self, setting: Setting) -> Iterator["LlamaCppConfiguration"]:
        """Run a server within this context. Raises ServerError if it does not start."""
        port = free_port()
        log = self.logs / f"llama-server-{port}.log"
        command = [*self.command(setting), "--port", str(port)]
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "LLAMA_ARG_"))}
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        try:
            configuration = LlamaCppConfiguration(setting, self.model, port, log)
            configuration.wait_until_up(process)
            yield configuration
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def command(self, setting: Setting) -> list[str]:
        """Return the command: one slot, no cache of earlier prompts. ``-lv 4`` logs the acceptance by position."""
        given = {"-m": self.files.target(setting.weights), "-c": self.model.metadata.max_seq_len}
        given |= {"-np": 1, "-t": self.threads, "-ctk": self.cache, "-ctv": self.cache}
        given |= {"--cache-ram": 0, "--ctx-checkpoints": 0, "-lv": 4}
        if not setting.chain_len:
            return [self.build.tool("llama-server"), *flags(given)]
        given |= {"-md": self.files.draft(setting.draft), "-ctkd": self.cache, "-ctvd": self.cache}
        given |= {"--spec-type": "draft-eagle3", "--spec-draft-n-max": setting.chain_len}
        sampling = f"--{'' if setting.backend_sampling else 'no-'}spec-draft-backend-sampling"
        return [self.build.tool("llama-server"), *flags(given), sampling]


def flags(given: dict[str, Any]) -> list[str]:
    return [str(part) for pair in given.items() for part in pair]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass(frozen=True)
class LlamaCppConfiguration:
    """llama-server, measured like a ``Configuration`` of ``eagle3.runner.bench.measure``. ``model``: the
    artifact, whose tokenizer and context length are used."""

    setting: Setting
    model: Model
    port: int
    log: Path

    @property
    def artifact(self) -> str:
        return f"llama.cpp {self.setting.weights}, {self.setting.drafting}"

    @property
    def chain_len(self) -> int:
        return self.setting.chain_len

    def wait_until_up(self, process: subprocess.Popen) -> None:
        """Wait for the server. Raises ServerError if it has ended, or takes longer than START_SECONDS."""
        end = time.monotonic() + START_SECONDS
        while process.poll() is None and time.monotonic() < end:
            try:
                if request(self.port, "GET", "/health")[0] == http.client.OK:
                    return
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(0.05)
        raise ServerError(self.setting, f"llama-server does not start: {last_line(self.said())}")

    def complete(self, workload: Workload, prompt: Prompt) -> list[Result]:
        """Run a prompt. Raises ServerError if the server gives no answer, ValueError for a prompt longer than the
        context."""
        ids = self.model.encode(prompt.first_turn)
        options = Options.of(**workload.options)
        asked = {"prompt": ids, "n_predict": options.max_new_tokens, "temperature": 0, "cache_prompt": False}
        try:
            status, reply = request(self.port, "POST", "/completion", asked | {"return_tokens": True})
        except (OSError, http.client.HTTPException) as error:
            gone = f"llama-server gave no answer to line {prompt.line} ({error})"
            raise ServerError(self.setting, f"{gone}: {last_line(self.said())}") from error
        if status != http.client.OK:
            raise ServerError(self.setting, f"llama-server refuses the prompt of line {prompt.line}: {reply}")
        return [result(ids, json.loads(reply), options)]

    @property
    def acceptance(self) -> list[float]:
        """Return the share of accepted drafts by position, over all prompts since the first."""
        return acceptance(self.said())

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


def request(port: int, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)
    try:
        connection.request(method, path, body and json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def result(prompt: list[int], reply: dict[str, Any], options: Options) -> Result:
    """Return llama-server's reply as a ``Result``. Its ``predicted_ms`` begins at the first token, as our
    ``decode_seconds`` does."""
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
    """Read the acceptance by position from the last statistics in a server's log, which are over all of its prompts."""
    said = DRAFTED.findall(log)
    if not said:
        raise ValueError("llama-server wrote no statistics of its drafts: is this the llama.cpp of 0.3.36?")
    return [float(rate) for rate in said[-1].split(",")]
