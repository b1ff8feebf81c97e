"""Chooses how many draft tokens a round proposes."""

from typing import Protocol


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
