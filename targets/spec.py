"""What a target is to the exporter: a protocol for the module, a record for the registry."""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

SHIPPED = Path(__file__).parent


class TapTarget(Protocol):
    """A causal language model with a KV cache of its own, as a ``torch.nn.Module``."""

    embed_tokens: "nn.Embedding"
    """Raw rows [vocab_size, hidden_size]: shared with a draft head that has no embedding of its own."""

    def forward(
        self, tokens: "Tensor", input_pos: "Tensor", taps: tuple[int, ...]
    ) -> tuple["Tensor", tuple["Tensor", ...]]:
        """One forward over the cache.

        Args:
            tokens: int64 [1, T]
            input_pos: int64 [T], consecutive; a position written before is replaced
            taps: ascending ids; tap L is the input of layer L, transformers' ``hidden_states[L]``
                (0: the embedding's output; n_layers: the last layer's output before the final norm)

        Returns:
            the final normed state [1, T, hidden_size] and one [1, T, hidden_size] per tap
        """

    def logits(self, state: "Tensor") -> "Tensor":
        """Logits [1, R, vocab_size] of normed states [1, R, hidden_size]."""


Weights = Iterable[tuple[str, "Tensor"]]
"""The tensors of a checkpoint under its own names, some of them quantized (torchao's classes); read once, in order."""


@dataclass(frozen=True)
class Skeleton:
    """A model on the meta device and how a checkpoint fills it, as ExecuTorch's ``load_checkpoint`` takes it."""

    model: "nn.Module"
    key_map: Callable[[str], str | None]
    """Checkpoint name to the model's, None for a tensor that is not read."""
    tie_map: dict[str, tuple[str, bool]]

    def fill(self, weights: Weights, dtype: "torch.dtype") -> None:
        """Load the tensors of a checkpoint; a tied head is the embedding itself."""
        import torch
        from executorch.extension.llm.export.load import load_checkpoint

        load_checkpoint(
            "",
            self.model,
            key_map=self.key_map,
            tie_map=self.tie_map,
            dtype=dtype,
            raw_iter=lambda _: weights,
        )
        for embedding, (head, _) in self.tie_map.items():
            weight, own = self.model.get_parameter(embedding), self.model.get_parameter(head)
            plain = type(weight.data) is type(own.data) is torch.Tensor
            if plain and weight.data_ptr() == own.data_ptr():
                self.model.get_submodule(head.rpartition(".")[0]).weight = weight


@dataclass(frozen=True)
class TargetSpec:
    """A registered target.

    ``family`` names a module, imported only when it is used (torch and transformers are slow to import), with

    - ``skeleton(config, max_seq_len) -> Skeleton``: the model without weights; ValueError for a variant it has not;
    - ``Target(model, max_seq_len, attention, dtype)``: the class of its ``TapTarget``, over such a model;
    - ``load(weights, config, max_seq_len, dtype, attention) -> TapTarget``,

    where ``weights`` are a checkpoint's tensors, ``config`` is transformers' text configuration and ``attention`` an
    ``AttentionFactory``.
    """

    summary: str
    family: str
    model_types: tuple[str, ...] = ()
    """transformers' ``model_type`` of the text configurations that the family reads; none: any."""
    checkpoint: Path | None = None
    """Shipped with the package; otherwise ``--checkpoint`` names a Hugging Face folder or a GGUF file."""
    draft: Path | None = None
    max_seq_len: int = 4096
    """Default of ``--max-seq-len``, in tokens."""
    min_forward_len: Callable[[Any], int] = lambda config: 1
    max_forward_len: Callable[[Any], int] = lambda config: sliding_window(config) or config.max_position_embeddings
    """From the configuration: how many rows one forward may have. A longer chunk cuts sliding attention short."""

    def module(self) -> ModuleType:
        return importlib.import_module(self.family)


def layer_windows(config) -> list[int]:
    """The sliding window of each layer of a transformers text configuration, in tokens, 0 where it attends fully.

    Without ``layer_types`` a ``sliding_window`` is every layer's (Mistral, Phi-3, Starcoder 2). Raises ValueError for a
    layer that attends otherwise.
    """
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None) or 0
    if not kinds:
        return [window] * config.num_hidden_layers
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(f"layer_types has {kind}, but full_attention and sliding_attention are what is supported")
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def sliding_window(config) -> int:
    """The sliding window in tokens of a transformers text configuration, 0 where every layer attends fully."""
    return max(layer_windows(config))
