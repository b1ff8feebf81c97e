"""Chooses how many draft tokens a round proposes."""

from typing import Protocol


class ChainLength(Protocol):
    speculates: bool
    """False: no round proposes anything, so nothing is kept for the draft."""

    def begin(self) -> None:
        """Another generation."""

    def next(self) -> int:
        """Draft tokens of the next round, 0 for a step without speculation."""

    def record(self, proposed: int, accepted: int, seconds: float) -> None:
        """Take in a round's outcome, and the seconds that its drafts and its verification took. What the caller does
        between two rounds is not among them."""


class FixedChain:
    """The same in every round; 0 for none."""

    def __init__(self, length: int):
        self.length, self.speculates = length, length > 0

    def begin(self) -> None:
        pass

    def next(self) -> int:
        return self.length

    def record(self, proposed: int, accepted: int, seconds: float) -> None:
        pass
