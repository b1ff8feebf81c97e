"""Finds the fastest setting of llama.cpp: each setting is tried twice, and the fastest are measured again.

1. ``search``: each setting of ``grid`` answers all prompts in few tokens, one server at a time. Each setting is run
   twice, far apart, and the faster run counts, so that a stall of the machine does not decide.
2. ``comparable`` chooses, for each type of the target's weights, the setting without speculation and the fastest
   settings.
3. ``measure_beside``: the chosen settings and our own configurations run all prompts several times, in turn.

Equally fast settings keep the order of ``grid``: shorter chains and llama.cpp's defaults first. A setting whose server
fails is left out, whenever that happens; ``Tried`` has the reason.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from llama_build import DRAFT_TYPES
from llama_server import LlamaCppConfiguration, ServerError, Setting

from eagle3.runner.bench.measure import Configuration, Outcome, Workload, measure, total

PEERS = {"none": ("f32",), "8da8w": ("q8_0",), "8da4w": ("q4_0", "q4_k_m")}
"""Maps a recipe of ours (``--qlinear``) to llama.cpp's types of weight of the same width."""
CHAIN_LENGTHS = range(1, 8)
SEARCH_TOKENS = 64
TURNS = 2
FINALISTS = 4
"""The number of settings with speculation, for each type of weight, that are measured again."""

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


def measure_beside(
    ours: Sequence[Configuration],
    tried: Sequence[Tried],
    start: Start,
    workload: Workload,
    repeats: int,
    advance: Callable[[], None],
) -> tuple[list[Outcome], list[dict[str, float]], list[Tried]]:
    """Measure our configurations and the ``comparable`` settings in turn (``eagle3.runner.bench.measure``).

    If a server fails, everything is measured again without its setting. Returns the outcomes, ours first, the
    milliseconds of our steps, and ``tried`` with the new failures.
    """
    while True:
        settings = sum(comparable(tried).values(), [])
        try:
            with ExitStack() as stack:
                theirs = [stack.enter_context(start(setting)) for setting in settings]
                outcomes, step_ms = measure([*ours, *theirs], workload, repeats, advance)
                return outcomes, step_ms, list(tried)
        except ServerError as error:
            failed = {"tokens_per_second": None, "failure": error.reason}
            tried = [replace(each, **failed) if each.setting == error.setting else each for each in tried]
