"""The types that describe a target to the exporter: a protocol for its module, and a record for the registry."""

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
    """The positions of recurrent layers' states; None if any position may be written again at any time."""

    @property
    def embed_tokens(self) -> "nn.Embedding":
        """The raw rows [vocab_size, hidden_size], which a draft head without its own embedding shares."""

    @property
    def lm_head(self) -> "nn.Linear":
        """The output layer over normed states, without the scale or softcap of ``logits``; a draft head without its own
        shares it."""

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
        """Return the first layer's input for tokens [1, T]: the embedding's rows as the model scales them, [1, T,
        hidden_size]."""

    def kept(self, kind: str) -> "nn.Module | None":
        """Return the attention module (of an ``AttentionFactory``) that holds the keys and values of the last layer of
        ``kind`` with keys of its own; None if there is no such layer. ``kind`` is "full_attention" or
        "sliding_attention"."""

    def scores(self, state: "Tensor") -> "Tensor":
        """Return scores [1, R, vocab_size] of normed states [1, R, hidden_size]: the logits before the softcap.

        The largest score is the largest logit. Where the softcap makes several of the largest logits equal (in float32,
        from about nine times its value on), the largest score is one of them.
        """

    def capped(self, scores: "Tensor") -> "Tensor":
        """Return the logits of ``scores``, in float32."""

    def logits(self, state: "Tensor") -> "Tensor":
        """Return logits [1, R, vocab_size] of normed states [1, R, hidden_size], in float32."""


Weights = Iterable[tuple[str, "Tensor"]]
"""The tensors of a checkpoint under its own names, some of them quantized (torchao's classes). They are read once, in
order."""
Convert = Callable[[str, "Tensor"], "Tensor"]
"""Takes the model's own name of a tensor and the checkpoint's tensor. Returns the tensor that the model holds, which
may be the same one."""


@dataclass(frozen=True)
class Skeleton:
    """A model on the meta device, and how a checkpoint fills it, in the terms of ExecuTorch's ``load_checkpoint``."""

    model: "nn.Module"
    key_map: Callable[[str], str | None]
    """Maps a checkpoint's name to the model's; None for a tensor that is not read."""
    tie_map: dict[str, tuple[str, bool]]
    conversion: "Conversion | None" = None
    """Set if ``key_map`` gives names that are not the model's own."""

    def expected(self, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """Map names to shapes of the tensors that must be in a checkpoint that holds ``names``, in the form that
        ``key_map`` gives."""
        if self.conversion is not None:
            return self.conversion.expected(names)
        return {name: tuple(value.shape) for name, value in self.model.state_dict().items()}

    def fill(self, weights: Weights, dtype: "torch.dtype", convert: Convert | None = None) -> None:
        """Load the tensors of a checkpoint. Each is converted as it is read, so that only one unconverted tensor is in
        memory.

        A tied head is the embedding itself, unless ``convert`` makes another tensor of it.
        """
        from eagle3.targets.input_order import InputOrders, use_input_orders
        from eagle3.targets.loading import as_stored, default_form, load_tensors
        from eagle3.targets.state_mixers import ExactVectors

        orders, exact = InputOrders(self.key_map), ExactVectors(self.model)
        given = ((name, tensor) for name, tensor in weights if not orders.takes(name, tensor))
        named = ((own, tensor) for name, tensor in given if (own := self.key_map(name)) is not None)
        joined = named if self.conversion is None else self.conversion.joined(named)
        converted = self._converted(joined, convert or default_form, orders)
        load_tensors(self.model, exact.seen(converted), dtype, convert=as_stored)
        exact.restore()
        use_input_orders(self.model)

    def _converted(self, tensors: Weights, convert: Convert, orders: "InputOrders") -> Iterator[tuple[str, "Tensor"]]:
        """Convert tensors under the model's own names; tied heads come last."""
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
    """transformers' ``model_type`` of the text configurations that the family reads; empty if it reads any."""
    checkpoint: Path | None = None
    """The checkpoint, if it is shipped with the package."""
    drafts: tuple[Path, ...] = ()
    """Draft heads shipped with the package. The first is the default of ``--draft``."""
    repository: str | None = None
    """The model's repository on the Hugging Face hub, which is the default of ``--checkpoint``."""
    heads: tuple[str, ...] = ()
    """Repositories of draft heads published for the model. The first is the default of ``--draft``."""
    max_seq_len: int = 4096
    """The default of ``--max-seq-len``, in tokens."""
    min_forward_len: Callable[["PreTrainedConfig"], int] = lambda _config: 1
    max_forward_len: Callable[["PreTrainedConfig"], int] = lambda config: (
        sliding_window(config) or config.max_position_embeddings
    )
    """Functions of the configuration that return the fewest and the most rows of a forward. The most are bounded, since
    a longer chunk would cut sliding attention short."""

    @property
    def draft(self) -> Path | None:
        return self.drafts[0] if self.drafts else None

    def module(self) -> ModuleType:
        return importlib.import_module(self.family)


class Window(NamedTuple):
    """The number of tokens that a layer attends back to; 0 for all. With ``chunked``, it does not attend past the last
    multiple of that number."""

    tokens: int = 0
    chunked: bool = False


RECURRENT, HYBRID = "linear_attention", "hybrid"
"""The kinds of layers with a recurrent state (``recurrent.py``): without attention, and beside attention."""
WITHOUT_PAST = ("mlp", "moe")
"""The kinds of layers that read no other position."""
CONVOLUTION = "conv"
"""The kind of layers with a short convolution (``short_conv.py``)."""
DELTA_RULE, MAMBA_2, SHORT_CONVOLUTION = "the gated delta rule", "Mamba 2", "a short convolution"
KIMI_DELTA = "Kimi's delta attention"
"""The kinds of layers with a state, by what a backend must compute."""
CONVOLUTION_WINDOW = 512
"""Tokens: the sliding window of a convolution's ring in a model without another one."""
ROLLBACK_ROWS = 16
"""The most rows of a forward that recurrent layers can reject; a longer forward commits the rows before them."""
_WINDOW_FIELDS = {
    "full_attention": None,
    "sliding_attention": "sliding_window",
    "chunked_attention": CHUNK,
    RECURRENT: None,
    HYBRID: None,
    CONVOLUTION: None,
    **dict.fromkeys(WITHOUT_PAST),
}


def layer_windows(config: "PreTrainedConfig") -> list[Window]:
    """Return the window of each layer of a transformers text configuration.

    Without ``layer_types``, every layer has the ``sliding_window`` (Mistral, Phi-3, Starcoder 2). But a class without
    that field (Llama, OLMo 2) ignores it: transformers keeps such a key of the file, and no code reads it. Raises
    ValueError for a layer with another kind of attention.
    """
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        tokens = getattr(config, "sliding_window", None) if has_field(config, "sliding_window") else None
        return [Window(tokens or 0)] * config.num_hidden_layers
    for kind in kinds:
        if kind not in _WINDOW_FIELDS:
            raise ValueError(
                f"layer_types has {kind}, but only {', '.join(_WINDOW_FIELDS)} are supported: "
                "eagle3-export --list-targets lists models"
            )
    windows = [_window(config, kind) for kind in kinds]
    ring = Window(max(window.tokens for window in windows) or CONVOLUTION_WINDOW)  # the runner knows one for all layers
    return [ring if kind == CONVOLUTION else window for kind, window in zip(kinds, windows, strict=True)]


def has_field(config: "PreTrainedConfig", name: str) -> bool:
    """Return True if the class of a configuration has a field. transformers keeps any other key of a file too, but no
    code reads it."""
    return any(field.name == name for field in fields(config))


def _window(config: "PreTrainedConfig", kind: str) -> Window:
    tokens = getattr(config, _WINDOW_FIELDS[kind] or "", None) or 0
    return Window(tokens, bool(tokens) and _WINDOW_FIELDS[kind] == CHUNK)


def is_recurrent(config: "PreTrainedConfig") -> bool:
    """Return True if a transformers text configuration has recurrent layers."""
    return not {RECURRENT, HYBRID}.isdisjoint(getattr(config, "layer_types", None) or ())


def states_of(config: "PreTrainedConfig") -> frozenset[str]:
    """Return the kinds of layers with a state that a transformers text configuration has, as errors name them."""
    found = {SHORT_CONVOLUTION} if CONVOLUTION in (getattr(config, "layer_types", None) or ()) else set()
    if is_recurrent(config):
        fields = {"linear_num_value_heads": DELTA_RULE, "linear_num_heads": KIMI_DELTA}
        found.add(next((kind for name, kind in fields.items() if hasattr(config, name)), MAMBA_2))
    return frozenset(found)


def sliding_window(config: "PreTrainedConfig") -> int:
    """Return the longest window or chunk, in tokens, of a transformers text configuration; 0 if every layer has full
    attention."""
    return max(window.tokens for window in layer_windows(config))
