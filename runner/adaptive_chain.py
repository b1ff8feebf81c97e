"""A chain length that follows what the text accepts and what a round costs.

A round of length k yields 1 + r1 + r1 r2 + ... + r1...rk tokens, where r_i is the rate at which the i-th proposal is
accepted when those before it were (EAGLE's n-alpha). Rates and costs are estimated as rounds go by, and each round is
as long as promises the most tokens a second. Length 0, a step of the target alone, is one of the lengths, so
speculation that does not pay goes off by itself. The tokens are the same whatever this does.
"""

from collections.abc import Sequence

from eagle3.runner.contract import DECODE, SPECULATE, TARGET_VERIFY
from eagle3.runner.statistics import GenerationStats

STRETCHES = 4, 16
"""Rounds of one length between two decisions, after one that changed the length and at most: twice as many after each
that did not. Deciding takes some percent of a small model's round."""
TRIAL_EVERY = 96
"""Rounds from a few of a neighbouring length to the next: an estimate that nothing renews would stand for good."""
FIRST_PAUSE = 16
"""Steps from speculation going off to the round that tries it again; twice as many after each that fails."""
TRIAL_SHARE = 0.01
"""At most, of the time, for those rounds, once they have failed a few times."""


class AdaptiveChain:
    """Keep one for as long as the session: what it has learned holds for the next generation too."""

    speculates = True

    def __init__(self, longest: int):
        """``longest``: the artifact's chain length, or less"""
        self.length = longest
        """Draft tokens of the rounds to come, but for a trial now and then; 0 where speculation is off."""
        self._longest = longest
        self._rates, self._costs = AcceptanceRates(longest), RoundCosts(longest)
        self._outcomes: list[tuple[int, int]] = []  # of the stretch under way
        self._side, self._until_trial = 1, TRIAL_EVERY
        self._wait = self._pause = FIRST_PAUSE  # steps to the next trial; and what that was when it began
        self._lost = 0.0

    def begin(self, stats: GenerationStats) -> None:
        self._stats, self._methods = stats, stats.method_seconds
        self._outcomes.clear()
        self._rates.begin()
        self._choose()
        self._before: int | None = None  # length of the stretch before, none at the beginning
        self._mark = self._target_seconds = 0.0
        self._stretch, self._rounds = self.length, STRETCHES[0]
        self._trial = False
        self._left = self._rounds_to_go()

    def next(self) -> int:
        if self._left == 1:  # the stretch ends with this round
            self._target_seconds = self._in_target()
        return self._stretch

    def record(self, proposed: int, accepted: int) -> None:
        self._outcomes.append((proposed, accepted))
        self._left -= 1
        if not self._left:
            self._end_stretch()

    def _rounds_to_go(self) -> int:
        if self._trial:
            return STRETCHES[0] if self.length else 1
        return self._rounds if self.length else min(self._rounds, self._wait)

    def _end_stretch(self) -> None:
        """Learn from it, then decide on the next one."""
        rounds, length = len(self._outcomes), self._stretch
        seconds = self._seconds(rounds)
        self._rates.record(self._outcomes)
        tokens = rounds + sum(accepted for _, accepted in self._outcomes)
        self._outcomes.clear()
        before = self.length
        self._choose()
        self._rounds = min(2 * self._rounds, STRETCHES[1]) if self.length == before else STRETCHES[0]
        if before:
            self._until_trial -= rounds
            self._wait = self._pause = FIRST_PAUSE
        elif self._trial:
            self._pace_trials(length, tokens, seconds)
        else:
            self._wait -= rounds
        self._before = length
        self._trial = (self._until_trial if self.length else self._wait) <= 0
        self._stretch = self._to_try() if self._trial else self.length
        self._left = self._rounds_to_go()

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
        return sum(self._methods.get(name, 0.0) for name in (TARGET_VERIFY, DECODE, SPECULATE))

    def _seconds(self, rounds: int) -> float:
        """What the stretch took, the loop's own time included and the caller's not; the costs learn of it.

        ``decode_seconds`` has come to where the last round's verify stands between the drafts before it and those of
        the next round: that verify goes on top. A CPU's caches hold the other method's weights after a change between
        steps and rounds: such a stretch says nothing of costs, nor does the first.
        """
        length, in_target = self._stretch, self._in_target() - self._target_seconds
        mark = self._stats.decode_seconds + in_target
        seconds, self._mark = mark - self._mark, mark
        whole = all(proposed == length for proposed, _ in self._outcomes)  # shorter ones at the context's end
        if self._before is not None and bool(self._before) == bool(length) and whole:
            self._costs.record(length, rounds, seconds / rounds, in_target)
        return seconds

    def _to_try(self) -> int:
        if not self.length:
            return fastest(self._rates.usual, self._costs.seconds, 1)
        self._until_trial, self._side = TRIAL_EVERY, -self._side
        return min(max(1, self.length + self._side), self._longest)

    def _pace_trials(self, length: int, tokens: int, seconds: float) -> None:
        """After a trial while speculation was off. One that would pay by itself is followed by another; what they took
        beyond the steps that they stood for is paid back by the pause."""
        costs = self._costs
        self._lost += seconds / costs.now(0) - tokens
        if tokens * costs.seconds[0] > costs.seconds[length]:
            self._wait = 0
        else:
            self._wait = self._pause = max(FIRST_PAUSE, min(2 * self._pause, int(self._lost / TRIAL_SHARE)))
            self._lost = 0.0


class AcceptanceRates:
    """``rates[i]``: how often the proposal at i is accepted where those before it are; a position that was never
    reached is expected to do as the one before it. ``usual`` are those that texts end with and others begin with."""

    PRIOR = 0.8
    WEIGHT = 1 / 48
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

    def record(self, outcomes: Sequence[tuple[int, int]]) -> None:
        """Of each round how many it proposed, and how many of them were accepted."""
        for proposed, accepted in outcomes:
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
    """Of a round, once there are as many."""
    MOST_SURPRISE = 0.3
    """Rounds slower than expected by more than this share are taken for a hiccup."""

    def __init__(self, longest: int):
        self.seconds = [0.0] * (longest + 1)
        self.known = False
        self._counts = [0] * (longest + 1)
        self._pace = 1.0

    def now(self, length: int) -> float:
        return self.seconds[length] * self._pace

    def record(self, length: int, rounds: int, seconds: float, in_target: float) -> None:
        """``seconds`` of each of so many rounds; ``in_target``: what the last one's target took of them. A clock too
        coarse to see it says nothing."""
        if not seconds >= in_target > 0 or not (self.known or length == len(self.seconds) - 1):
            return
        if not self.known:
            self.seconds[0], self.seconds[length], self.known = in_target / 2, seconds, True
        first, self._counts[length] = not self._counts[length], self._counts[length] + rounds
        surprise = seconds / self.now(length) - 1
        if not first:
            surprise = min(surprise, self.MOST_SURPRISE)
        self.seconds[length] *= 1 + surprise * max(min(1, rounds * self.WEIGHT), rounds / self._counts[length])
        if first:
            self._interpolate()
        else:
            self._pace *= 1 + surprise * self.PACE_WEIGHT

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
