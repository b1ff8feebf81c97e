"""Decides what the trials of a head's readings show, guarded against chance.

Of many readings, one looks better by chance. So a reading counts as better only if its chains are longer by more than
the noise of all comparisons made, and on both halves of the text. Head and target count as no pair if no reading's
first proposals are accepted more often than one fixed token would be, and as often as those of a poor head.
"""

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from eagle3.export.fit.trials import Trial, Trials, mean_and_error

FITS, ANOTHER, NO_PAIR = "fits", "another reading", "no pair"
FALSE_ALARM = 0.01
"""The probability that any of a head's readings looks better by chance."""
LEAST_GAIN = 0.03
"""The smallest gain in a round's length, as a share, for which a head's files are contradicted."""
LEAST_FIRST = 0.25
"""The least share of first proposals that a trained head's reading has accepted. A poor head has 0.3; other readings of
a head for another embedding had up to 0.18, which is beyond chance and gains nothing."""
ON_EACH_HALF = 1.0
"""The gain on each half of the text, in standard errors, so that no single piece of text decides."""
CERTAIN = 1.96
"""The half-width of a 95% interval, in standard errors."""


def z_for(comparisons: int) -> float:
    """Return the number of standard errors that the best of ``comparisons`` results exceeds by chance with the
    probability ``FALSE_ALARM``."""
    return NormalDist().inv_cdf(1 - FALSE_ALARM / max(1, comparisons))


def clearly_better(trial: Trial, other: Trial, comparisons: int) -> bool:
    """Return True if the chains of ``trial`` are longer than those of ``other`` beyond the noise of
    ``comparisons`` comparisons. The noise is that of the lengths, or that of the tokens' likelihoods, which show a
    difference sooner. The gain must also exceed a standard error on each half of the text. A trial that was given up
    after the first half is not better."""
    if len(trial.hits) < len(other.hits):
        return False
    longer, likelier = _gained(trial, other)
    if float(longer.mean()) <= LEAST_GAIN * (1 + float(other.accepted.mean())):
        return False
    return any(
        _exceeds(gain, z_for(comparisons))
        and all(_exceeds(half, ON_EACH_HALF) for half in (gain[: trial.half], gain[trial.half :]))
        for gain in (longer, likelier)
    )


def likelier(trial: Trial, other: Trial, comparisons: int) -> bool:
    """Return True if the target's tokens are likelier by ``trial`` than by ``other``, of equal length, beyond the noise
    of ``comparisons`` comparisons."""
    return _exceeds(trial.likelihood - other.likelihood, z_for(comparisons))


def may_be_better(begun: Trial, other: Trial) -> bool:
    """Return False for chains ``begun`` in the first half of the text that ``clearly_better`` cannot find better than
    those of ``other``, whatever the second half gives. Before the end of the first half, return False if they are
    worse beyond a 95% interval."""
    least = ON_EACH_HALF if len(begun.hits) >= begun.half else -CERTAIN
    return any(_exceeds(gain, least) for gain in _gained(begun, other.first_chains(len(begun.hits))))


def _gained(trial: Trial, other: Trial) -> tuple[Tensor, Tensor]:
    return trial.accepted - other.accepted, trial.likelihood - other.likelihood


def _exceeds(gain: Tensor, errors: float) -> bool:
    """Return True if the mean of the gain at each anchor [N] is more than so many standard errors."""
    mean, error = mean_and_error(gain)
    return mean > errors * error


def chance(wanted: Tensor) -> float:
    """Return the rate at which the best fixed token would be accepted; ``wanted`` int64 [N] are the target's tokens."""
    return float(wanted.bincount().max()) / len(wanted)


def works(trial: Trial, rate: float, comparisons: int) -> bool:
    """Return True if the first proposals are accepted as often as a trained head's, and more often than ``rate``,
    beyond the noise of ``comparisons`` comparisons."""
    mean, error = mean_and_error(trial.first)
    if mean < LEAST_FIRST:
        return False
    least = (rate * (1 - rate) / len(trial.first)) ** 0.5
    return mean - z_for(comparisons) * max(error, least) > rate


def wilson(accepted: int, count: int) -> tuple[float, float]:
    """Return the 95% interval of a binomial rate, by Wilson's method."""
    if not count:
        return 0.0, 1.0
    rate, square = accepted / count, CERTAIN**2
    middle = (rate + square / (2 * count)) / (1 + square / count)
    half = CERTAIN / (1 + square / count) * (rate * (1 - rate) / count + square / (4 * count * count)) ** 0.5
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True)
class Expected:
    """The number of tokens that a round is expected to give. ``rates`` holds, by position, the share of the rounds in
    which the proposal and all before it are accepted."""

    length: float
    interval: tuple[float, float]
    rates: tuple[float, ...]
    intervals: tuple[tuple[float, float], ...]
    rounds: int
    """The number of rounds that were counted; 0 if the rates are those of all tokens of a given text."""

    def text(self) -> str:
        """Return the length and its interval, such as "3.01 tokens (2.83 to 3.19)"."""
        return f"{self.length:.2f} tokens ({self.interval[0]:.2f} to {self.interval[1]:.2f})"

    def as_json(self) -> dict[str, Any]:
        return {
            "acceptance_length": round(self.length, 3),
            "interval": [round(bound, 3) for bound in self.interval],
            "by_position": [round(rate, 4) for rate in self.rates],
            "by_position_intervals": [[round(bound, 4) for bound in each] for each in self.intervals],
        }


def expected(trials: Trials, trial: Trial) -> Expected:
    """Return what to expect of a reading: of the rounds in which a text would be decoded that the target wrote itself,
    otherwise of chains behind every token."""
    return of_rounds(trials.rounds(trial), trials.length) if trials.over.written else of_given_text(trial)


def of_rounds(rounds: list[int], length: int) -> Expected:
    """Return what to expect, from the rounds of a text that the target itself wrote."""
    tokens = torch.tensor(rounds or [1]).float()
    counts = [int((tokens > position).sum()) for position in range(1, length + 1)]
    mean, error = float(tokens.mean()), float(tokens.std()) / len(tokens) ** 0.5 if len(tokens) > 1 else float(length)
    bounds = max(1.0, mean - CERTAIN * error), min(1.0 + length, mean + CERTAIN * error)
    rates, intervals = (count / len(tokens) for count in counts), (wilson(count, len(tokens)) for count in counts)
    return Expected(mean, bounds, tuple(rates), tuple(intervals), len(rounds))


def of_given_text(trial: Trial) -> Expected:
    """Return what to expect, from a text that the target did not write. The rate at a position is
    measured over the chains whose earlier proposals were all accepted, where the text continues with the target's own
    tokens."""
    product, rates, intervals, variance = 1.0, [], [], 0.0
    so_far = torch.ones(len(trial.hits), dtype=torch.bool)
    steps: list[tuple[float, float, int]] = []
    for position in range(trial.hits.shape[1]):
        tried = so_far & trial.known[:, position]
        accepted, count = int((trial.hits[:, position] & tried).sum()), int(tried.sum())
        rate = accepted / count if count else (steps[-1][1] if steps else 0.0)
        low, high = wilson(accepted, count)
        rates.append(product * rate)
        intervals.append((product * low, product * high))
        steps.append((product, rate, count))
        product *= rate
        so_far = tried & trial.hits[:, position]
    behind = 0.0  # the proposals accepted after a position, of those whose proposal there is accepted
    for before, rate, count in reversed(steps):
        slope = before * (1 + behind)
        variance += slope**2 * max(rate * (1 - rate), 0.25 / max(1, count)) / max(1, count)
        behind = rate * (1 + behind)
    total, error = 1.0 + sum(rates), variance**0.5
    bounds = max(1.0, total - CERTAIN * error), min(1.0 + len(rates), total + CERTAIN * error)
    return Expected(total, bounds, tuple(rates), tuple(intervals), 0)
