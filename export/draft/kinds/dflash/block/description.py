"""The description of a DFlash head, independent of how its checkpoint is written."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from eagle3.export.draft.common.description import DraftDescription
from eagle3.export.draft.kinds.dflash.block.variant import Variant
from eagle3.targets.attention import Block

if TYPE_CHECKING:
    from transformers import LlamaConfig


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
