"""An adaptive chain length: the one that promises the most tokens a second.

A round of length k yields 1 + r1 + r1 r2 + ... + r1...rk tokens, where r_i is the rate at which the i-th proposal is
accepted when those before it were (EAGLE's n-alpha). Length 0, a step of the target alone, is one of the lengths, so
speculation that does not pay goes off. The tokens are the same whatever this does.

What a round costs is learned by comparison alone, since a machine's speed changes: the median of a few rounds of
another length, between rounds of the present one. Where these differ the machine has changed, and nothing is learned.
"""

from collections.abc import Iterable
from statistics import median

import numpy as np

from eagle3.runner.chain.acceptance_rates import AcceptanceRates

ROUNDS = 3
"""Timed rounds of one length whose median is taken; then the next ones are chosen."""
SURPRISE = 1.25
"""Two numbers that are apart by more than this factor are not the same but for noise."""
PAUSE, LOST_SHARE = 40, 0.01
"""Rounds from a comparison to the next, and the share of the time that comparisons with a worse length may lose."""


class AdaptiveChain:
    """Keep one for as long as the session: what it has learned holds for the next generation too."""

    speculates = True

    def __init__(self, longest: int):
        """``longest``: the artifact's chain length, or less"""
        self.length = self._other = longest
        """Draft tokens of the rounds to come, but for those of a comparison; 0 where speculation is off."""
        self._rates, self._lengths = AcceptanceRates(longest), range(longest + 1)
        self._costs = [1 + 0.1 * length for length in self._lengths]  # of a round beside the others; a guess at first
        self._compared = {longest}  # lengths whose costs were seen; those of others lie between
        self._seconds: list[float] = []  # of rounds of ``next()``
        self._medians: list[float] = []  # of a comparison under way: the present length's, then the other's
        self._doubted = False  # whether that comparison repeats one that surprised
        self._due = [0.0] * (longest + 1)  # the round from which on each length may be compared again
        self._rounds, self._last = 0, -1

    def begin(self) -> None:
        self._last = -1
        self._rates.forget_text()

    def next(self) -> int:
        return self._other if len(self._medians) == 1 else self.length

    def record(self, proposed: int, accepted: int, seconds: float) -> None:
        """The first round after a change of length is not timed: a CPU's caches hold the weights of other methods, and
        its drafts may have been made before the change."""
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
        """A line for the user where speculation is off."""
        if self.length or len(self._lengths) == 1:
            return None
        length = self._best(self._lengths[1:])
        return (
            f"speculation is off: a round of {length + 1} tokens costs {self._costs[length] / self._costs[0]:.2f} "
            f"steps and yields {self._rates.tokens()[length]:.2f} tokens"
        )

    def _best(self, lengths: Iterable[int]) -> int:
        tokens = self._rates.tokens()
        return max(lengths, key=lambda length: tokens[length] / self._costs[length])

    def _choose(self, taken: float) -> None:
        """The length of the next rounds. ``taken``: the median of those behind."""
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
        """The length to compare with the present one now: 0 and what promises most, if they never were; then 0 and the
        lengths beside the present one, when they are due."""
        best = self._best(self._lengths) if 0 in self._compared else 0
        if best not in self._compared:
            return best
        near = {0, self.length - 1, self.length + 1}.intersection(self._lengths) - {self.length}
        if not near:
            return None
        other = min(near, key=self._due.__getitem__)
        return other if self._due[other] <= self._rounds else None

    def _learn(self, before: float, seconds: float, after: float) -> None:
        """Take in the medians of a comparison. What it lost beside rounds of the present length sets when the next is
        due.

        A cost that surprises has to be seen again, since a stall does not last for two comparisons. Where it was known
        before, the machine has become another, and what was known of the other lengths is forgotten.
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
