"""Makes the checks and measurements that need an NVIDIA GPU, in stages of at most 8 minutes.

    python scripts/gpu/gpu_check.py                                # all stages
    python scripts/gpu/gpu_check.py --only wide --only round       # wide makes the artifact for round and prefill
    python scripts/gpu/gpu_check.py --only tiny --elsewhere out    # with gemma4-tiny's artifact made on another machine
    python scripts/gpu/gpu_check.py --only round --wide out        # with Gemma 4 31B's (bench_export.py, gpu_carry.py)

tiny      compares gemma4-tiny with eager greedy decoding by the same weights, token for token, and reports the first
          divergence and the margin of the two best logits there. The artifact is made elsewhere (or here without using
          the GPU) and with the GPU; each runs with CUDA graphs and without
wide      exports a few full-width layers of Gemma 4 31B with synthetic INT4 weights, using this GPU, and runs them;
          with --wide runs those
kernels   checks the small-M kernels, and compares them with copy bandwidth at 1 to 16 rows, on every linear of that
          model
round     times a round of the full-width layers, with CUDA graphs and without, beside the memory limit and the bounds
          of ``eagle3-inspect --cost``, and each of its kernels
prefill   times chunks of several lengths through those layers

Steps end as ok, failed, or not run with the reason: no GPU, no time left, or a feature that this PyTorch or this
machine lacks. The JSON is written after each step, so an interrupted run loses nothing; the log of every export is
beside it. The exit code is 1 if a step failed.
"""

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import click
import torch
from gpu_steps import Facts, NotRun, Report, met

GIB = 1 << 30
PROMPTS = Path(__file__).parents[1] / "prompts.jsonl"
PREFILL_ROWS = (32, 64, 128, 256, 512, 1024)
LISTED = 16
"""The number of kernels whose times are listed."""
GRAPHS = {"auto": "by CUDA graphs", "off": "without graphs"}


@dataclass(frozen=True)
class Check:
    """The settings of a check. ``work`` is the folder for checkpoints and artifacts, which later stages read."""

    report: Report
    work: Path
    elsewhere: Path | None
    layers: int
    given: Path | None = None

    @cached_property
    def copied(self) -> float:
        """Return the bytes per second that a copy reads and writes."""
        import bench_small_m

        return bench_small_m.copy_bandwidth()

    @property
    def wide(self) -> Path:
        return self.work / f"wide-{self.layers}"

    @property
    def artifact(self) -> Path:
        """The artifact of full-width layers."""
        return self.given or self.wide / "artifact"


# --- tiny


def tiny(check: Check) -> None:
    native, other = check.work / "tiny-native", check.elsewhere or check.work / "tiny-named"
    if check.elsewhere is None:
        check.report.step("export without the GPU", lambda _facts: export_named(check, other))
    _run_tiny(check, "made without the GPU", other)
    check.report.step("export with the GPU", lambda facts: facts.update(export(check, native, *TINY)))
    _run_tiny(check, "made with the GPU", native)


TINY = ("--target-model", "gemma4-tiny")


def export_named(check: Check, output: Path) -> None:
    from eagle3.export.lowering.cuda.backend import local_arch
    from eagle3.export.lowering.cuda.named_gpu import check_named_versions

    try:
        check_named_versions()
    except ValueError as error:
        raise NotRun(error) from error
    export(check, output, *TINY, "--cuda-arch", local_arch(), hidden=True)


def _run_tiny(check: Check, made: str, folder: Path) -> None:
    for graphs, how in GRAPHS.items():
        check.report.step(f"{made}, {how}", lambda facts, graphs=graphs: run_tiny(facts, folder, graphs))


def run_tiny(facts: Facts, folder: Path, graphs: str) -> None:
    with opened(folder, graphs, facts) as session:
        from gpu_greedy import EagerGreedy, compare

        from eagle3.runner.text.text import Text

        text = Text(folder)
        prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()[:8]]
        facts |= compare(session, EagerGreedy(), [text.encode(prompt) for prompt in prompts])


# --- wide


def wide(check: Check) -> None:
    if check.given is None:
        check.report.step(f"checkpoint of {check.layers} full-width layers", lambda _facts: write_layers(check))
        check.report.step("export with the GPU", lambda facts: facts.update(export_layers(check)))
    check.report.step("runs", lambda facts: run_layers(facts, check))


def write_layers(check: Check) -> None:
    import published_heads
    import published_widths

    target, draft = (check.wide / name for name in ("target", "draft"))
    if (draft / "config.json").is_file():
        raise NotRun(f"it is there, in {check.wide}")
    target.mkdir(parents=True, exist_ok=True)
    config = published_widths.gemma4_config(check.layers)
    published_widths.save_target(target, config)
    published_heads.eagle3(config).save(draft)


def export_layers(check: Check) -> Facts:
    target, draft = (str(check.wide / name) for name in ("target", "draft"))
    flags = ("--target-model", "gemma4-31B", "--checkpoint", target, "--draft", draft)
    return export(check, check.artifact, *flags)


def run_layers(facts: Facts, check: Check) -> None:
    from eagle3.runner.inspect.program import inspect_program
    from eagle3.runner.rounds.loop import complete

    with opened(check.artifact, "auto", facts) as session:
        torch.cuda.reset_peak_memory_stats()
        prompt = torch.randint(3, session.metadata.vocab_size, (256,)).tolist()
        complete(session, prompt, max_new_tokens=16)  # loads kernels and captures graphs
        start = time.perf_counter()
        result = complete(session, prompt, max_new_tokens=128)
        facts["tokens/s"] = round(len(result.token_ids) / (time.perf_counter() - start), 1)
        facts["GPU memory GiB"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
        found = inspect_program(made(check.artifact) / "model.pte", session.metadata)["gpu_memory"]
        facts["counted GiB"] = round((found["total"] - found["context"]) / GIB, 2)


# --- kernels


def kernels(check: Check) -> None:
    import bench_small_m

    names = dict.fromkeys((bench_small_m.GOAL_LINEAR, *bench_small_m.LINEARS))
    for name in names:
        check.report.step(name, lambda facts, name=name: facts.update(time_kernel(name, check.copied)))


def time_kernel(name: str, copied: float) -> Facts:
    import bench_small_m as bench

    timing = bench.time_linear(name, copied, dequantizing=False)
    torch.cuda.empty_cache()
    share, growth = timing.copy_share[8], timing.growth
    goals = (
        (f"{bench.GOAL_SHARE:.0%} of copy bandwidth", share >= bench.GOAL_SHARE),
        (f"8 rows in {bench.GOAL_GROWTH} x the time of 1", growth <= bench.GOAL_GROWTH),
    )
    return {
        "copy, TB/s": round(copied / 1e12, 3),
        "us at 1 to 16 rows": [round(timing.us[rows], 1) for rows in sorted(timing.us)],
        "of copy bandwidth at 8": round(share, 3),
        "8 rows / 1 row": round(growth, 3),
        "goals": met(goals),
    }


# --- round


def measure_rounds(check: Check) -> None:
    check.report.step("counted", lambda facts: facts.update(counted_round(check)))
    for graphs, how in GRAPHS.items():
        check.report.step(how, lambda facts, graphs=graphs: measure_round(facts, check, graphs))
    check.report.step("its kernels", lambda facts: facts.update(kernels_of_a_round(check)))


def kernels_of_a_round(check: Check) -> Facts:
    """Return for each kernel, by name and grid, the number of launches in a fused round (a verify if there is none) and
    the total microseconds by CUPTI, the longest first."""
    from torch.profiler import ProfilerActivity, profile, supported_activities

    from eagle3.runner.contract import SPECULATE, TARGET_VERIFY
    from eagle3.runner.rounds.step_times import session_steps

    rounds = 5
    with opened(check.artifact, "off", {}) as session:
        steps = session_steps(session)
        method = SPECULATE if SPECULATE in steps else TARGET_VERIFY
        call = steps[method]
        call()
        with profile(activities=supported_activities() - {ProfilerActivity.CPU} or None) as profiled:
            for _ in range(rounds):
                call()
    with tempfile.TemporaryDirectory() as folder:
        profiled.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    return {"of": method} | kernel_times(events, rounds)


def kernel_times(events: list[dict[str, Any]], rounds: int) -> Facts:
    """Return launches and microseconds per round by kernel, from the events of a trace of ``rounds`` rounds."""
    found: dict[tuple, list[float]] = {}
    for event in events:
        if event.get("cat") == "kernel":
            found.setdefault((event["name"], *event["args"]["grid"]), []).append(event["dur"])
    longest = sorted(found.items(), key=lambda item: -sum(item[1]))
    times = {
        f"{name} {grid}": [len(times) / rounds, round(sum(times) / rounds, 1)]
        for (name, *grid), times in longest[:LISTED]
    }
    return {"all, us": round(sum(map(sum, found.values())) / rounds, 1)} | times


def counted_round(check: Check) -> Facts:
    """Return lower bounds of a round in milliseconds: each weight read once; all kernels in sequence, with and without
    launch times.

    Raises NotRun if the GPU is not in the table.
    """
    from eagle3.runner.artifact.opening import find_model, load_artifact
    from eagle3.runner.hardware.gpus import GPUS
    from eagle3.runner.inspect.cost.bound import cost_of

    model = find_model(made(check.artifact))
    here = torch.cuda.get_device_name()
    names = tuple(name for name in GPUS if name in here)
    if not names:
        raise NotRun(f"{here} is not in the table of GPUs")
    found = cost_of(model, load_artifact(model, True).metadata, names)["round"]
    bound = found["bounds"][names[0]]
    times = {key: round(1000 * bound[key], 3) for key in ("limit", "bound", "bound_with_launches")}
    return {"launches": found["launches"], "ms": times}


def measure_round(facts: Facts, check: Check, graphs: str) -> None:
    """Time each method of a round at one position, and compute the round's share of copy bandwidth."""
    from eagle3.runner.contract import DRAFT_DECODE, SPECULATE, TARGET_VERIFY
    from eagle3.runner.rounds.step_times import session_steps, step_milliseconds

    with opened(check.artifact, graphs, facts) as session:
        metadata = session.metadata
        if not metadata.has_draft:
            raise NotRun("it has no draft head")
        drafts, rows = -(-metadata.chain_len // metadata.proposals), metadata.min_prefill
        prompt = torch.arange(1, rows + 1)[None]
        feature = session.prefill(prompt, session.positions[:rows]).feature[:, :1]
        calls: dict[str, Callable[[], Any]] = session_steps(session)
        calls[DRAFT_DECODE] = lambda: session.draft_decode(prompt[:, :1], feature, session.positions[:1])
        step_milliseconds(calls, repeats=10)
        milliseconds = step_milliseconds(calls, repeats=50)
    facts["ms"] = {name: round(value, 3) for name, value in milliseconds.items()}
    launches = recorded(check.artifact)
    weights = {name: launches[name]["weight_bytes"] for name in (TARGET_VERIFY, DRAFT_DECODE)}
    apart = milliseconds[TARGET_VERIFY] + drafts * milliseconds[DRAFT_DECODE]
    read = weights[TARGET_VERIFY] + drafts * weights[DRAFT_DECODE]
    facts["a round, ms"] = round(milliseconds.get(SPECULATE, apart), 3)
    facts["of copy bandwidth"] = round(read / (1e-3 * milliseconds.get(SPECULATE, apart)) / check.copied, 3)


# --- prefill


def prefill(check: Check) -> None:
    for rows in PREFILL_ROWS:
        check.report.step(f"{rows} tokens", lambda facts, rows=rows: measure_prefill(facts, check, rows))


def measure_prefill(facts: Facts, check: Check, rows: int) -> None:
    from eagle3.runner.contract import PREFILL
    from eagle3.runner.rounds.step_times import step_milliseconds

    with opened(check.artifact, "off", facts) as session:
        metadata = session.metadata
        if not metadata.min_prefill <= rows <= metadata.max_prefill:
            raise NotRun(f"its chunks are of {metadata.min_prefill} to {metadata.max_prefill} tokens")
        prompt = torch.randint(3, metadata.vocab_size, (1, rows))
        calls = {PREFILL: lambda: session.prefill(prompt, session.positions[:rows])}
        step_milliseconds(calls, repeats=3)
        torch.cuda.reset_peak_memory_stats()
        taken = step_milliseconds(calls, repeats=20)[PREFILL]
        facts["GPU memory GiB"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
    facts |= {"ms": round(taken, 3), "tokens/s": round(1000 * rows / taken)}
    read = recorded(check.artifact)[PREFILL]["weight_bytes"]
    facts["of copy bandwidth, weights read once"] = round(read / (1e-3 * taken) / check.copied, 3)


# --- shared by all stages


def export(check: Check, output: Path, *args: str, hidden: bool = False) -> Facts:
    """Run eagle3-export in a process of its own and return the seconds of its stages. ``hidden``: it sees no GPU.

    Its log is ``<folder>-export.log`` beside the JSON. Raises NotRun if this machine lacks a compiler, RuntimeError
    with the log's last line if the export fails or does not end in time.
    """
    from eagle3.export.lowering.cuda.inductor.toolchain import cpp_compiler, cuda_home

    try:
        cuda_home(), cpp_compiler()
    except FileNotFoundError as error:
        raise NotRun(error) from error
    command = [sys.executable, "-m", "eagle3.export.cli", "--verbose", "--overwrite", "--output-dir", str(output)]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | ({"CUDA_VISIBLE_DEVICES": ""} if hidden else {})
    log = check.report.folder / f"{'-'.join(output.relative_to(check.work).parts)}-export.log"
    with log.open("w") as file:
        try:
            code = subprocess.run(
                [*command, *args], env=environment, stdout=file, stderr=file, timeout=max(check.report.left - 30, 1)
            ).returncode
        except subprocess.TimeoutExpired:
            code = "no end in time"
    if code:
        said = log.read_text().strip().splitlines() or ["no output"]
        raise RuntimeError(f"{code}, see {log.name}: {said[-1]}")
    stages = json.loads((output / "export.json").read_text())["stages"]
    return {stage["stage"]: stage["seconds"] for stage in stages}


def made(folder: Path) -> Path:
    """Return ``folder``. Raises NotRun if it holds no artifact."""
    if not (folder / "model.pte").is_file():
        raise NotRun(f"there is no artifact in {folder}")
    return folder


@contextmanager
def opened(folder: Path, graphs: str, facts: Facts) -> Iterator[Any]:
    """Open a session hosted by PyTorch, and close it at the end. The facts say which method was not captured as a
    graph, and why."""
    folder = made(folder)
    from eagle3.runner.artifact.opening import open_artifact
    from eagle3.runner.hosts import cuda_graph
    from eagle3.runner.hosts.opening import open_session

    refused, outcome = _Lines(), ""
    cuda_graph.log.addHandler(refused)
    try:
        session = open_session(open_artifact(folder), "torch", graphs)
        try:
            yield session
            outcome = "captured"
        finally:
            session.close()
    finally:
        cuda_graph.log.removeHandler(refused)
        if graphs == "auto" and (refused.lines or outcome):
            facts["graphs"] = "; ".join(refused.lines) or outcome


class _Lines(logging.Handler):
    """Collects the lines that are logged while it is registered."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def recorded(folder: Path) -> dict[str, Any]:
    """Return the launches of each method, as recorded in ``export.json``."""
    from eagle3.runner.inspect.cost.bound import launches_of

    return launches_of(json.loads((folder / "export.json").read_text()), str(folder))


STAGES: dict[str, Callable[[Check], None]] = {
    "tiny": tiny,
    "wide": wide,
    "kernels": kernels,
    "round": measure_rounds,
    "prefill": prefill,
}


@click.command(epilog="Example: python scripts/gpu/gpu_check.py --only wide --only round --layers 6")
@click.option("--only", type=click.Choice(list(STAGES)), multiple=True, help="Run this stage; may be repeated. [all]")
@click.option("--layers", default=4, show_default=True, help="Full-width layers of Gemma 4 31B.")
@click.option("--elsewhere", type=click.Path(path_type=Path, exists=True), help="gemma4-tiny exported without a GPU.")
@click.option(
    "--wide",
    "given",
    type=click.Path(path_type=Path, exists=True),
    help="Gemma 4 31B, or some layers, exported before.",
)
@click.option(
    "--output-dir", type=click.Path(path_type=Path, file_okay=False), default="gpu_check", show_default=True,
    help="For gpu_check.json and the exports' logs.",
)  # fmt: skip
@click.option("--work", type=click.Path(path_type=Path, file_okay=False), help="Keep checkpoints and artifacts here.")
def main(
    only: tuple[str, ...],
    layers: int,
    elsewhere: Path | None,
    given: Path | None,
    output_dir: Path,
    work: Path | None,
) -> None:
    """Make the checks and measurements that need a GPU on this machine."""
    here, unable = torch.cuda.is_available(), None
    if not here:
        unable = "this needs an NVIDIA GPU and PyTorch's CUDA build, and found none"
        click.echo(unable)
    machine = this_machine(here)
    click.echo("  ".join(f"{key} {value}" for key, value in machine.items()))
    work = work or Path(tempfile.gettempdir()) / "eagle3-gpu-check"
    work.mkdir(parents=True, exist_ok=True)
    report = Report(output_dir, machine, unable)
    check = Check(report, work.resolve(), elsewhere, layers, given)
    for name, run in STAGES.items():
        if not only or name in only:
            report.stage(name, lambda run=run: run(check))
    sys.exit(1 if report.failed else 0)


def this_machine(with_gpu: bool) -> Facts:
    machine = {"gpu": torch.cuda.get_device_name()} if with_gpu else {"gpu": None}
    machine |= {"torch": str(torch.__version__), "cuda": torch.version.cuda}
    try:
        import triton

        machine["triton"] = triton.__version__
    except ImportError:
        machine["triton"] = None
    return machine


if __name__ == "__main__":
    main()
