"""The types that describe a target to the exporter: a protocol for the module, a record for the registry."""

import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedConfig

    from eagle3.targets.conversion import Conversion
    from eagle3.targets.input_order import InputOrders

SHIPPED = Path(__file__).parent
CHUNK = "attention_chunk_size"


class TapTarget(Protocol):
    """A causal language model with a KV cache of its own, as a ``torch.nn.Module``."""

    recurrent: "nn.Module | None"
    """The positions of the states of recurrent layers; None where every position may be written again at any time."""

    @property
    def embed_tokens(self) -> "nn.Embedding":
        """Raw rows [vocab_size, hidden_size]: shared with a draft head that has no embedding of its own."""

    @property
    def lm_head(self) -> "nn.Linear":
        """The head of normed states, without what ``logits`` scales or caps: shared with a draft head that has none."""

    def parameters(self) -> Iterator["nn.Parameter"]: ...

    def __call__(
        self, tokens: "Tensor", input_pos: "Tensor", taps: tuple[int, ...]
    ) -> tuple["Tensor", tuple["Tensor", ...]]:
        """Compute one forward over the cache.

        Args:
            tokens: int64 [1, T]
            input_pos: int64 [T], consecutive; a position written before is replaced
            taps: ascending ids; tap L is the input of layer L, transformers' ``hidden_states[L]``
                (0: the embedding's output; n_layers: the last layer's output before the final norm)

        Returns:
            the final normed state [1, T, hidden_size] and one [1, T, hidden_size] per tap
        """

    def embed(self, tokens: "Tensor") -> "Tensor":
        """Return the input of the first layer for tokens [1, T]: the embedding's rows, scaled as the model scales them,
        [1, T, hidden_size]."""

    def kept(self, kind: str) -> "nn.Module | None":
        """Return the attention module (``AttentionFactory``) with the keys and values of the last layer of a kind that
        has its own; None without such a layer. ``kind``: "full_attention" or "sliding_attention"."""

    def scores(self, state: "Tensor") -> "Tensor":
        """Return scores [1, R, vocab_size] of normed states [1, R, hidden_size]: the logits before the softcap.

        The greatest score is the greatest logit. Where the softcap makes equals of the greatest logits (in float32 from
        about nine times its value on), the greatest score is one of them.
        """

    def capped(self, scores: "Tensor") -> "Tensor":
        """Return the logits of ``scores``, in float32."""

    def logits(self, state: "Tensor") -> "Tensor":
        """Return logits [1, R, vocab_size] of normed states [1, R, hidden_size], in float32."""


Weights = Iterable[tuple[str, "Tensor"]]
"""The tensors of a checkpoint under its own names, some of them quantized (torchao's classes); read once, in order."""
Convert = Callable[[str, "Tensor"], "Tensor"]
"""Takes the model's own name and a checkpoint's tensor; returns what the model holds, or the tensor as it is."""


@dataclass(frozen=True)
class Skeleton:
    """A model on the meta device and how a checkpoint fills it, as ExecuTorch's ``load_checkpoint`` takes it."""

    model: "nn.Module"
    key_map: Callable[[str], str | None]
    """Maps a checkpoint's name to the model's; None for a tensor that is not read."""
    tie_map: dict[str, tuple[str, bool]]
    conversion: "Conversion | None" = None
    """Set where the names that ``key_map`` gives are not all the model's own."""

    def expected(self, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """Map each name to the shape that a checkpoint with tensors ``names``, as ``key_map`` gives them, must hold."""
        if self.conversion is not None:
            return self.conversion.expected(names)
        return {name: tuple(value.shape) for name, value in self.model.state_dict().items()}

    def fill(self, weights: Weights, dtype: "torch.dtype", convert: Convert | None = None) -> None:
        """Load the tensors of a checkpoint, each converted as it is read: no more of them is in memory.

        A tied head is the embedding itself, unless ``convert`` makes something else of it.
        """
        from eagle3.targets.input_order import InputOrders, use_input_orders
        from eagle3.targets.loading import as_stored, default_form, load_tensors

        orders = InputOrders(self.key_map)
        given = ((name, tensor) for name, tensor in weights if not orders.takes(name, tensor))
        named = ((own, tensor) for name, tensor in given if (own := self.key_map(name)) is not None)
        joined = named if self.conversion is None else self.conversion.joined(named)
        converted = self._converted(joined, convert or default_form, orders)
        load_tensors(self.model, converted, dtype, convert=as_stored)
        use_input_orders(self.model)

    def _converted(self, tensors: Weights, convert: Convert, orders: "InputOrders") -> Iterator[tuple[str, "Tensor"]]:
        """Convert tensors under the model's own names; the heads that are tied come last."""
        given, embeddings = set(), {}
        for own, value in tensors:
            given.add(own)
            converted = convert(own, value)
            if own in self.tie_map:
                embeddings[own] = value, converted
            yield from orders.settled(own, converted)
        for embedding, (raw, of_embedding) in embeddings.items():
            head, _ = self.tie_map[embedding]
            if head in given:
                continue
            value = convert(head, raw)
            if value is not of_embedding:
                yield head, value
            else:
                self.model.get_submodule(head.rpartition(".")[0]).weight = self.model.get_parameter(embedding)


@dataclass(frozen=True)
class TargetSpec:
    """A registered target.

    ``family`` names a module, imported only when it is used (torch and transformers are slow to import), with

    - ``skeleton(config, max_seq_len) -> Skeleton``: the model without weights; ValueError for a variant it has not;
    - ``Target(model, max_seq_len, attention, dtype)``: the class of its ``TapTarget``, over such a model;
    - ``load(weights, config, max_seq_len, dtype, attention, convert=None) -> TapTarget``,

    where ``weights`` are a checkpoint's tensors, ``config`` is transformers' text configuration, ``attention`` an
    ``AttentionFactory`` and ``convert`` what each tensor becomes as it is read.
    """

    summary: str
    family: str
    model_types: tuple[str, ...] = ()
    """transformers' ``model_type`` of the text configurations that the family reads; none: any."""
    checkpoint: Path | None = None
    """Shipped with the package."""
    drafts: tuple[Path, ...] = ()
    """Draft heads shipped with the package. The first is taken where ``--draft`` is not given."""
    repository: str | None = None
    """The model's repository on the Hugging Face hub, which is taken where ``--checkpoint`` is not given."""
    heads: tuple[str, ...] = ()
    """Repositories of draft heads published for the model. The first is taken where ``--draft`` is not given."""
    max_seq_len: int = 4096
    """Default of ``--max-seq-len``, in tokens."""
    min_forward_len: Callable[["PreTrainedConfig"], int] = lambda _config: 1
    max_forward_len: Callable[["PreTrainedConfig"], int] = lambda config: (
        sliding_window(config) or config.max_position_embeddings
    )
    """Takes the configuration; returns the rows a forward may have. A longer chunk cuts sliding attention short."""

    @property
    def draft(self) -> Path | None:
        return self.drafts[0] if self.drafts else None

    def module(self) -> ModuleType:
        return importlib.import_module(self.family)


class Window(NamedTuple):
    """The tokens that a layer attends back to, 0 for all. ``chunked``: not past the last multiple of that number."""

    tokens: int = 0
    chunked: bool = False


RECURRENT = "linear_attention"
"""The kind of layers with a recurrent state (``recurrent.py``)."""
CONVOLUTION = "conv"
"""The kind of layers with a short convolution (``short_conv.py``)."""
CONVOLUTION_WINDOW = 512
"""Tokens: the sliding window of a convolution's ring in a model without another one."""
ROLLBACK_ROWS = 16
"""The most rows of a forward that recurrent layers can reject; a longer one commits those before."""
_WINDOW_FIELDS = {
    "full_attention": None,
    "sliding_attention": "sliding_window",
    "chunked_attention": CHUNK,
    RECURRENT: None,
    CONVOLUTION: None,
}


def layer_windows(config: "PreTrainedConfig") -> list[Window]:
    """Return the window of each layer of a transformers text configuration.

    Without ``layer_types`` a ``sliding_window`` is every layer's (Mistral, Phi-3, Starcoder 2), and nothing in a class
    that has no such field (Llama, OLMo 2): transformers keeps the key of the file there and reads it nowhere. Raises
    ValueError for a layer that attends otherwise.
    """
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        tokens = getattr(config, "sliding_window", None) if has_field(config, "sliding_window") else None
        return [Window(tokens or 0)] * config.num_hidden_layers
    for kind in kinds:
        if kind not in _WINDOW_FIELDS:
            raise ValueError(
                f"layer_types has {kind}, but {', '.join(_WINDOW_FIELDS)} are what is supported: "
                "eagle3-export --list-targets lists models"
            )
    windows = [_window(config, kind) for kind in kinds]
    ring = Window(max(window.tokens for window in windows) or CONVOLUTION_WINDOW)  # the runner knows one for all layers
    return [ring if kind == CONVOLUTION else window for kind, window in zip(kinds, windows, strict=True)]


def has_field(config: "PreTrainedConfig", name: str) -> bool:
    """Return whether the class of a configuration has a field. transformers keeps any other key of a file too, and
    reads it nowhere."""
    return any(field.name == name for field in fields(config))


def _window(config: "PreTrainedConfig", kind: str) -> Window:
    tokens = getattr(config, _WINDOW_FIELDS[kind] or "", None) or 0
    return Window(tokens, bool(tokens) and _WINDOW_FIELDS[kind] == CHUNK)


def is_recurrent(config: "PreTrainedConfig") -> bool:
    """Return whether a transformers text configuration has recurrent layers."""
    return RECURRENT in (getattr(config, "layer_types", None) or ())


def has_convolutions(config: "PreTrainedConfig") -> bool:
    """Return whether a transformers text configuration has layers with a short convolution."""
    return CONVOLUTION in (getattr(config, "layer_types", None) or ())


def sliding_window(config: "PreTrainedConfig") -> int:
    """Return the longest window or chunk in tokens of a transformers text configuration, 0 where every layer attends
    fully."""
    return max(window.tokens for window in layer_windows(config))
