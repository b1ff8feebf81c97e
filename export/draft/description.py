"""The description of a draft head, independent of its checkpoint's dialect. ``DraftHead`` is built from it alone."""

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
    """A draft head. Tensor names are ``DraftHead``'s own (see ``tensor_names``). ``headers`` say which optional parts
    exist (biases, norms, an embedding, a vocabulary of its own)."""

    kind: str
    dialect: str
    """The system that wrote the files, under its name for ``--draft-dialect``."""
    source: Source
    layer: "LlamaConfig"
    """Sizes and rotary parameters of the decoder layers, as in transformers; ``head_dim`` is derived from the
    tensors."""
    layers: int
    tensor_names: dict[str, str]
    """Maps tensors of the checkpoint to parameters or buffers of ``DraftHead``; other tensors are not loaded."""
    headers: dict[str, TensorHeader]
    """The headers of these tensors, by ``DraftHead``'s names."""
    target_vocab_size: int
    aux_layers: tuple[int, ...] | None = None
    """Taps as in the checkpoint, with the meaning of ``aux_convention``; None if the checkpoint has none."""
    aux_convention: str = "input"
    """"input" if id L is the input of the target's layer L (transformers' ``hidden_states[L]``), "output" if its
    output."""
    takes_final_state: bool = False
    """The feature is the target's final state after its norm: for EAGLE, and EAGLE-3 without
    ``use_aux_hidden_state``."""
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    feeds_normed: bool = False
    """The next step's feature is the normed state (``norm_output``, except for SpecForge)."""
    later_norm: str = "input_layernorm"
    """The norm that the layers after the first apply to their input."""
    shares_lm_head: bool = False
    """The head uses the target's lm_head."""
    ties_lm_head: bool = False
    """The head uses its own embedding as lm_head."""
    mask_token_id: int | None = None
    """P-EAGLE: the token of the rows for proposals that are not made yet."""
    selector: str | None = None
    """The checkpoint's own name of ``t2d``, which says for each target id if the draft vocabulary contains it."""
    windows: tuple[int, ...] = (0,)
    """Sliding window of each layer's own attention, in tokens; 0 for full attention."""
    chain_len: int = 3
    """Draft tokens per round that the checkpoint suggests."""
    verifier: str | None = None
    """The target that the head was trained for, if the checkpoint names it."""
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
        """The width of the taps together, n_aux * the target's hidden size, which ``fc`` takes; or the width of the
        final state if that is the feature."""
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
        """The shortest sliding window of any layer, 0 if there is none."""
        return min((window for window in self.windows if window), default=0)

    def has(self, module: str) -> bool:
        """Return True if the checkpoint has a weight for a module of ``DraftHead``."""
        return f"{module}.weight" in self.headers
