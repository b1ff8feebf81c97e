"""Compares an artifact of gemma4-tiny with the fastest setting of llama.cpp's own EAGLE-3: same checkpoints, prompts,
threads.

llama.cpp comes with the sources of llama-cpp-python; those of 0.3.36 have EAGLE-3. With a C++ compiler and CMake (pip
install cmake), in any folder:

    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36
    tar xzf llama_cpp_python-0.3.36.tar.gz
    cmake -S llama_cpp_python-0.3.36/vendor/llama.cpp -B llama.cpp -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \\
        -DLLAMA_CURL=OFF -DLLAMA_USE_PREBUILT_UI=OFF
    cmake --build llama.cpp --parallel --target llama-server llama-quantize

Then:

    eagle3-export --target-model gemma4-tiny --backend xnnpack --with-decode --speculate --no-logits --output-dir out
    python scripts/bench/bench_llama_cpp.py out llama.cpp --threads 2

1. Each setting of ``grid`` answers all prompts in few tokens, one server at a time. It is run twice, far apart, and the
   faster run counts, so that a stall of the machine does not decide. A setting whose server fails is left out.
2. ``comparable`` chooses, for each type of weight, the setting without speculation and the fastest settings.
3. These and our own configurations run all prompts several times, in turn.
"""

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import click

from eagle3.runner import load
from eagle3.runner.commands.batch import progress
from eagle3.runner.commands.bench_figures import cores, divergence, machine, speeds, spread, versions
from eagle3.runner.commands.bench_measure import (
    Outcome,
    Workload,
    check_configurations,
    configurations_of,
    make_workload,
    measure,
    total,
)
from eagle3.runner.commands.bench_report import identity_text, rate_text, rendered, spread_text
from eagle3.runner.hosts.executorch_host import load_runtime
from eagle3.runner.loop.statistics import GenerationStats
from eagle3.runner.model import Model, Result
from eagle3.runner.options import Options
from eagle3.runner.system.command import OneLineFailures, calm_stderr
from eagle3.runner.text.prompts import Prompt
from eagle3.targets import TARGETS

PROMPTS = Path(__file__).parents[1] / "prompts.jsonl"
TARGET = "gemma4-tiny"
CONVERTER, PART = "convert_hf_to_gguf.py", "{part}"
WEIGHT_TYPES, DRAFT_TYPES, CACHE_TYPES = ("f32", "q8_0", "q4_0", "q4_k_m"), ("f32", "q8_0"), ("f32", "f16")
START_SECONDS, ANSWER_SECONDS, STOP_SECONDS = 60, 600, 10
DRAFTED = re.compile(r"statistics +draft-eagle3: .*#acc rate/pos = \(([^)]+)\)")
PEERS = {"none": ("f32",), "8da8w": ("q8_0",), "8da4w": ("q4_0", "q4_k_m")}
"""Maps a recipe of ours (``--qlinear``) to llama.cpp's types of weight of the same width."""
CHAIN_LENGTHS, SEARCH_TOKENS, TURNS = range(1, 8), 64, 2
FINALISTS = 4
"""The number of settings with speculation, for each type of weight, that are measured again."""


@dataclass(frozen=True)
class Build:
    """A folder in which CMake built llama.cpp, and the folder of its sources."""

    folder: Path
    source: Path

    @classmethod
    def found(cls, folder: Path) -> "Build":
        """Find a build in ``folder``. Raises FileNotFoundError for a missing file."""
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
    """Return the folder of the sources, which CMakeCache.txt names."""
    return Path(re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.*)$", cmake_cache, re.MULTILINE)[1])


@dataclass(frozen=True)
class GgufFiles:
    """A folder of GGUF files: target and draft, one file for each type of weight."""

    folder: Path

    def target(self, weights: str) -> Path:
        return self.folder / f"target-{weights}.gguf"

    def draft(self, weights: str) -> Path:
        return self.folder / f"draft-{weights}.gguf"


def convert(build: Build, shipped: str, folder: Path, types: Sequence[str]) -> GgufFiles:
    """Write the shipped target in ``types`` and its draft in DRAFT_TYPES into ``folder``: as f32, and quantized from
    it. An existing file is kept."""
    spec, files = TARGETS[shipped], GgufFiles(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        target = with_accepted_tokenizer(spec.checkpoint, Path(temporary))
        for checkpoint, file in ((target, files.target("f32")), (spec.draft, files.draft("f32"))):
            command = [sys.executable, str(build.source / CONVERTER), str(checkpoint), "--outtype", "f32"]
            make(file, [*command, "--target-model-dir", str(target), "--outfile", PART])
    for named, wanted in ((files.target, types), (files.draft, DRAFT_TYPES)):
        for weights in wanted:
            make(named(weights), [build.tool("llama-quantize"), str(named("f32")), PART, weights])
    return files


def epilog(doc: str) -> str:
    """Return a script's docstring without its first paragraph, for ``--help``, with marks by which click keeps its
    lines."""
    return "\n\n".join(f"\b\n{paragraph}" for paragraph in doc.split("\n\n")[1:])


def make(file: Path, command: Sequence[str]) -> None:
    """Run a command that writes ``PART``, which is then renamed to the file. An existing file is kept."""
    if not file.is_file():
        part = file.with_suffix(".part")
        run([str(part) if word == PART else word for word in command])
        part.rename(file)


def with_accepted_tokenizer(checkpoint: Path, folder: Path) -> Path:
    """Return a copy of the checkpoint with a tokenizer that llama.cpp's converter accepts for a Gemma 4. gemma4-tiny's
    tokenizer is of another kind. Prompts and answers are token ids here, so their text does not matter."""
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
    """Run a command. Raises ValueError with the last line of its output if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        raise ValueError(f"{Path(command[0]).name} {command[1]} failed: {last_line(done.stdout)}")


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it says nothing")


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
    """llama-server, measured like a ``Configuration`` of ``eagle3.runner.commands.bench_measure``. ``model``: the
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


Start = Callable[[Setting], AbstractContextManager[LlamaCppConfiguration]]


@dataclass(frozen=True)
class Tried:
    """A setting and its tokens per second after the first token of each completion, or None and the reason if its
    server failed."""

    setting: Setting
    tokens_per_second: float | None = None
    failure: str | None = None

    def as_json(self) -> dict[str, Any]:
        found = {"failure": self.failure} if self.failure else {"decode_tokens_per_second": self.tokens_per_second}
        return {"setting": asdict(self.setting)} | found


def grid(weights: str) -> list[Setting]:
    """Return all settings of a type of weight; the first is without speculation."""
    drafting = product(CHAIN_LENGTHS, DRAFT_TYPES, (True, False))
    return [Setting(weights), *(Setting(weights, *each) for each in drafting)]


def search(settings: Sequence[Setting], start: Start, workload: Workload, advance: Callable[[], None]) -> list[Tried]:
    """Run the prompts ``TURNS`` times with each setting and keep the fastest pass. A server that failed is not started
    again."""
    best: dict[Setting, Tried] = {}
    for _ in range(TURNS):
        for setting in settings:
            before = best.get(setting)
            if before is None or before.failure is None:
                best[setting] = _faster(before, _tried(setting, start, workload))
            advance()
    return list(best.values())


def _faster(before: Tried | None, now: Tried) -> Tried:
    """Return the trial with more tokens per second. If either trial failed, return the failed one."""
    if before is None or now.failure is not None:
        return now
    return max(before, now, key=lambda tried: tried.tokens_per_second)


def _tried(setting: Setting, start: Start, workload: Workload) -> Tried:
    try:
        with start(setting) as configuration:
            configuration.complete(workload, workload.prompts[0])  # the warm-up
            completions = sum((configuration.complete(workload, prompt) for prompt in workload.prompts), [])
    except ServerError as error:
        return Tried(setting, failure=error.reason)
    return Tried(setting, total(completion.stats for completion in completions).decode_tokens_per_second)


def comparable(tried: Sequence[Tried]) -> dict[str, list[Setting]]:
    """Map each type of weight to its setting without speculation and its FINALISTS fastest with speculation. Types
    without a working setting of either kind are left out. Raises ValueError if no type is left."""
    running = [each for each in tried if each.failure is None]
    found = {}
    for weights in dict.fromkeys(each.setting.weights for each in running):
        ranked = sorted(running, key=lambda each: -each.tokens_per_second)
        settings = [each.setting for each in ranked if each.setting.weights == weights]
        plain = [setting for setting in settings if not setting.chain_len]
        drafting = [setting for setting in settings if setting.chain_len]
        if plain and drafting:
            found[weights] = plain + drafting[:FINALISTS]
    if not found:
        failed = [each for each in tried if each.failure is not None]
        raise ValueError(
            f"{len(failed)} of llama.cpp's {len(tried)} settings fail and no type of weight is left that runs with "
            f"speculation and without; the first, {failed[0].setting}: {failed[0].failure}"
        )
    return found


def use_threads(count: int) -> None:
    """Set the threads of XNNPACK and of ExecuTorch's attention."""
    load_runtime()
    with calm_stderr():
        from executorch.extension.pybindings.portable_lib import _unsafe_reset_threadpool

        _unsafe_reset_threadpool(count)


def decode_rates(outcome: Outcome) -> list[float]:
    """Return the tokens per second of each pass, without the time of the prompts."""
    return [stats.decode_tokens_per_second for stats in outcome.stats()]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    return spread(one / other for one, other in zip(ours, theirs, strict=True))


def make_report(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the report. ``outcomes``: ours without speculation and with it, then llama.cpp's; for each type of weight,
    the outcome without speculation is first."""
    ours, ours_drafting, *theirs = outcomes
    configurations, first = [], [completion.result.token_ids for completion in ours.completions]
    for outcome in outcomes:
        if not outcome.configuration.chain_len:
            alone = outcome
        figures = {
            "way": outcome.configuration.artifact,
            "chain_len": outcome.configuration.chain_len,
            **speeds(outcome.stats()),
        }
        if outcome.configuration.chain_len:
            figures["ratio_to_no_speculation"] = ratio(decode_rates(outcome), decode_rates(alone))
            rates = drafted_rates(outcome)
            figures |= {"acceptance_rate_per_position": rates, "mean_acceptance_length": round(1 + sum(rates), 4)}
        configurations.append(figures | {"divergence": divergence(outcome.completions, first)})
    found = {}
    for weights in dict.fromkeys(outcome.configuration.setting.weights for outcome in theirs):
        plain, *drafting = (outcome for outcome in theirs if outcome.configuration.setting.weights == weights)
        fastest, best = fastest_of(drafting), fastest_of([*drafting, plain])
        found[weights] = {
            "best_setting": asdict(best.configuration.setting),
            "without_speculation": ratio(decode_rates(ours), decode_rates(plain)),
            "with_speculation": ratio(decode_rates(ours_drafting), decode_rates(fastest)),
            "with_speculation_to_its_best": ratio(decode_rates(ours_drafting), decode_rates(best)),
        }
    return {"ways": configurations, "ours_to_llama_cpp": found}


def fastest_of(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome with the fastest median of its passes, the first of several equal ones."""
    return max(outcomes, key=lambda outcome: median(decode_rates(outcome)))


def drafted_rates(outcome: Outcome) -> list[float]:
    if isinstance(outcome.configuration, LlamaCppConfiguration):
        return outcome.configuration.acceptance
    return [round(rate, 4) for rate in total(outcome.stats()).acceptance_rate_per_position]


def as_text(report: dict[str, Any]) -> str:
    rows = []
    for figures in report["ways"]:
        rates, to_plain = figures.get("acceptance_rate_per_position"), figures.get("ratio_to_no_speculation")
        row = {"": figures["way"], "chain length": str(figures["chain_len"])}
        row["decode, tokens/s"] = rate_text(figures["decode_tokens_per_second"])
        row["to no speculation"] = spread_text(to_plain, 2) if to_plain else "1"
        row["prompts too, tokens/s"] = rate_text(figures["tokens_per_second"])
        row["acceptance by position"] = " ".join(f"{rate:.3f}" for rate in rates) if rates else "-"
        rows.append(row)
    lines = []
    for weights, found in report["ours_to_llama_cpp"].items():
        lines.append(f"llama.cpp at its best: {Setting(**found['best_setting'])}")
        for name in ("without_speculation", "with_speculation", "with_speculation_to_its_best"):
            lines.append(f"ours to llama.cpp {weights}, {name.replace('_', ' ')}: {spread_text(found[name], 2)}")
    first, *others = report["ways"]
    for figures in others:
        other = f"{first['way']}, chain length {first['chain_len']}"
        lines.append(
            f"{figures['way']}, chain length {figures['chain_len']}: {identity_text(figures['divergence'], other)}"
        )
    asked = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in report["asked"].items())
    lines += failure_lines(report["search"])
    tables = rendered(rows), rendered(search_cells(report["search"]))
    return "\n\n".join([f"{asked}; {report['machine']}", *tables, "\n".join(lines)])


def search_cells(tried: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the table of settings with speculation: a column per chain length, a row per combination of the other
    settings."""
    drafting = [(Setting(**each["setting"]), each) for each in tried if each["setting"]["chain_len"]]
    lengths = {str(setting.chain_len): "-" for setting, _ in drafting}
    rows: dict[str, dict[str, str]] = {}
    for setting, each in drafting:
        name = f"{setting.weights}, {setting.drafting}"
        row = rows.setdefault(name, {"tokens/s (the faster of two runs) by chain length": name} | lengths)
        if "failure" not in each:
            row[str(setting.chain_len)] = f"{each['decode_tokens_per_second']:.0f}"
    return list(rows.values())


def failure_lines(tried: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each reason of a failure, with all settings that failed for it."""
    left_out: dict[str, list[str]] = {}
    for each in tried:
        if "failure" in each:
            left_out.setdefault(each["failure"], []).append(str(Setting(**each["setting"])))
    return [f"left out: {'; '.join(settings)}: {reason}" for reason, settings in left_out.items()]


def types_beside(model: Model, asked: Sequence[str]) -> Sequence[str]:
    """Return the types of weight in ``asked``, or else those of the same width as the artifact's recipe."""
    recipe = model.metadata.manifest.get("qlinear")
    if not asked and recipe not in PEERS:
        raise ValueError(f"llama.cpp has no type of weight beside --qlinear {recipe}: give --type")
    return tuple(dict.fromkeys(asked)) or PEERS[recipe]


def measured(
    artifact: Path, build: Build, threads: int, weights: Sequence[str], cache: str, repeats: int, folder: Path | None
) -> dict[str, Any]:
    """Return the measurements. ``folder`` keeps the GGUF files for later runs; None makes them in a temporary
    folder."""
    workload = make_workload(PROMPTS, {}, chat=False)
    briefly = make_workload(PROMPTS, {"max_new_tokens": SEARCH_TOKENS}, chat=False)
    use_threads(threads)
    with ExitStack() as stack:
        model = stack.enter_context(load(artifact, defer=True))
        if model.metadata.manifest.get("target") != TARGET:
            raise ValueError(
                f"{artifact} has the target {model.metadata.manifest.get('target')}: export {TARGET} instead"
            )
        weights = types_beside(model, weights)
        configurations = configurations_of(str(artifact), model, None)
        check_configurations(configurations, workload)
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        files = convert(build, TARGET, folder or temporary, weights)
        server = Server(build, files, threads, cache, model, temporary)
        with progress() as bar:
            settings = sum(map(grid, weights), [])
            trying = bar.add_task("trying settings", total=TURNS * len(settings))
            tried = search(settings, server.started, briefly, lambda: bar.advance(trying))
            measuring = bar.add_task("measuring", total=None)
            theirs = [stack.enter_context(server.started(each)) for each in sum(comparable(tried).values(), [])]
            outcomes, step_ms = measure([*configurations, *theirs], workload, repeats, lambda: bar.advance(measuring))
        report = make_report(outcomes) | {"search": [each.as_json() for each in tried]}
    asked = {"threads": threads, "types": " ".join(weights), "cache_type": cache}
    asked |= {"prompts": len(workload.prompts), "new_tokens": Options.max_new_tokens, "passes": repeats}
    asked |= {"new_tokens_of_the_search": SEARCH_TOKENS}
    steps = {name: spread(ms[name] for ms in step_ms) for name in step_ms[0]}
    return {"asked": asked} | report | {"step_ms": steps, "machine": machine(None), "versions": versions()}


@click.command(cls=OneLineFailures, epilog=epilog(__doc__))
@click.argument("artifact", type=click.Path(path_type=Path))
@click.argument("llama_cpp", type=click.Path(path_type=Path))
@click.option(
    "--threads", type=click.IntRange(1, cores()), default=cores(), show_default=True, help="Threads of each side."
)
@click.option(
    "--type",
    "weights",
    type=click.Choice(WEIGHT_TYPES),
    multiple=True,
    help="llama.cpp's type of weights; repeatable. Default: f32 for float32, q8_0 for 8da8w, q4_0 and q4_k_m "
    "for 8da4w.",
)
@click.option(
    "--cache-type", type=click.Choice(CACHE_TYPES), default="f32", show_default=True, help="llama.cpp's KV caches."
)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Passes over all prompts.")
@click.option("--folder", type=click.Path(path_type=Path), help="Keep the GGUF files here.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    artifact: Path,
    llama_cpp: Path,
    threads: int,
    weights: Sequence[str],
    cache_type: str,
    repeats: int,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Measure an ARTIFACT of gemma4-tiny beside LLAMA_CPP, a folder with a build of it, at its fastest settings.

    First, llama-server answers all prompts of scripts/prompts.jsonl once, up to 64 tokens each, in every setting: draft
    in f32 or q8_0, chain length 1 to 7, backend sampling of the draft on or off. Then these take turns with each
    prompt, greedily and up to 128 tokens: the artifact without and with speculation and, for each --type, llama-server
    without speculation and in its four fastest settings. The best setting is the one with the best median over the
    passes. A setting whose server fails in the search is named and left out.

    Nothing is kept from one prompt to the next. Decoding is timed from the first token to the last by either side's own
    clock, so no figure includes HTTP; "prompts too" adds the time to the first token. Ratios are computed within a
    pass. Figures are medians over the passes, with minimum and maximum. --type and --cache-type apply only to
    llama.cpp: the artifact keeps the weights and caches of its export.
    """
    build = Build.found(llama_cpp)
    report = measured(artifact, build, threads, weights, cache_type, repeats, folder)
    click.echo(json.dumps(report) if as_json else as_text(report))


if __name__ == "__main__":
    main()
