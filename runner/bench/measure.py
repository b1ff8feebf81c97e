"""Several ways through the same prompts, taking turns: every claim of speed is a ratio within such a run."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from eagle3.runner.bench.ways import Way, Workload
from eagle3.runner.contract import DECODE, SPECULATE, TARGET_VERIFY
from eagle3.runner.hosts.session import Session
from eagle3.runner.model import Result
from eagle3.runner.prompts import Prompt
from eagle3.runner.statistics import GenerationStats


@dataclass(frozen=True)
class Answer:
    """A generation: ``turn`` counts from 0."""

    prompt: Prompt
    turn: int
    result: Result


@dataclass(frozen=True)
class Outcome:
    """What a way gave: the answers of each pass over all prompts, in their order."""

    way: Way
    passes: list[list[Answer]] = field(default_factory=list)

    @property
    def answers(self) -> list[Answer]:
        """Of all passes."""
        return sum(self.passes, [])

    def stats(self, category: str | None = None) -> list[GenerationStats]:
        """Of each pass; of the prompts of one category, where it is named."""
        return [
            total(a.result.stats for a in answers if category in (None, a.prompt.category)) for answers in self.passes
        ]


def total(stats: Iterable[GenerationStats]) -> GenerationStats:
    summed = GenerationStats()
    for each in stats:
        summed.add(each)
    return summed


def measure(
    ways: Sequence[Way], workload: Workload, repeats: int, advance: Callable[[], None]
) -> tuple[list[Outcome], list[dict[str, float]]]:
    """All prompts ``repeats`` times, each prompt every way in turn, after a prompt to warm up.

    Returns what each way gave, and for each pass ``step_milliseconds`` of the first way's session.
    """
    session = ways[0].model.session
    steps, step_ms = session_steps(session), []
    for way in ways:
        way.answer(workload, workload.prompts[0])
    step_milliseconds(steps, repeats=10)
    outcomes = [Outcome(way) for way in ways]
    for _ in range(repeats):
        for outcome in outcomes:
            outcome.passes.append([])
        for prompt in workload.prompts:
            for outcome in outcomes:
                results = outcome.way.answer(workload, prompt)
                outcome.passes[-1] += [Answer(prompt, turn, result) for turn, result in enumerate(results)]
                advance()
        session.seconds, session.calls = defaultdict(float), Counter()  # those of the last result are no steps'
        step_ms.append(step_milliseconds(steps))
    return outcomes, step_ms


def step_milliseconds(calls: Mapping[str, Callable[[], Any]], repeats: int = 100) -> dict[str, float]:
    """Median milliseconds of each call. They take turns, so that a machine's moods fall on all alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: 1000 * sorted(taken)[repeats // 2] for name, taken in times.items()}


def step_position(max_seq_len: int) -> int:
    """Where a step is timed."""
    return min(128, max_seq_len // 2)


def session_steps(session: Session) -> dict[str, Callable[[], Any]]:
    """A step: ``target_verify`` of a whole window, ``decode`` and ``speculate`` where they are there."""
    position, rows = step_position(session.metadata.max_seq_len), session.metadata.chain_len + 1
    tokens, input_pos = torch.arange(1, rows + 1)[None], session.positions[position : position + rows]
    steps: dict[str, Callable[[], Any]] = {TARGET_VERIFY: lambda: session.target_verify(tokens, input_pos)}
    if session.has_decode:
        token = tokens[:, :1].contiguous()
        steps[DECODE] = lambda: session.decode(token, input_pos[:1])
    if session.has_speculate and position + 2 * rows <= session.metadata.max_seq_len:
        steps[SPECULATE] = lambda: session.speculate(tokens, input_pos)
    return steps
