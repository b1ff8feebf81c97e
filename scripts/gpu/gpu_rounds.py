"""The stages ``round`` and ``prefill`` of ``gpu_check.py``: times of one artifact of full-width layers, or of several,
which are then compared."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_artifacts import GRAPHS, Check, opened, recorded
from gpu_steps import Facts, NotRun

GIB = 1 << 30
PREFILL_ROWS = (32, 64, 128, 256, 512, 1024)
LISTED = 16
"""The number of kernels whose times are listed."""
A_ROUND = "a round, ms"


def measure_rounds(check: Check) -> None:
    times: dict[str, dict[str, float]] = {how: {} for how in GRAPHS.values()}
    for label, artifact in check.artifacts.items():

        def timed(facts: Facts, graphs: str, artifact: Path = artifact) -> None:
            measure_round(facts, check, artifact, graphs)
            times[GRAPHS[graphs]][artifact.name] = facts[A_ROUND]

        def listed(facts: Facts, artifact: Path = artifact) -> None:
            facts |= kernels_of_a_round(artifact)

        for graphs, how in GRAPHS.items():
            check.report.step(f"{label}{how}", lambda facts, graphs=graphs, timed=timed: timed(facts, graphs))
        check.report.step(f"{label}its kernels", listed)
    if len(check.artifacts) > 1:
        check.report.step("compared", lambda facts: facts.update(compared(times)))


def compared(times: dict[str, dict[str, float]]) -> Facts:
    """Return for each way to run the milliseconds of a round by artifact, and each divided by the first's.

    Raises NotRun if fewer than two artifacts were timed.
    """
    found: Facts = {}
    for how, by_artifact in times.items():
        if len(by_artifact) > 1:
            first = next(iter(by_artifact.values()))
            found[how] = {name: [taken, round(taken / first, 3)] for name, taken in by_artifact.items()}
    if not found:
        raise NotRun("fewer than two artifacts were timed")
    return found


def kernels_of_a_round(artifact: Path) -> Facts:
    """Return for each kernel, by name and grid, the number of launches in a fused round (a verify if there is none) and
    the total microseconds by CUPTI, the longest first."""
    from torch.profiler import ProfilerActivity, profile, supported_activities

    from eagle3.runner.contract import SPECULATE, TARGET_VERIFY
    from eagle3.runner.loop.step_times import session_steps

    rounds = 5
    with opened(artifact, "off", {}) as session:
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


def measure_round(facts: Facts, check: Check, artifact: Path, graphs: str) -> None:
    """Time each method of a round at one position, and compute the round's share of copy bandwidth."""
    from eagle3.runner.contract import DRAFT_DECODE, SPECULATE, TARGET_VERIFY
    from eagle3.runner.loop.step_times import session_steps, step_milliseconds

    with opened(artifact, graphs, facts) as session:
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
    launches = recorded(artifact)
    weights = {name: launches[name]["weight_bytes"] for name in (TARGET_VERIFY, DRAFT_DECODE)}
    apart = milliseconds[TARGET_VERIFY] + drafts * milliseconds[DRAFT_DECODE]
    read = weights[TARGET_VERIFY] + drafts * weights[DRAFT_DECODE]
    facts[A_ROUND] = round(milliseconds.get(SPECULATE, apart), 3)
    facts["of copy bandwidth"] = round(read / (1e-3 * milliseconds.get(SPECULATE, apart)) / check.copied, 3)


def prefill(check: Check) -> None:
    for label, artifact in check.artifacts.items():
        for rows in PREFILL_ROWS:
            check.report.step(
                f"{label}{rows} tokens",
                lambda facts, artifact=artifact, rows=rows: measure_prefill(facts, check, artifact, rows),
            )


def measure_prefill(facts: Facts, check: Check, artifact: Path, rows: int) -> None:
    from eagle3.runner.contract import PREFILL
    from eagle3.runner.loop.step_times import step_milliseconds

    with opened(artifact, "off", facts) as session:
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
    read = recorded(artifact)[PREFILL]["weight_bytes"]
    facts["of copy bandwidth, weights read once"] = round(read / (1e-3 * taken) / check.copied, 3)
