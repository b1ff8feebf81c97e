"""The rows of a forward over several pieces of text at once, for a measurement."""

from torch import Tensor, zeros_like


class Pieces:
    """Says to the attention of ``eagle3.export.fit`` which rows the next forward has. The pieces of text lie side by
    side; in a target's caches each has ``length`` slots."""

    def __init__(self, length: int):
        self.length = length
        self.of_rows: Tensor | None = None
        """int64 [T], the piece of text that each row belongs to; None means piece 0 for all rows."""
        self.step = 0
        """The step of a head's chains. The rows of step 0 are those of the text, later ones belong to a chain each."""
        self.kept: Tensor | None = None
        """int64 [T], in steps 2, 3, ...: the row of the step before that each row continues."""
        self.anchors: Tensor | None = None
        """int64 [T], in steps 1, 2, ...: the row of the text behind which the chain of each row begins."""

    def bases(self, input_pos: Tensor) -> Tensor:
        """Return int64 [T], the first slot of the piece of text that each row belongs to."""
        return zeros_like(input_pos) if self.of_rows is None else self.of_rows * self.length
