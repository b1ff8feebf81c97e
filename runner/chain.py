"""How many draft tokens a round proposes."""

from typing import Protocol

from eagle3.runner.statistics import GenerationStats


class ChainLength(Protocol):
    speculates: bool
    """False: no round proposes anything, so nothing is kept for the draft."""

    def begin(self, stats: GenerationStats) -> None:
        """Another generation, whose counts and seconds will be here."""

    def next(self) -> int:
        """Draft tokens of the next round, 0 for a step without speculation."""

    def record(self, proposed: int, accepted: int) -> None:
        """What came of a round."""


class FixedChain:
    """The same in every round; 0 for none."""

    def __init__(self, length: int):
        self.length, self.speculates = length, length > 0

    def begin(self, stats: GenerationStats) -> None:
        pass

    def next(self) -> int:
        return self.length

    def record(self, proposed: int, accepted: int) -> None:
        pass
