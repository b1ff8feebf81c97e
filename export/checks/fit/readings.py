"""Tries the readings of a head and decides whether one is better than the files' own, guarded against chance.

First each field is changed alone. Unless the files' own reading is the best and accepted well, each other change is
then tried together with the best one. Of many readings, one looks better by chance. So a better reading's chains are
longer after the same tokens, by more than the noise of all comparisons.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle3.export.checks.fit.chains import Trial, Trials
from eagle3.export.draft.common.field import Field, HeadReading

FITS, ANOTHER, NO_PAIR = "fits", "another reading", "no pair"
FALSE_ALARM = 0.01
"""The probability that any of a head's readings looks better by chance."""
LEAST_GAIN = 0.03
"""The smallest gain in a round's length, as a share, for which a head's files are contradicted."""
LEAST_FIRST = 0.25
"""The least share of first proposals that a trained head's reading has accepted. A poor head has 0.3; other readings of
a head for another embedding had up to 0.18, which is beyond chance and gains nothing."""
CERTAIN = 1.96
"""The half-width of a 95% interval, in standard errors."""


class Expected(NamedTuple):
    """The tokens that a round is expected to give, and by position the share of the rounds in which the proposal and
    all before it are accepted, each with its 95% interval."""

    length: float
    interval: tuple[float, float]
    rates: list[float]
    intervals: list[tuple[float, float]]

    def text(self) -> str:
        return f"{self.length:.2f} tokens ({self.interval[0]:.2f} to {self.interval[1]:.2f})"


def expected(hits: Tensor, known: Tensor) -> Expected:
    """Return what to expect of chains, both bool [N, K] as in a ``Trial``. The rate at a position is measured over the
    chains whose earlier proposals were all accepted, where the text continues with the target's own tokens."""
    tried = known & torch.cat((torch.ones(len(hits), 1, dtype=torch.bool), hits[:, :-1]), 1)
    product, variance, behind, rate = 1.0, 0.0, 0.0, 0.0
    steps, intervals = [], []
    for count, good in zip(tried.sum(0).tolist(), (tried & hits).sum(0).tolist(), strict=True):
        rate = good / count if count else rate
        low, high = wilson(rate, count)
        intervals.append((product * low, product * high))
        steps.append((product, rate, max(1, count)))
        product *= rate
    for before, rate, count in reversed(steps):  # ``behind``: the accepted proposals after an accepted one
        variance += (before * (1 + behind)) ** 2 * max(rate * (1 - rate), 0.25 / count) / count
        behind = rate * (1 + behind)
    length, reach = 1.0 + behind, CERTAIN * variance**0.5
    bounds = max(1.0, length - reach), min(1.0 + len(steps), length + reach)
    return Expected(length, bounds, [before * rate for before, rate, _ in steps], intervals)


def wilson(rate: float, count: int) -> tuple[float, float]:
    """Return the 95% interval of a binomial rate, by Wilson's method."""
    if not count:
        return 0.0, 1.0
    square = CERTAIN**2 / count
    middle, half = rate + square / 2, CERTAIN * (rate * (1 - rate) / count + square / (4 * count)) ** 0.5
    return max(0.0, (middle - half) / (1 + square)), min(1.0, (middle + half) / (1 + square))


def mean_and_error(values: Tensor) -> tuple[float, float]:
    """Return the mean of values [N] and its standard error, where four neighbours count as one value."""
    block = 4 if len(values) >= 8 else 1
    means = values[: len(values) // block * block].view(-1, block).mean(1)
    error = float(means.std() / math.sqrt(len(means))) if len(means) > 1 else math.inf
    return float(values.mean()), error


def exceeds(values: Tensor, bound: float, comparisons: int) -> bool:
    """Return True if the mean of values [N] is above a bound, beyond what the best of so many results is above it by
    chance with the probability ``FALSE_ALARM``."""
    mean, error = mean_and_error(values)
    return mean > bound + NormalDist().inv_cdf(1 - FALSE_ALARM / comparisons) * error


def clearly_better(trial: Trial, other: Trial, comparisons: int) -> bool:
    """Return True if the chains of ``trial`` are longer than those of ``other`` after the same tokens, beyond the
    noise of all comparisons: that of the lengths, or of the tokens' likelihoods, which show a difference sooner."""
    longer, likelier = trial.accepted - other.accepted, trial.likelihood - other.likelihood
    enough = float(longer.mean()) > LEAST_GAIN * (1 + float(other.accepted.mean()))
    return enough and (exceeds(longer, 0, comparisons) or exceeds(likelier, 0, comparisons))


@dataclass(frozen=True, eq=False)
class Tried:
    """A reading that has been run. ``changes`` maps each field that differs from the files' reading to its value."""

    reading: HeadReading
    changes: dict[str, Any]
    trial: Trial
    expected: Expected

    @property
    def accepted(self) -> float:
        return float(self.trial.accepted.mean())

    @property
    def likelihood(self) -> float:
        return float(self.trial.likelihood.mean())

    def as_json(self) -> dict[str, Any]:
        length, interval, rates, intervals = self.expected
        return {
            "changes": {name: list(to) if isinstance(to, tuple) else to for name, to in self.changes.items()},
            "acceptance_length": round(length, 3),
            "interval": [round(bound, 3) for bound in interval],
            "by_position": [round(rate, 4) for rate in rates],
            "by_position_intervals": [[round(bound, 4) for bound in each] for each in intervals],
            "first_accepted": round(float(self.trial.first.mean()), 4),
            "tokens": len(self.trial.hits),
        }


class Search:
    """Tries the readings of one head one after the other. ``chance`` is the rate at which one fixed token would be
    accepted, ``length`` that of the chains."""

    def __init__(self, trials: Trials, fields: Sequence[Field], file: HeadReading, length: int):
        self.trials, self.fields, self.length = trials, fields, length
        wanted = torch.cat([each.greedy[each.begin :] for each in trials.over.seen])
        self.chance = float(wanted.bincount().max()) / len(wanted)
        self.tried = [self._run(file, {})]

    def verdict(self) -> tuple[str, Tried]:
        """Return the verdict, and the best reading that clearly differs in acceptance from the files'."""
        own = self.tried[0]
        self._try_changes(own)
        best = self._best()
        if best is own and self._works(own):
            return FITS, own
        likeliest = max(self.tried[1:], key=lambda each: each.likelihood, default=own)
        self._try_changes(likeliest if best is own else best)
        best = self._best()
        if not self._works(best):
            return NO_PAIR, own
        return (FITS if best is own else ANOTHER), best

    def _run(self, reading: HeadReading, changes: dict[str, Any]) -> Tried:
        """Run a reading, and estimate its acceptance: on a text that the target wrote, from the rounds; on another
        text, from the chains after every token."""
        trial = self.trials.run(reading, self.length)
        counted: Any = trial.rounds() if self.trials.over.written else slice(None)
        return Tried(reading, changes, trial, expected(trial.hits[counted], trial.known[counted]))

    def _works(self, tried: Tried) -> bool:
        """Return True if the first proposals are accepted as a trained head's are, and more than one fixed token."""
        first = tried.trial.first
        return float(first.mean()) >= LEAST_FIRST and exceeds(first, self.chance, len(self.tried))

    def _try_changes(self, base: Tried) -> None:
        """Run the readings with one further field changed that have not been run yet."""
        file = self.tried[0].reading
        for reading in self._changed(base.reading, file):
            changes = {
                each.name: each.value(reading) for each in self.fields if each.value(reading) != each.value(file)
            }
            if "aux_convention" in changes:
                del changes["aux_convention" if changes["aux_convention"] is None else "aux_layers"]
            if all(changes != each.changes for each in self.tried):
                # the head's tensors may not have the shapes of this reading
                with suppress(RuntimeError, ValueError, AssertionError, IndexError):
                    self.tried.append(self._run(reading, changes))

    def _changed(self, base: HeadReading, file: HeadReading) -> Iterator[HeadReading]:
        """Yield the readings with one field changed, to the values worth trying beside those of both."""
        for field in self.fields:
            known = [each for each in (base, file) if field.value(each) is not None]
            for value in dict.fromkeys(value for each in known for value in field.others(each)):
                with suppress(ValueError):  # the two fields may exclude each other
                    yield field.applied(base, value)

    def _best(self) -> Tried:
        """Return the best of the readings that are clearly better than the files'; the files' own if there is none. Of
        those that do not clearly differ, the best has the fewest changes."""
        own, count = self.tried[0], len(self.tried)
        better = [each for each in self.tried if clearly_better(each.trial, own.trial, count) and self._works(each)]
        top = max(better, key=lambda each: each.accepted, default=own)
        alike = [each for each in better if not clearly_better(top.trial, each.trial, 1)]
        return max(alike, key=lambda each: (-len(each.changes), round(each.likelihood, 3), each.accepted), default=own)
