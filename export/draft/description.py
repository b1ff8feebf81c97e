"""What a draft head is, whatever format its checkpoint has: all that ``DraftHead`` is built from."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.export.checkpoints.source import Source, TensorHeader

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class DraftDescription:
    """An EAGLE-3 draft head of one layer. Tensor names are already ``DraftHead``'s own (see ``tensor_names``)."""

    format: str
    source: Source
    layer: "PreTrainedConfig"
    """transformers' configuration of the one decoder layer: LlamaConfig or Qwen3Config."""
    tensor_names: dict[str, str]
    """Checkpoint tensor to ``DraftHead`` parameter or buffer; a tensor that is not here is not loaded."""
    headers: dict[str, TensorHeader]
    """By ``DraftHead``'s names."""
    target_vocab_size: int
    aux_layers: tuple[int, ...] | None
    """Taps as the checkpoint gives them; tap L is the input of layer L. None: it leaves them to the default."""
    norm_before_residual: bool
    norm_before_fc: bool = False
    norm_output: bool = False
    selector: str | None = None
    """The checkpoint's own name of ``t2d``, which says of each target id whether the draft speaks it."""
    window: int = 0
    """Sliding window of the draft's own attention, in tokens; 0: it attends to every slot before."""
    chain_len: int = 3
    """Draft tokens a round, as the checkpoint suggests."""
    verifier: str | None = None
    """The target that the head was trained for, where the checkpoint names it."""
    warnings: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return self.source.path

    @property
    def hidden_size(self) -> int:
        return self.layer.hidden_size

    @property
    def draft_vocab_size(self) -> int:
        return self.headers["lm_head.weight"].shape[0]

    @property
    def taps_width(self) -> int:
        """n_aux * the target's hidden size, as ``fc`` takes it."""
        return self.headers["fc.weight"].shape[1]

    @property
    def has_embedding(self) -> bool:
        return "embed_tokens.weight" in self.headers

    @property
    def maps_vocabulary(self) -> bool:
        return "d2t" in self.headers
