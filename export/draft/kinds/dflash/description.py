"""The description of a DFlash head, independent of how its checkpoint is written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

from torch import Tensor, nn

from eagle3.export.checkpoints.json_fields import Fields
from eagle3.export.draft.common.description import DraftDescription
from eagle3.export.draft.kinds import DFLASH
from eagle3.targets.attention import Block

if TYPE_CHECKING:
    from transformers import LlamaConfig

    from eagle3.export.checkpoints.source import TensorHeader
    from eagle3.export.draft.kinds.dflash.layers import DraftLayer

Z_LAB = "z-lab"
FACTORS = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
ANCHOR, BONUS, SHIFT = "sample_from_anchor", "dspark_bonus_anchor", "shift_label"
"""Keys that say whether the anchor's row proposes."""
Ids = Callable[[Tensor], Tensor]
"""A function that returns the best tokens of logits as ids of the target: [1, K, draft_vocab_size] -> [1, K]."""
Embed = Callable[[Tensor], Tensor]
"""A function that embeds tokens as the block does: [1, K] -> [1, K, H]."""


class Given(NamedTuple):
    """The contents of a checkpoint, from which a variant reads its own keys."""

    said: Fields
    """The keys of the configuration, including those of ``dflash_config``."""
    defaults: bool
    """True if keys that are absent have defaults."""
    layer: "LlamaConfig"
    tensors: "Mapping[str, TensorHeader]"
    rows: int
    """The rows of a block."""
    first_row: int


class Behind(nn.Module):
    """A module after the block that changes the block's logits."""

    sees_block: bool = False
    """True if it takes the states of all rows, False if only of those that propose."""
    takes_token_before: bool = False
    """True if it also takes the token before the anchor."""

    def attached(self) -> None:
        """Convert loaded tensors to the form in which they are used, once they are loaded."""

    def forward(self, logits: Tensor, state: Tensor, given: Tensor, ids: Ids, embed: Embed) -> Tensor:
        """Return the changed logits.

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
    """The parts of a head that a plain DFlash does not have. The fields of a subclass hold the values of one
    configuration, its class variables the facts about all heads of the variant. This base class adds nothing to a
    DFlash."""

    kind: ClassVar[str]
    keys: ClassVar[tuple[str, ...]] = ()
    """The variant's keys in a ``dflash_config``."""
    dialects: ClassVar[tuple[str, ...]] = ()
    """The dialects in which the variant is supported; empty for all."""
    anchor_proposes: ClassVar[bool] = False
    """True if the anchor's row proposes in a file without a key for it."""
    sliding_non_causal: ClassVar[bool] = False
    """The default of ``sliding_window_non_causal``."""
    embeds_as_target: ClassVar[bool] = False
    """True if z-lab trained the variant with the target's own module as its embedding."""
    names: ClassVar[Mapping[str, str]] = {}
    """Maps patterns of tensor names in checkpoints to the module's names."""
    module: ClassVar[str] = ""
    """The attribute of the head that holds ``behind``."""

    @classmethod
    def check_keys(cls, own: Fields, config: Fields) -> None:
        """Raise ValueError for keys of other variants that would have another meaning in this one. ``own`` is
        ``dflash_config``."""

    @classmethod
    def settled(cls, said: Fields, defaults: bool) -> str:  # noqa: ARG003
        """Return the kind of a head whose file names this variant; its keys may make it another kind."""
        return cls.kind

    @classmethod
    def first_row(cls, said: Fields, anchor: bool, defaults: bool) -> int:  # noqa: ARG003
        """Return the first row of a block that proposes a token: 0 if the anchor's does, else 1. ``anchor`` is True if
        it does in a file without a key for it."""
        from_anchor, bonus = said.boolean(ANCHOR), said.boolean(BONUS)
        if from_anchor is None and bonus is not None:
            from_anchor = not bonus
        if from_anchor is None:
            from_anchor = anchor
        elif bonus == from_anchor:
            raise ValueError(f"{said.file}: {ANCHOR} and {BONUS} are both {str(bonus).lower()}: correct one of them")
        return 0 if from_anchor else 1

    @classmethod
    def chain_len(cls, rows: int, first_row: int) -> int:
        """Return the default chain length, for a file without a key for it."""
        return rows - first_row

    @classmethod
    def read(cls, given: Given) -> Self:  # noqa: ARG003
        """Read the variant's own keys. Raises ValueError with one line."""
        return cls()

    @property
    def fixes_first_row(self) -> bool:
        """True if ``first_row`` is certain, so that no other value needs to be tried."""
        return False

    def layer(self, plain: "type[DraftLayer]") -> "Callable[[DFlashDescription, int], nn.Module]":
        """Return the class or function that makes a decoder layer, by default ``plain``."""
        return plain

    def behind(self, draft: "DFlashDescription", proposals: int) -> Behind | None:  # noqa: ARG002
        """Return the module after the block, without weights; None if there is none."""
        return None


@dataclass(frozen=True)
class DFlash(Variant):
    """The variant without further parts."""

    kind = DFLASH
    embeds_as_target = True

    @classmethod
    def check_keys(cls, own: Fields, config: Fields) -> None:
        if own.get(SHIFT) or config.get(SHIFT):
            raise ValueError(f"{config.file}: {SHIFT} is true in a {DFLASH} head: type {ANCHOR} in its place")


@dataclass(frozen=True, kw_only=True)
class DFlashDescription(DraftDescription):
    """The description of a head that drafts a block in one forward. ``windows`` count the positions before a block and
    the block itself, since the ring holds both."""

    layer: "LlamaConfig"
    attends: tuple[Block, ...]
    """The ranges that the rows of a block attend to, by layer."""
    mask_token_id: int
    first_row: int
    """The first row of a block that proposes a token: 0, or 1 if the anchor's row does not."""
    embeds_as_target: bool = False
    """True if tokens are embedded by the target's module, including its scale. If False, the rows of the embedding are
    used unscaled."""
    output_multiplier: float = 1.0
    variant: Variant
    """The parts of the head that a plain DFlash does not have."""

    @property
    def draft_vocab_size(self) -> int:
        return self.target_vocab_size if self.shares_lm_head else self.headers["lm_head.weight"].shape[0]

    @property
    def taps_width(self) -> int:
        return self.headers["fc.weight"].shape[1]

    @property
    def longest_chain(self) -> int:
        """The number of tokens that a block proposes."""
        return self.block_rows - self.first_row

    def proposals(self, chain_len: int) -> int:
        return chain_len
