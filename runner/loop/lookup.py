"""Finds earlier places of a text with the same tokens as its end, and proposes the tokens that followed there.

This is prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding, transformers'
``prompt_lookup_num_tokens``) with an index. The last three tokens are looked up at their latest earlier places; the
place that has the most tokens in common with the end of the text is taken. Adding a token, removing one and finding the
place each take constant time.

A suffix automaton would find the longest common suffix among all places rather than the latest few, but it cannot
remove tokens, and it leads to the earliest place, although the latest predicts better.
"""

from collections.abc import Iterable, Sequence

from eagle3.runner.loop.cached_tokens import common_prefix

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
        """Make ``tokens`` the text. The time is proportional to the number of tokens that change."""
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
