"""Chooses the chain length that is expected to give the most tokens per second.

A round of length k yields 1 + r1 + r1 r2 + ... + r1...rk tokens, where r_i is the rate at which the i-th proposal is
accepted when those before it were (EAGLE's n-alpha). Length 0, a step of the target alone, is one of the lengths, so
speculation that does not pay is turned off. The tokens do not depend on the chain length.

Costs are ratios, because a machine's speed changes: the median time of a few rounds of another length is divided by
that of rounds of the present length before and after. If the rounds before and after differ, the machine's speed has
changed, and the comparison is dropped.

The rates are counted here too: how often the draft's proposals are accepted, position by position.
"""

from collections.abc import Iterable
from statistics import median
from typing import Protocol

import numpy as np

ROUNDS = 3
"""The number of timed rounds of one length whose median is taken before the next length is chosen."""
NOTED = 20
"""The rounds after which ``note`` says what was chosen."""
SURPRISE = 1.25
"""Two times whose ratio exceeds this factor differ by more than noise."""
PAUSE, LOST_SHARE = 40, 0.01
"""The least number of rounds between two comparisons, and the share of the time that comparisons with a worse length
may lose.
"""


class AdaptiveChain:
    """The adaptive chain length of a session. Its learned costs also hold for later generations, so a session keeps one
    object.
    """

    speculates = True

    def __init__(self, longest: int):
        """``longest``: the artifact's chain length, or less"""
        self.length = self._other = longest
        """The draft tokens of coming rounds, except rounds of a comparison; 0 if speculation is off."""
        self._rates, self._lengths = AcceptanceRates(longest), range(longest + 1)
        # Costs of a round, relative to the other lengths; guessed until they are compared.
        self._costs = [1 + 0.1 * length for length in self._lengths]
        self._compared = {longest}  # lengths with measured costs; the other costs are interpolated
        self._seconds: list[float] = []  # the seconds of the latest rounds of length ``next()``
        self._medians: list[float] = []  # the medians of the current comparison: the present length's, then the other's
        self._doubted = False  # True if the current comparison repeats one with an unexpected result
        self._due = [0.0] * (longest + 1)  # the first round in which each length may be compared again
        self._rounds, self._last = 0, -1

    def begin(self) -> None:
        self._last = -1
        self._rates.forget_text()

    def next(self) -> int:
        return self._other if len(self._medians) == 1 else self.length

    def record(self, proposed: int, accepted: int, seconds: float) -> None:
        """Count a round. The first round after a change of length is not timed: the CPU's caches hold the weights of
        other methods, and its drafts may have been made before the change.
        """
        self._rates.record(proposed, accepted)
        self._rounds += 1
        if proposed == self._last == self.next() and seconds > 0:
            self._seconds.append(seconds)
        self._last = proposed
        if len(self._seconds) == ROUNDS:
            self._choose(median(self._seconds))
            self._seconds.clear()

    @property
    def note(self) -> str | None:
        """A line on what was measured and chosen. None before ``NOTED`` rounds, unless speculation is off already, and
        as long as no step without speculation was measured."""
        if len(self._lengths) == 1 or (self.length and (self._rounds < NOTED or 0 not in self._compared)):
            return None
        length = self.length or self._best(self._lengths[1:])
        chosen = f"after {self._rounds} rounds the chain length is {length}" if self.length else "speculation is off"
        return (
            f"{chosen}: a round of {length + 1} tokens costs {self._costs[length] / self._costs[0]:.2f} "
            f"steps and yields {self._rates.tokens()[length]:.2f} tokens"
        )

    def _best(self, lengths: Iterable[int]) -> int:
        tokens = self._rates.tokens()
        return max(lengths, key=lambda length: tokens[length] / self._costs[length])

    def _choose(self, taken: float) -> None:
        """Set the length of the next rounds. ``taken`` is the median time of the last rounds."""
        if self._medians:
            self._medians.append(taken)
            if len(self._medians) == 2:
                return
            self._learn(*self._medians)
            self._medians = [taken] if self._doubted else []
            if self._doubted:
                return
        best = self._best(self._compared)
        if best == self.length and (other := self._to_compare()) is not None:
            self._other, self._medians = other, [taken]
        self.length = best

    def _to_compare(self) -> int | None:
        """Return the length to compare with the present one now, or None. Lengths that were never compared come first:
        0, then the length that is expected to be the fastest. After them come 0 and the two neighbours of the present
        length, when they are due.
        """
        best = self._best(self._lengths) if 0 in self._compared else 0
        if best not in self._compared:
            return best
        near = {0, self.length - 1, self.length + 1}.intersection(self._lengths) - {self.length}
        if not near:
            return None
        other = min(near, key=self._due.__getitem__)
        return other if self._due[other] <= self._rounds else None

    def _learn(self, before: float, seconds: float, after: float) -> None:
        """Update the costs from the three medians of a comparison. The more time the comparison lost, the later the
        length is compared again.

        An unexpected cost must be measured a second time, since a stall does not last for two comparisons. If that
        length had been measured before, the machine has changed, and the costs of the other lengths are forgotten.
        """
        costs, present = self._costs, self.length
        ratio, expected = 2 * seconds / (before + after), costs[self._other] / costs[present]
        changed, surprising = apart(before, after) > SURPRISE, apart(ratio, expected) > SURPRISE
        self._doubted = surprising and not changed and not self._doubted
        if changed or self._doubted:
            return
        if surprising and self._other in self._compared:
            self._compared = {present}
        self._compared.add(self._other)
        costs[self._other] = costs[present] * ratio
        known = sorted(self._compared)
        self._costs = np.interp(self._lengths, known, [costs[length] for length in known]).tolist()
        tokens = self._rates.tokens()
        lost = (ROUNDS + 1) * (ratio - tokens[self._other] / tokens[present])
        self._due = [max(due, self._rounds + PAUSE) for due in self._due]
        self._due[self._other] += max(0.0, lost) / LOST_SHARE


def apart(one: float, other: float) -> float:
    return max(one, other) / min(one, other)


MEMORY, USUAL_MEMORY = 16, 1024
"""The rounds after which an outcome weighs 1/e as much: in the rates of this text, and in the usual rates of all texts.
"""
PRIOR, PRIOR_WEIGHT = 0.8, 4
"""The acceptance rate before any outcome, and the weight of an expected rate, counted in outcomes."""

Counts = list[tuple[float, float]]
"""Accepted and observed proposals at each position."""


class AcceptanceRates:
    """Acceptance rates of this text. A rate with few outcomes in this text is pulled towards the usual rate of all
    texts; a usual rate with few outcomes is pulled towards the usual rate of the position before.
    """

    def __init__(self, longest: int, prior: float = PRIOR):
        """``longest``: the most proposals of a round; ``prior``: the rate before any outcome"""
        self._prior = prior
        self._usual: Counts = [(0.0, 0.0)] * longest
        self.forget_text()

    def forget_text(self) -> None:
        """Forget this text's rates: another text may follow."""
        self._tokens: list[float] = []
        self._now: Counts = [(0.0, 0.0)] * len(self._usual)

    def record(self, proposed: int, accepted: int) -> None:
        """Count the outcomes of a round. A round without proposals leaves the rates as they are."""
        if proposed:
            self._tokens = []
            self._usual = counted(self._usual, proposed, accepted, 1 - 1 / USUAL_MEMORY)
            self._now = counted(self._now, proposed, accepted, 1 - 1 / MEMORY)

    def tokens(self) -> list[float]:
        """Return the tokens that a round of each length is expected to yield, from length 0 on."""
        if self._tokens:
            return self._tokens
        tokens, reached, usual = [1.0], 1.0, self._prior
        for usual_counts, counts in zip(self._usual, self._now, strict=True):
            usual = rate(usual_counts, usual)
            reached *= rate(counts, usual)
            tokens.append(tokens[-1] + reached)
        self._tokens = tokens
        return tokens


def rate(counts: tuple[float, float], expected: float) -> float:
    return (counts[0] + PRIOR_WEIGHT * expected) / (counts[1] + PRIOR_WEIGHT)


def counted(counts: Counts, proposed: int, accepted: int, decay: float) -> Counts:
    """Return ``counts`` after another round. A proposal is observed if all before it were accepted."""
    observed = min(accepted + 1, proposed)
    return [(a * decay + (at < accepted), o * decay + (at < observed)) for at, (a, o) in enumerate(counts)]


class ChainLength(Protocol):
    speculates: bool
    """False if no round proposes anything, so that nothing is kept for the draft."""

    def begin(self) -> None:
        """Start another generation."""

    def next(self) -> int:
        """Return the number of draft tokens of the next round, 0 for a step without speculation."""

    def record(self, proposed: int, accepted: int, seconds: float) -> None:
        """Record the outcome of a round and the seconds that its drafts and its verification took, without the caller's
        time between two rounds.
        """


class FixedChain:
    """The same chain length in every round; 0 turns speculation off."""

    def __init__(self, length: int):
        self.length, self.speculates = length, length > 0

    def begin(self) -> None:
        pass

    def next(self) -> int:
        return self.length

    def record(self, proposed: int, accepted: int, seconds: float) -> None:
        pass
