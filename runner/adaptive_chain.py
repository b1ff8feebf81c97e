"""A chain length that follows what the text accepts and what a round costs.

A round of length k yields 1 + r1 + r1 r2 + ... + r1...rk tokens, where r_i is the rate at which the i-th proposal is
accepted when those before it were (EAGLE's n-alpha). Rates and costs are estimated as rounds go by, and each round is
as long as promises the most tokens a second. Length 0, a step of the target alone, is one of the lengths, so
speculation that does not pay goes off by itself. The tokens are the same whatever this does.
"""

from collections.abc import Sequence

from eagle3.runner.contract import DECODE, TARGET_VERIFY
from eagle3.runner.statistics import GenerationStats

TRIAL_EVERY = 32
"""Rounds from one of a neighbouring length to the next: an estimate that nothing renews would stand for good."""
FIRST_PAUSE = 16
"""Steps from speculation going off to the round that tries it again; twice as many after each that fails."""
TRIAL_SHARE = 0.01
"""At most, of the time, for those rounds, once they have failed a few times."""
SETTLED = 4
"""Rounds after a change between steps and rounds before costs count: a CPU's caches hold the other method's weights."""


class AdaptiveChain:
    """Keep one for as long as the session: what it has learned holds for the next generation too."""

    speculates = True

    def __init__(self, longest: int):
        """``longest``: the artifact's chain length, or less"""
        self.length = longest
        """Draft tokens of the rounds to come, but for a trial now and then; 0 where speculation is off."""
        self._longest = longest
        self._rates, self._costs = AcceptanceRates(longest), RoundCosts(longest)
        self._trial, self._side = False, 1
        self._wait = self._pause = FIRST_PAUSE  # rounds to the next trial; and what that was when it began
        self._lost = 0.0

    def begin(self, stats: GenerationStats) -> None:
        self._stats, self._methods = stats, stats.method_seconds
        self._decode_seconds = stats.decode_seconds
        self._previous: int | None = None  # length of the round before, and its seconds in the target
        self._previous_target, self._settled = 0.0, 0
        self._rates.begin()
        self._choose()

    def next(self) -> int:
        if self._previous is None:
            self._target_seconds = self._in_target()  # not before: a prompt's last tokens may go through verify windows
        self._wait -= 1
        self._trial = self._wait < 0
        return self._to_try() if self._trial else self.length

    def record(self, proposed: int, accepted: int) -> None:
        seconds = self._seconds(proposed)
        self._rates.record(proposed, accepted)
        was_off = not self.length
        self._choose()
        if was_off and self._trial:
            self._pace_trials(proposed, 1 + accepted, seconds)
        elif not (was_off or self.length):
            self._wait = self._pause = FIRST_PAUSE

    @property
    def note(self) -> str | None:
        """A line for the user where speculation is off."""
        if self.length:
            return None
        rates, costs = self._rates.rates, self._costs.seconds
        length = fastest(rates, costs, 1)
        return (
            f"speculation is off: a round of {length + 1} tokens costs {costs[length] / costs[0]:.2f} steps and yields "
            f"{expected_tokens(rates, length):.2f} tokens"
        )

    def _choose(self) -> None:
        if self._costs.known:
            self.length = fastest(self._rates.rates, self._costs.seconds, 0)

    def _in_target(self) -> float:
        return self._methods.get(TARGET_VERIFY, 0.0) + self._methods.get(DECODE, 0.0)

    def _seconds(self, length: int) -> float:
        """What the round took, the loop's own time included and the caller's not; the costs learn of it.

        ``decode_seconds`` has come to where the last verify stands between the drafts before it and those of this
        round: the last verify goes off it, this one comes on top. A generation's first drafts are not in it.
        """
        target, decode = self._in_target(), self._stats.decode_seconds
        seconds = in_target = target - self._target_seconds
        if self._previous is not None:
            seconds += decode - self._decode_seconds - self._previous_target
            self._settled = self._settled + 1 if bool(length) == bool(self._previous) else 0
            if self._settled >= SETTLED:
                self._costs.record(length, seconds, in_target)
        self._target_seconds, self._decode_seconds = target, decode
        self._previous, self._previous_target = length, in_target
        return seconds

    def _to_try(self) -> int:
        if not self.length:
            return fastest(self._rates.usual, self._costs.seconds, 1)
        self._wait, self._side = TRIAL_EVERY, -self._side
        return min(max(1, self.length + self._side), self._longest)

    def _pace_trials(self, length: int, tokens: int, seconds: float) -> None:
        """After a trial while speculation was off. One that would pay by itself is followed by another; what they took
        beyond the steps that they stood for is paid back by the pause."""
        costs = self._costs
        self._lost += seconds / costs.now(0) - tokens
        if tokens * costs.seconds[0] > costs.seconds[length]:
            self._wait = 0
        else:
            self._wait = self._pause = max(FIRST_PAUSE, min(2 * self._pause, self._lost / TRIAL_SHARE))
            self._lost = 0.0


class AcceptanceRates:
    """``rates[i]``: how often the proposal at i is accepted where those before it are; a position that was never
    reached is expected to do as the one before it. ``usual`` are those that texts end with and others begin with."""

    PRIOR = 0.8
    WEIGHT = 1 / 24
    """Of the newest observation, once there are as many."""
    TEXT_WEIGHT = 1 / 8
    BEGINNING = 4
    """Observations that a rate counts for when a text begins."""

    def __init__(self, longest: int):
        self.rates = [self.PRIOR] * longest
        self.usual = self.rates
        self._observed = [0] * longest
        self._texts = 0

    def begin(self) -> None:
        if not any(self._observed):
            return
        self._texts += 1
        weight = max(self.TEXT_WEIGHT, 1 / self._texts)
        self.usual = [usual + (rate - usual) * weight for usual, rate in zip(self.usual, self.rates, strict=True)]
        self.rates = list(self.usual)
        self._observed = [min(count, self.BEGINNING) for count in self._observed]

    def record(self, proposed: int, accepted: int) -> None:
        for position in range(accepted):
            self._observe(position, 1.0)
        if accepted < proposed:
            self._observe(accepted, 0.0)

    def _observe(self, position: int, outcome: float) -> None:
        rates, observed = self.rates, self._observed
        observed[position] += 1
        rates[position] += (outcome - rates[position]) * max(self.WEIGHT, 1 / (observed[position] + 1))
        while (position := position + 1) < len(rates) and not observed[position]:
            rates[position] = rates[position - 1]


class RoundCosts:
    """``seconds[k]``: what a round of length k takes. The longest has to be measured before anything is known; then a
    plain step is taken for half of its verification, so that it gets tried, and what was never measured lies on the
    line between the nearest that were.

    A pace common to all lengths follows the machine's moods and the growing context, quickly: what is learned of a
    length is its cost beside the others'.
    """

    PACE_WEIGHT = 1 / 4
    WEIGHT = 1 / 32
    FEW = 4
    """Rounds of a length of which the quickest counts; what surprises later is the pace, and a little the length."""
    MOST_SURPRISE = 0.3
    """A round slower than expected by more than this share is taken for a hiccup."""

    def __init__(self, longest: int):
        self.seconds = [0.0] * (longest + 1)
        self.known = False
        self._counts = [0] * (longest + 1)
        self._pace = 1.0

    def now(self, length: int) -> float:
        return self.seconds[length] * self._pace

    def record(self, length: int, seconds: float, in_target: float) -> None:
        """``in_target``: the target's part of the seconds. A clock too coarse to see it says nothing."""
        if not seconds >= in_target > 0 or not (self.known or length == len(self.seconds) - 1):
            return
        self._counts[length] += 1
        if self._counts[length] == 1:
            self.seconds[length] = seconds / self._pace
            if not self.known:
                self.seconds[0], self.known = in_target / 2, True
            self._interpolate()
        elif self._counts[length] <= self.FEW:
            self.seconds[length] = min(self.seconds[length], seconds / self._pace)
        else:
            surprise = min(seconds / self.now(length) - 1, self.MOST_SURPRISE)
            self._pace *= 1 + surprise * self.PACE_WEIGHT
            self.seconds[length] *= 1 + surprise * self.WEIGHT

    def _interpolate(self) -> None:
        ends = [length for length, count in enumerate(self._counts) if count or not length]
        for low, high in zip(ends, ends[1:], strict=False):
            slope = (self.seconds[high] - self.seconds[low]) / (high - low)
            for length in range(low + 1, high):
                self.seconds[length] = self.seconds[low] + slope * (length - low)


def fastest(rates: Sequence[float], seconds: Sequence[float], shortest: int) -> int:
    """The length, 0 or 1 at the least, whose rounds yield the most tokens a second."""
    tokens = reached = 1.0
    best, most = 0, 0.0 if shortest else 1 / seconds[0]
    for length, rate in enumerate(rates, 1):
        reached *= rate
        tokens += reached
        if tokens > most * seconds[length]:
            best, most = length, tokens / seconds[length]
    return best


def expected_tokens(rates: Sequence[float], length: int) -> float:
    tokens = reached = 1.0
    for rate in rates[:length]:
        reached *= rate
        tokens += reached
    return tokens
