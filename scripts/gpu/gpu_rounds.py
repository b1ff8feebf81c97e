"""Times of one artifact on a GPU: a round by each method, its kernels, and prefills."""

import json
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from gpu_tournament import copy_bandwidth

from eagle3.runner.artifact.opening import open_artifact
from eagle3.runner.contract import DRAFT_DECODE, LAUNCHES, PREFILL, SPECULATE, TARGET_VERIFY
from eagle3.runner.hosts import cuda_graph
from eagle3.runner.hosts.opening import open_session
from eagle3.runner.hosts.session import Session
from eagle3.runner.loop.step_times import session_steps, step_milliseconds

PREFILL_ROWS = (128, 1024)
LISTED = 16
"""The number of kernels whose times are listed."""
A_ROUND = "a round, ms"
Facts = dict[str, Any]
copied = cache(copy_bandwidth)
"""Returns the bytes per second that a copy moves, measured once in a process."""


class NotRun(Exception):
    """A part that the step needs is missing; the message names it."""


def measure_round(artifact: Path, graphs: str) -> Facts:
    """Time each method of a round at one position, and compute the round's share of copy bandwidth. Without graphs, the
    facts also have the time of each kernel."""
    facts: Facts = {}
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
        if graphs == "off":
            facts["kernels"] = kernels_of_a_round(calls)
    facts["ms"] = {name: round(value, 3) for name, value in milliseconds.items()}
    weights = {name: recorded(artifact)[name]["weight_bytes"] for name in (TARGET_VERIFY, DRAFT_DECODE)}
    apart = milliseconds[TARGET_VERIFY] + drafts * milliseconds[DRAFT_DECODE]
    taken = milliseconds.get(SPECULATE, apart)
    facts[A_ROUND] = round(taken, 3)
    read = weights[TARGET_VERIFY] + drafts * weights[DRAFT_DECODE]
    facts["of copy bandwidth"] = round(read / (1e-3 * taken) / copied(), 3)
    return facts


def kernels_of_a_round(calls: dict[str, Callable[[], Any]], rounds: int = 5) -> Facts:
    """Return for each kernel, by name and grid, the number of launches in a fused round (a verify if there is none) and
    the total microseconds by CUPTI, the longest first."""
    from torch.profiler import ProfilerActivity, profile, supported_activities

    method = SPECULATE if SPECULATE in calls else TARGET_VERIFY
    with profile(activities=supported_activities() - {ProfilerActivity.CPU} or None) as profiled:
        for _ in range(rounds):
            calls[method]()
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


def measure_prefill(artifact: Path) -> Facts:
    """Time chunks of ``PREFILL_ROWS`` tokens, in one session."""
    facts: Facts = {}
    with opened(artifact, "off", facts) as session:
        metadata = session.metadata
        for rows in PREFILL_ROWS:
            if not metadata.min_prefill <= rows <= metadata.max_prefill:
                facts[f"{rows} tokens"] = f"not run: chunks have {metadata.min_prefill} to {metadata.max_prefill}"
                continue
            prompt = torch.randint(3, metadata.vocab_size, (1, rows))
            calls = {PREFILL: partial(session.prefill, prompt, session.positions[:rows])}
            step_milliseconds(calls, repeats=3)
            taken = step_milliseconds(calls, repeats=20)[PREFILL]
            read = recorded(artifact)[PREFILL]["weight_bytes"] / (1e-3 * taken) / copied()
            facts[f"{rows} tokens"] = {"ms": round(taken, 3), "of copy bandwidth": round(read, 3)}
    return facts


def recorded(artifact: Path) -> dict[str, Any]:
    """Return the launches of each method, as the export recorded them."""
    return json.loads((artifact / "export.json").read_text())[LAUNCHES]


@contextmanager
def opened(folder: Path, graphs: str, facts: Facts) -> Iterator[Session]:
    """Open a session hosted by PyTorch, and close it at the end. The facts say which method was not captured as a
    graph, and why."""
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
