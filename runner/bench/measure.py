"""Runs the same prompts through several configurations in turn. Every reported speedup is a ratio within such a run."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from eagle3.runner.bench.configurations import Configuration, Workload
from eagle3.runner.model import Result
from eagle3.runner.rounds.statistics import GenerationStats
from eagle3.runner.rounds.step_times import session_steps, step_milliseconds
from eagle3.runner.text.prompts import Prompt


@dataclass(frozen=True)
class Completion:
    """A completion. ``turn`` counts from 0."""

    prompt: Prompt
    turn: int
    result: Result


@dataclass(frozen=True)
class Outcome:
    """The completions of a configuration: for each pass those of all prompts, in the order of the prompts."""

    configuration: Configuration
    passes: list[list[Completion]] = field(default_factory=list)

    @property
    def completions(self) -> list[Completion]:
        """The completions of all passes."""
        return sum(self.passes, [])

    def stats(self, category: str | None = None) -> list[GenerationStats]:
        """Return the statistics of each pass, over all prompts or those of one category."""
        return [
            total(a.result.stats for a in completions if category in (None, a.prompt.category))
            for completions in self.passes
        ]


def total(stats: Iterable[GenerationStats]) -> GenerationStats:
    summed = GenerationStats()
    for each in stats:
        summed.add(each)
    return summed


def measure(
    configurations: Sequence[Configuration], workload: Workload, repeats: int, advance: Callable[[], None]
) -> tuple[list[Outcome], list[dict[str, float]]]:
    """Run all prompts ``repeats`` times, each prompt through every configuration in turn, after a warm-up prompt.

    Returns the outcome of each configuration, and for each pass ``step_milliseconds`` of the first one's session.
    """
    session = configurations[0].model.session
    steps, step_ms = session_steps(session), []
    for configuration in configurations:
        configuration.complete(workload, workload.prompts[0])
    step_milliseconds(steps, repeats=10)
    outcomes = [Outcome(configuration) for configuration in configurations]
    for _ in range(repeats):
        for outcome in outcomes:
            outcome.passes.append([])
        for prompt in workload.prompts:
            for outcome in outcomes:
                results = outcome.configuration.complete(workload, prompt)
                outcome.passes[-1] += [Completion(prompt, turn, result) for turn, result in enumerate(results)]
                advance()
        step_ms.append(step_milliseconds(steps))
    return outcomes, step_ms
