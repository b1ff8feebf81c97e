"""The base class of the variants of the block family. A variant adds to a DFlash keys, tensors, and a module behind the
block or in its layers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from torch import Tensor, nn

from eagle3.export.checkpoints.json_fields import boolean, count
from eagle3.export.draft.kinds.dflash.block.keys import ANCHOR, BONUS
from eagle3.export.draft.kinds.dflash.block.reference import Formulas

if TYPE_CHECKING:
    from transformers import LlamaConfig

    from eagle3.export.checkpoints.source import TensorHeader
    from eagle3.export.draft.kinds.dflash.block.description import DFlashDescription
    from eagle3.export.draft.kinds.dflash.block.dialects import Dialect
    from eagle3.export.draft.kinds.dflash.block.layers import DraftLayer

Ids = Callable[[Tensor], Tensor]
"""Returns the best tokens of logits, as ids of the target: [1, K, draft_vocab_size] -> [1, K]."""
Embed = Callable[[Tensor], Tensor]
"""Returns the embedding of tokens, as the block has it: [1, K] -> [1, K, H]."""


class Given(NamedTuple):
    """The contents of a checkpoint, from which a variant reads its own keys."""

    said: Mapping[str, Any]
    """The keys of the configuration, those of ``dflash_config`` among them."""
    dialect: "Dialect"
    layer: "LlamaConfig"
    tensors: "Mapping[str, TensorHeader]"
    rows: int
    """The rows of a block."""
    first_row: int
    file: Path


class Sizes(NamedTuple):
    """The sizes of a twin."""

    hidden: int
    vocabulary: int
    spoken: int
    """The size of the draft's vocabulary."""
    layers: int
    rows: int
    """The rows of a block."""


class Behind(nn.Module):
    """A module behind the block, which changes its logits."""

    sees_block: bool = False
    """It takes the states of all rows, not of those alone that propose."""
    takes_token_before: bool = False
    """It takes the token before the anchor as well."""

    def attached(self) -> None:
        """Replace what was loaded by what is kept of it."""

    def forward(self, logits: Tensor, state: Tensor, given: Tensor, ids: Ids, embed: Embed) -> Tensor:
        """Change logits.

        Args:
            logits: [1, K, draft_vocab_size], the block's own, of the rows that propose
            state: [1, K, H] of these rows, or [1, B, H] of all rows
            given: int64 [1, 1], the anchor; or [1, 2], the token before it and the anchor
            ids, embed: see ``Ids`` and ``Embed``

        Returns:
            logits of the same shape
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Variant:
    """The part of a head that a DFlash does not have. The fields of a subclass hold what a configuration says, its
    class variables what is so of all its heads. This class adds nothing."""

    kind: ClassVar[str]
    keys: ClassVar[tuple[str, ...]] = ()
    """Its keys in a ``dflash_config``."""
    dialects: ClassVar[tuple[str, ...]] = ()
    """The dialects in which it is read; empty for all."""
    anchor_proposes: ClassVar[bool] = False
    """The anchor's row proposes where no key says whether it does."""
    sliding_non_causal: ClassVar[bool] = False
    """The default of ``sliding_window_non_causal``."""
    embeds_as_target: ClassVar[bool] = False
    """z-lab trained it with the target's own module as its embedding."""
    names: ClassVar[Mapping[str, str]] = {}
    """Patterns of tensors in checkpoints, with the module's names of them."""
    module: ClassVar[str] = ""
    """The attribute of the head that holds ``behind``."""
    formulas: ClassVar[type[Formulas]] = Formulas

    @classmethod
    def check_keys(cls, own: Mapping[str, Any], config: Mapping[str, Any], file: Path) -> None:
        """Raise ValueError for keys of other variants that mean something else here. ``own`` is ``dflash_config``."""

    @classmethod
    def settled(cls, said: Mapping[str, Any], dialect: "Dialect", file: Path) -> str:  # noqa: ARG003
        """Return the kind of head that a file of this variant is."""
        return cls.kind

    @classmethod
    def first_row(cls, said: Mapping[str, Any], dialect: "Dialect", tokens: int | None, file: Path) -> int:
        """Return the first row of a block that proposes a token: 0 if the anchor's does, else 1. ``tokens`` are those
        that a file of speculators proposes."""
        from_anchor, bonus = (boolean(said, key, None, file) for key in (ANCHOR, BONUS))
        if from_anchor is None and bonus is not None:
            from_anchor = not bonus
        if from_anchor is None:
            whole = tokens == count(said, "block_size", None, file)
            from_anchor = dialect.anchor_proposes(cls.anchor_proposes, whole)
        elif bonus == from_anchor:
            raise ValueError(f"{file}: {ANCHOR} and {BONUS} are both {str(bonus).lower()}: correct one of them")
        return 0 if from_anchor else 1

    @classmethod
    def chain_len(cls, rows: int, first_row: int) -> int:
        """Return the tokens of a round that a file without such a key suggests."""
        return rows - first_row

    @classmethod
    def read(cls, given: Given) -> Self:  # noqa: ARG003
        """Read the variant's own keys. Raises ValueError, one line."""
        return cls()

    @property
    def fixes_first_row(self) -> bool:
        """True if the first row that proposes cannot be another than the one that was read."""
        return False

    def layer(self, plain: "type[DraftLayer]") -> "Callable[[DFlashDescription, int], nn.Module]":
        """Return what makes a decoder layer, in the place of ``plain``."""
        return plain

    def behind(self, draft: "DFlashDescription", proposals: int) -> Behind | None:  # noqa: ARG002
        """Return the module behind the block, without weights."""
        return None

    def shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:  # noqa: ARG002
        """Return the shapes of its tensors in a twin, by the module's names."""
        return {}
