"""The description of a DFlash head, independent of how its checkpoint is written."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from eagle3.export.draft.common.description import DraftDescription
from eagle3.targets.attention import Block

if TYPE_CHECKING:
    from transformers import LlamaConfig


@dataclass(frozen=True, kw_only=True)
class DFlashDescription(DraftDescription):
    """A head that drafts a block in one forward. ``windows`` have room for the positions before a block and for the
    block itself, since both are in the ring."""

    layer: "LlamaConfig"
    attends: tuple[Block, ...]
    """The ranges that the rows of a block attend to, by layer."""
    mask_token_id: int
    first_row: int
    """The first row of a block that proposes a token: 0, or 1 if the anchor's row does not."""
    embeds_as_target: bool = False
    """Tokens are embedded as the target embeds them, scaled where it scales; if not, by the embedding's rows alone."""
    output_multiplier: float = 1.0
    markov_rank: int = 0
    markov_type: str = "vanilla"
    """DSpark's head: its rank, 0 for none, and its type."""
    conv_taps: int = 0
    conv_group: int = 1
    """DFlash2's convolutions: their taps, 0 for none, and the channels of a group."""
    selector_rank: int = 0
    selector_top_k: int = 1
    """DFlash2's selector: its rank, 0 for none, and the tokens of a row that it chooses from."""
    refiner_rank: int = 0
    refiner_mlp_ratio: int = 1
    refiner_passes: int = 0
    """xPress's refiner: its rank, 0 for none, the width of its MLP in ranks, and the passes over a block."""
    gru_size: int = 0
    gru_rank: int = 1
    gru_first: int = 0
    """Domino's GRU: the size of its state, 0 for none, the rank of its bias, and the first proposal with a bias."""

    @property
    def draft_vocab_size(self) -> int:
        return self.target_vocab_size if self.shares_lm_head else self.headers["lm_head.weight"].shape[0]

    @property
    def taps_width(self) -> int:
        return self.headers["fc.weight"].shape[1]

    @property
    def longest_chain(self) -> int:
        """The most tokens that a block proposes."""
        return self.block_rows - self.first_row

    def proposals(self, chain_len: int) -> int:
        return chain_len
