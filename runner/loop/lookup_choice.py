"""Decides whether a round verifies the lookup's or the draft head's proposals: those with more expected tokens per
second.

The lookup's acceptance rate depends on how many tokens the place that it found has in common with the end of the text,
so rates are kept by class of that number. Every round shows whether the lookup's proposals were right, even a round of
the head. The head's proposals are known only from its own rounds, so the head gets a round from time to time.

Costs are learned as ratios of a round's seconds to those of the rounds before it. The tokens do not depend on the
decision.

The lookup itself finds earlier places of a text with the same tokens as its end, and proposes the tokens that followed
there. This is prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding, transformers'
``prompt_lookup_num_tokens``) with an index. The last three tokens are looked up at their latest earlier places; the
place that has the most tokens in common with the end of the text is taken. Adding a token, removing one and finding the
place each take constant time.

A suffix automaton would find the longest common suffix among all places rather than the latest few, but it cannot
remove tokens, and it leads to the earliest place, although the latest predicts better.
"""

from collections.abc import Iterable, Sequence
from math import exp, log

from eagle3.runner.contract import Metadata
from eagle3.runner.loop.adaptive_chain import AcceptanceRates
from eagle3.runner.loop.cached_tokens import common_prefix

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


SHORTEST = 3
"""The least number of tokens that a place must have in common with the end of the text."""
PLACES, LONGEST = 8, 32
"""The number of places that are compared, the latest first, and of tokens that are compared at each."""


class TextIndex:
    """The tokens of a text, and the places where its last tokens occurred before.

    A place is a number of tokens: ``tokens[:place]`` are the tokens before it.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}
        """Maps three tokens to the latest place after them."""
        self._earlier: list[int] = [0] * SHORTEST
        """For each place, the latest earlier place after the same three tokens; 0 if there is none."""
        self._place = self._common = 0
        """The place found last, which each added token moves on by one, and the number of tokens that it has in common
        with the end."""

    def become(self, tokens: Sequence[int]) -> None:
        """Replace the text by ``tokens``. The time is proportional to the number of tokens that change."""
        self._take_back(common_prefix(self.tokens, tokens))
        self.add(tokens[len(self.tokens) :])

    def add(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        text, latest, earlier = self.tokens, self._latest, self._earlier
        for token in tokens:
            if self._common:
                follows = text[self._place] == token
                self._place, self._common = (self._place + 1, self._common + 1) if follows else (0, 0)
            if len(text) >= SHORTEST - 1:
                key = (text[-2], text[-1], token)
                place = len(text) + 1
                before = latest.get(key, 0)
                earlier[place:] = [before if before < place else 0]  # ignores a place that an interrupted call left
                latest[key] = place
            text.append(token)

    def _take_back(self, length: int) -> None:
        """Shorten the text to its first ``length`` tokens."""
        text = self.tokens
        self._place = self._common = 0
        while len(text) > length:
            if len(text) >= SHORTEST:
                key = (text[-3], text[-2], text[-1])
                if before := self._earlier[len(text)]:
                    self._latest[key] = before
                else:
                    self._latest.pop(key, None)
            text.pop()
        del self._earlier[max(len(text) + 1, SHORTEST) :]

    def common(self) -> int:
        """Return how many tokens the end of the text has in common with the best earlier place, 0 if it has none with
        ``SHORTEST`` or more.

        A place whose next token equals the added one remains the best, because no other place can have gained more.
        """
        if not self._common and len(self.tokens) > SHORTEST:
            self._find()
        return self._common

    def _find(self) -> None:
        text, earlier = self.tokens, self._earlier
        end, place = len(text), earlier[-1]
        for _ in range(PLACES):
            if not place:
                return
            common, most = SHORTEST, min(place, LONGEST)
            while common < most and text[place - 1 - common] == text[end - 1 - common]:
                common += 1
            if common > self._common:
                self._place, self._common = place, common
            place = earlier[place]

    def ahead(self, count: int) -> list[int]:
        """Return ``count`` tokens that may follow, [] if ``common`` is 0. If fewer tokens follow the place, they are
        repeated."""
        if not self.common():
            return []
        tokens = self.tokens[self._place : self._place + count]
        period = len(self.tokens) - self._place
        while len(tokens) < count:
            tokens.append(tokens[-period])
        return tokens
