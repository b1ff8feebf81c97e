"""The description of a draft head, independent of the dialect of its checkpoint. The head's module is built from this
description alone.

``DraftDescription`` has the fields that the plan, the lowering and the report need from a head of any kind. The
description of a kind (``kinds/``) adds the fields that only its heads have.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from eagle3.export.checkpoints.source import Source, TensorHeader


@dataclass(frozen=True, kw_only=True)
class DraftDescription:
    """The description of a draft head. Tensors have the names that they have in the module. ``headers`` shows which
    optional parts exist (biases, norms, an embedding, a vocabulary of its own)."""

    kind: str
    """A key of ``KINDS``."""
    dialect: str
    """The system that wrote the files. If the kind has dialects, this is the name that ``--draft-dialect`` takes."""
    source: Source
    layer: Any
    """transformers' configuration of the decoder layers: sizes and rotary parameters."""
    tensor_names: dict[str, str]
    """Maps tensors of the checkpoint to parameters or buffers of the module; other tensors are not loaded."""
    headers: dict[str, TensorHeader]
    """The headers of the tensors in ``tensor_names``, by the module's names."""
    target_vocab_size: int
    aux_layers: tuple[int, ...] | None = None
    """Taps as in the checkpoint, with the meaning of ``aux_convention``; None if the checkpoint has none."""
    aux_convention: str = "input"
    """"input" if id L is the input of the target's layer L (transformers' ``hidden_states[L]``), "output" if its
    output."""
    convention_known: bool = False
    """True if all code that writes the dialect gives ids the meaning of ``aux_convention``; otherwise the ids
    themselves may show that they have the other meaning."""
    tap_order: tuple[int, ...] = ()
    """The order in which the head takes its taps, as indices into the ascending taps; empty if the order is
    ascending."""
    takes_final_state: bool = False
    """True if the feature is the target's final state after its norm."""
    shares_lm_head: bool = False
    """True if the head uses the target's lm_head."""
    d2t_holds_ids: bool = False
    """True if ``d2t`` holds the target's ids instead of offsets."""
    copies: tuple[str, ...] = ()
    """Tables of the checkpoint that are left out because they equal the target's bit for bit (``reading.py``)."""
    windows: tuple[int, ...] = ()
    """Sliding window of each layer's own attention, in tokens; 0 for full attention. Empty for a head without KV
    caches. A cache is a ring of two such windows."""
    block_rows: int = 0
    """The number of rows of the block that every forward computes in addition to the given rows, in separate
    linears."""
    selector: str | None = None
    """The checkpoint's name of the tensor ``t2d``, which says for each target id if the draft vocabulary contains
    it."""
    chain_len: int = 3
    """Draft tokens per round that the checkpoint suggests."""
    verifier: str | None = None
    """The target that the head was trained for, if the checkpoint names it."""
    verifier_architectures: tuple[str, ...] = ()
    gemma4: bool = False
    """True if the layers are Gemma 4's layers of full attention."""
    embedding_scale: float = 1.0
    softcap: float | None = None
    """The cap of the logits: a logit x becomes softcap * tanh(x / softcap)."""
    warnings: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return self.source.path

    @property
    def hidden_size(self) -> int:
        """The width of a feature."""
        return self.layer.hidden_size

    @property
    def feature_size(self) -> int:
        """The width of a feature as the target's methods return it."""
        return self.hidden_size

    @property
    def taps_width(self) -> int:
        """The width of the head's input from the target: all taps together, or the final state."""
        return self.hidden_size

    @property
    def key_size(self) -> int:
        """The size of one key of an attention head in the draft head's own layers."""
        config = self.layer
        return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    @property
    def keys(self) -> tuple[tuple[int, int], ...]:
        """The number of heads and the size of a key in the cache of each of ``windows``."""
        return tuple((self.layer.num_key_value_heads, self.key_size) for _ in self.windows)

    @property
    def draft_vocab_size(self) -> int:
        return self.target_vocab_size

    @property
    def has_cache(self) -> bool:
        """True if the draft head keeps keys and values of its own."""
        return bool(self.windows)

    @property
    def has_embedding(self) -> bool:
        """True if the draft head has an embedding of its own, False if it uses the target's."""
        return "embed_tokens.weight" in self.headers

    @property
    def maps_vocabulary(self) -> bool:
        return "d2t" in self.headers

    @property
    def window(self) -> int:
        """The shortest sliding window of any layer, 0 if there is none."""
        return min((window for window in self.windows if window), default=0)

    @property
    def longest_chain(self) -> int | None:
        """The most tokens that the head can propose a round; None if there is no limit."""
        return None

    def in_program(self, shares_caches: bool) -> Self:  # noqa: ARG002 - a head that reads the target's caches does
        """Return the description of the head in a program whose methods share caches, or share none."""
        return self

    def proposals(self, chain_len: int) -> int:  # noqa: ARG002 - the kinds that propose a chain in one forward read it
        """Return how many of a round's ``chain_len`` tokens one forward of the head proposes."""
        return 1

    def fused_rows(self, chain_len: int) -> int:
        """Return the most rows that a linear has in a fused round of ``chain_len`` tokens."""
        return max(chain_len + 1, self.block_rows)

    def has(self, module: str) -> bool:
        """Return True if the checkpoint has a weight for a module."""
        return f"{module}.weight" in self.headers
