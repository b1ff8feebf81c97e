"""The rows of a head's chains behind a text, for a measurement."""

from torch import Tensor


class Pieces:
    """Says to the attention of ``eagle3.export.checks.fit`` which rows the next forward of a head has."""

    def __init__(self) -> None:
        self.step = 0
        """The step of a head's chains. The rows of step 0 are those of the text, later ones belong to a chain each."""
        self.anchors: Tensor | None = None
        """int64 [T], in steps 1, 2, ...: the row of the text behind which the chain of each row begins."""
