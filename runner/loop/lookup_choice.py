"""Decides whether a round verifies the lookup's or the draft head's proposals: those with more expected tokens per
second.

The lookup's acceptance rate depends on how many tokens the place that it found has in common with the end of the text,
so rates are kept by class of that number. Every round shows whether the lookup's proposals were right, even a round of
the head. The head's proposals are known only from its own rounds, so the head gets a round from time to time.

Costs are learned as ratios of a round's seconds to those of the rounds before it. The tokens do not depend on the
decision.
"""

from collections.abc import Sequence
from math import exp, log

from eagle3.runner.contract import Metadata
from eagle3.runner.loop.acceptance_rates import AcceptanceRates
from eagle3.runner.loop.cached_tokens import common_prefix
from eagle3.runner.loop.lookup import TextIndex

PRIORS = (0.4, 0.6, 0.8, 0.9)
"""The acceptance rates of the lookup before any outcome, for a place with 3 or 4, 5 to 8, 9 to 16, or more tokens in
common with the end of the text."""
ROW, DRAFT = 0.02, 0.08
"""The assumed costs of a row of a verify window and of a draft token, in steps of the target, before any round is
timed."""
PACE, LEAST_WEIGHT, FURTHEST = 9, 0.1, 2.0
"""The number of rounds whose median time measures the machine's speed; the least weight of a new cost; the largest
factor by which one round changes a cost."""
TRIAL = 32
"""The rounds of the lookup in one class before the head gets a round; the number doubles with each round of the
head."""

MEASURED_BACKENDS = ("xnnpack",)
"""Backends on which the lookup was measured (scripts/measured.md)."""

LOOKUP, HEAD = True, False
Kind = tuple[bool, int]
"""A kind of round: who proposed, and how many tokens; (HEAD, 0) is a step of the target."""


class RoundCosts:
    """The costs of rounds relative to each other. The unit is the cost of a step of the target."""

    def __init__(self) -> None:
        self._costs: dict[Kind, float] = {}
        self._timed: dict[Kind, int] = {}
        self._paces: list[float] = []

    def __getitem__(self, kind: Kind) -> float:
        """Return the cost of a kind of round. The cost of a kind that was never timed is that of the nearest timed
        kind, scaled by the ratio of their assumed costs."""
        if kind in self._costs:
            return self._costs[kind]
        by, count = kind
        known = [each for each in self._costs if each[0] == by]
        if not known:
            return guess(kind)
        nearest = min(known, key=lambda each: abs(each[1] - count))
        return self._costs[nearest] * guess(kind) / guess(nearest)

    def record(self, kind: Kind, seconds: float) -> None:
        cost = self[kind]
        pace = sorted(self._paces)[len(self._paces) // 2] if self._paces else seconds / cost
        timed = self._timed[kind] = self._timed.get(kind, 0) + 1
        apart = min(max(log(seconds / (pace * cost)), -log(FURTHEST)), log(FURTHEST))
        self._costs[kind] = cost * exp(apart * max(1 / (timed + 1), LEAST_WEIGHT))
        self._paces = [*self._paces[1 - PACE :], seconds / self._costs[kind]]


def guess(kind: Kind) -> float:
    by, count = kind
    return 1 + (ROW if by == LOOKUP else ROW + DRAFT) * count


def pays(metadata: Metadata) -> bool:
    """Return True if the lookup is on by default for an artifact: if a round verifies more rows than the head proposes,
    on a backend where the lookup was measured to pay. In windows of the head's own length it gains next to nothing."""
    return metadata.window > metadata.chain_len + 1 and metadata.manifest.get("backend") in MEASURED_BACKENDS


class LookupChoice:
    """The choice between lookup and head. What it learns also holds for later generations, so a session keeps one
    object."""

    def __init__(self, chain_len: int, longest: int):
        """``chain_len``: the most tokens that the head proposes, 0 without a head; ``longest``: the most that a round
        verifies"""
        self.text = TextIndex()
        self._longest, self._chain_len = longest, chain_len
        self._costs = RoundCosts()
        self._lookup = [AcceptanceRates(longest, prior) for prior in PRIORS]
        self._head = [AcceptanceRates(chain_len) for _ in PRIORS]
        self._seed_seconds = 0.0
        self._forget_text()

    def begin(self, prompt: Sequence[int]) -> None:
        """Begin another generation, after ``prompt``."""
        self.text.become(prompt)
        for rates in (*self._lookup, *self._head):
            rates.forget_text()
        self._forget_text()

    def _forget_text(self) -> None:
        self._offered: list[int] = []
        self._class = 0
        self._since_head, self._trial = [0] * len(PRIORS), [TRIAL] * len(PRIORS)

    def offer(self, chain_len: int, room: int, drafted: bool) -> list[int]:
        """Return the lookup's tokens for the next round to verify, [] if the head proposes (or for a step of the
        target).

        Args:
            chain_len: the tokens that the head would propose, 0 for none
            room: the most tokens that the context has room for
            drafted: True if the head's tokens exist already; they must be made again after a round of the lookup
        """
        self._offered = self.text.ahead(min(self._longest, room))
        if not self._offered:
            return []
        common = self.text.common()
        self._class = kind = min((common - 1).bit_length() - 2, len(PRIORS) - 1)
        tokens = self._lookup[kind].tokens()
        head_cost = self._costs[HEAD, chain_len]
        head = self._head[kind].tokens()[chain_len] / head_cost
        best, count = 0.0, 0
        for proposed in self._counts():
            cost = self._costs[LOOKUP, proposed]
            if drafted and head_cost > cost:  # assume that the match will double in length
                cost += (head_cost - cost) / max(1.0, common / tokens[proposed])
            if tokens[proposed] / cost > best:
                best, count = tokens[proposed] / cost, proposed
        if best <= head:
            return []
        if self._since_head[kind] >= self._trial[kind] and chain_len and (1 + chain_len) / head_cost > best:
            self._trial[kind] *= 2
            self._since_head[kind] = 0
            return []
        self._since_head[kind] += 1
        return self._offered[:count]

    def _counts(self) -> Sequence[int]:
        """The numbers of tokens to choose among. They are few, since each is another shape for the CPU's kernels."""
        most = len(self._offered)
        return sorted({most, min(self._chain_len or 3, most)})

    def record(self, ids: Sequence[int], proposed: int, by_lookup: bool, seconds: float) -> None:
        """Record a round: the target's tokens ``ids``, which are in ``text`` already, and its seconds; 0 s is not
        counted."""
        if not self._offered:
            return  # the lookup had no tokens, so there was no choice to learn from
        right = common_prefix(self._offered, ids)
        self._lookup[self._class].record(min(len(ids), len(self._offered)), right)
        if not by_lookup and proposed:
            self._head[self._class].record(proposed, len(ids) - 1)
        self._offered = []
        if seconds > 0:
            if by_lookup:
                seconds += self._seed_seconds * len(ids)
            self._costs.record((by_lookup, proposed), seconds)

    def seeded(self, rows: int, seconds: float) -> None:
        """Record the seconds that it took to write ``rows`` draft slots of the lookup's rounds."""
        each = seconds / rows
        self._seed_seconds = each if not self._seed_seconds else 0.8 * self._seed_seconds + 0.2 * each
