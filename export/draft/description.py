"""What a draft head is, whatever dialect its checkpoint has: all that ``DraftHead`` is built from."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.export.checkpoints.source import Source, TensorHeader
from eagle3.export.draft.dialects.dialect import EAGLE, EAGLE3, P_EAGLE

if TYPE_CHECKING:
    from transformers import LlamaConfig

__all__ = ["EAGLE", "EAGLE3", "P_EAGLE", "DraftDescription"]


@dataclass(frozen=True)
class DraftDescription:
    """A draft head. Tensor names are already ``DraftHead``'s own (see ``tensor_names``); whatever is there or not
    (biases, norms, an embedding, a vocabulary of its own) is told by ``headers``."""

    kind: str
    dialect: str
    """The system whose files these are, as ``--draft-dialect`` names it."""
    source: Source
    layer: "LlamaConfig"
    """Sizes and rotary table of the decoder layers, in transformers' terms; ``head_dim`` is that of the tensors."""
    layers: int
    tensor_names: dict[str, str]
    """Checkpoint tensor to ``DraftHead`` parameter or buffer; a tensor that is not here is not loaded."""
    headers: dict[str, TensorHeader]
    """By ``DraftHead``'s names."""
    target_vocab_size: int
    aux_layers: tuple[int, ...] | None = None
    """Taps as the checkpoint gives them, read by ``aux_convention``. None: it leaves them to the default."""
    aux_convention: str = "input"
    """Whether id L is the input of the target's layer L (transformers' ``hidden_states[L]``) or its output."""
    takes_final_state: bool = False
    """The feature is the target's final state after its norm: EAGLE, EAGLE-3 with ``use_aux_hidden_state`` false."""
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    feeds_normed: bool = False
    """The next step's feature is the normed state (``norm_output`` but for SpecForge)."""
    later_norm: str = "input_layernorm"
    """Which norm the layers after the first apply to their input."""
    shares_lm_head: bool = False
    """Its lm_head is the target's; with ``ties_lm_head`` it is its own embedding."""
    ties_lm_head: bool = False
    mask_token_id: int | None = None
    """P-EAGLE: the token of the rows that stand for proposals not made yet."""
    selector: str | None = None
    """The checkpoint's own name of ``t2d``, which says of each target id whether the draft speaks it."""
    windows: tuple[int, ...] = (0,)
    """Sliding window of each layer's own attention, in tokens; 0: it attends to every slot before."""
    chain_len: int = 3
    """Draft tokens a round, as the checkpoint suggests."""
    verifier: str | None = None
    """The target that the head was trained for, where the checkpoint names it."""
    verifier_architectures: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default=())

    @property
    def folder(self) -> Path:
        return self.source.path

    @property
    def hidden_size(self) -> int:
        return self.layer.hidden_size

    @property
    def draft_vocab_size(self) -> int:
        if self.shares_lm_head:
            return self.target_vocab_size
        return self.headers["embed_tokens.weight" if self.ties_lm_head else "lm_head.weight"].shape[0]

    @property
    def taps_width(self) -> int:
        """n_aux * the target's hidden size, as ``fc`` takes it; the width of the final state where that is the
        feature."""
        if not self.takes_final_state:
            return self.headers["fc.weight"].shape[1]
        return self.headers["fc.weight"].shape[1] - self.hidden_size if self.kind == EAGLE else self.hidden_size

    @property
    def has_embedding(self) -> bool:
        return "embed_tokens.weight" in self.headers

    @property
    def maps_vocabulary(self) -> bool:
        return "d2t" in self.headers

    @property
    def window(self) -> int:
        """The shortest window of any layer, 0 where there is none."""
        return min((window for window in self.windows if window), default=0)

    def has(self, module: str) -> bool:
        """Whether the checkpoint has a weight for a module of ``DraftHead``."""
        return f"{module}.weight" in self.headers
