"""Finds where the end of a text stood before, and proposes what followed there.

This is prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding, transformers'
``prompt_lookup_num_tokens``) with an index. The last three tokens lead to the latest places where they
stood; the place that has the most tokens in common with the end of the text is taken. Adding a token, taking one back
and finding the place take constant time each.

A suffix automaton would find the longest common suffix among all places rather than the latest few, but it cannot
take tokens back, and it leads to the earliest place, where the latest predicts better.
"""

from collections.abc import Iterable, Sequence

from eagle3.runner.cache.cached_tokens import common_prefix

SHORTEST = 3
"""Tokens that a place has in common with the end of the text, at least."""
PLACES, LONGEST = 8, 32
"""Places that are compared, the latest first, and tokens that are compared at each."""


class TextIndex:
    """The tokens of a text, and the places where its last tokens stood before.

    A place is a number of tokens: what stands before it is ``tokens[:place]``.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}
        """Maps three tokens to the latest place behind them."""
        self._earlier: list[int] = [0] * SHORTEST
        """For each place, the latest earlier one behind the same three tokens; 0 for none."""
        self._place = self._common = 0
        """The place that was found last, followed since, and the tokens that it has in common with the end."""

    def become(self, tokens: Sequence[int]) -> None:
        """Make ``tokens`` the text. Takes time in proportion to the tokens that change."""
        self._take_back(common_prefix(self.tokens, tokens))
        self.add(tokens[len(self.tokens) :])

    def add(self, tokens: Iterable[int]) -> None:
        """Append to the text."""
        text, latest, earlier = self.tokens, self._latest, self._earlier
        for token in tokens:
            if self._common:
                follows = text[self._place] == token
                self._place, self._common = (self._place + 1, self._common + 1) if follows else (0, 0)
            if len(text) >= SHORTEST - 1:
                key = (text[-2], text[-1], token)
                place = len(text) + 1
                before = latest.get(key, 0)
                earlier[place:] = [before if before < place else 0]  # not a place that an interruption left
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

        A place that goes on as the text does remains the best: no other place can have gained more.
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
        """Return ``count`` tokens that may follow, [] if ``common`` is 0. What followed the place is repeated if it is
        shorter, as the rhythm of the text."""
        if not self.common():
            return []
        tokens = self.tokens[self._place : self._place + count]
        period = len(self.tokens) - self._place
        while len(tokens) < count:
            tokens.append(tokens[-period])
        return tokens
