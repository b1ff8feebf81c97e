"""The description of an EAGLE head, independent of how its checkpoint is written."""

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from eagle3.export.draft.common.description import DraftDescription
from eagle3.export.draft.kinds import EAGLE, P_EAGLE

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True, kw_only=True)
class EagleDescription(DraftDescription):
    """The description of an EAGLE-3, P-EAGLE or EAGLE head of any dialect, from which ``Head`` is made. ``layer``
    is a ``LlamaConfig`` whose ``head_dim`` is derived from the tensors."""

    layer: "PreTrainedConfig"
    layers: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    feeds_normed: bool = False
    """True if the next step's feature is the normed state (``norm_output``, except for SpecForge)."""
    later_norm: str = "input_layernorm"
    """The name of the norm that the layers after the first apply to their input."""
    ties_lm_head: bool = False
    """True if the head uses its own embedding as lm_head."""
    mask_token_id: int | None = None
    """For P-EAGLE, the token of the mask rows, which stands for tokens that are not proposed yet; otherwise None."""
    windows: tuple[int, ...] = (0,)

    @property
    def draft_vocab_size(self) -> int:
        if self.shares_lm_head:
            return self.target_vocab_size
        return self.headers["embed_tokens.weight" if self.ties_lm_head else "lm_head.weight"].shape[0]

    @property
    def taps_width(self) -> int:
        """The input width of ``fc``, the number of taps times the target's hidden size; or the width of the final state
        if that is the feature."""
        if not self.takes_final_state:
            return self.headers["fc.weight"].shape[1]
        return self.headers["fc.weight"].shape[1] - self.hidden_size if self.kind == EAGLE else self.hidden_size

    def proposals(self, chain_len: int) -> int:
        return chain_len if self.kind == P_EAGLE else 1

    def fused_rows(self, chain_len: int) -> int:
        return 2 * chain_len if self.kind == P_EAGLE else chain_len + 1


def windowed(draft: DraftDescription, window: int) -> DraftDescription:
    """Return the head as if ``sliding_window`` in its ``config.json`` were ``window`` tokens, for all layers.

    Raises ValueError for a head without full attention.
    """
    if not isinstance(draft, EagleDescription):
        raise ValueError(
            f"--draft-window {window} is for EAGLE heads, but {draft.folder} is a head of the kind {draft.kind}: leave "
            "it out"
        )
    if any(draft.windows):
        raise ValueError(
            f"--draft-window {window}: the head was trained with a sliding window of {draft.window} tokens, which the "
            "export keeps: leave it out"
        )
    layer = deepcopy(draft.layer)
    layer.layer_types, layer.sliding_window = ["sliding_attention"] * draft.layers, window
    return replace(draft, layer=layer, windows=(window,) * draft.layers)
