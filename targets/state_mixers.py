"""Finds what a decoder layer of transformers mixes tokens with: attention, and a mixer that keeps a state.

A mixer that keeps a state calls functions of its class's module, which ours replace while a target's forward runs.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from eagle3.targets.gated_delta import GatedDeltaState, KimiDeltaState, delta_rule
from eagle3.targets.mamba2 import Mamba2State, scan, step
from eagle3.targets.short_conv import ShortConvState, causal_convolution

Functions = dict[str, Callable[..., Any]]
CONVOLUTION: Functions = {"causal_conv1d_fn": causal_convolution}


class Form(NamedTuple):
    """Tells how the mixers of one kind are found and computed."""

    place: str
    """The attribute of a decoder layer that holds the mixer."""
    attribute: str
    """An attribute that every such mixer has, and no other module in its place."""
    functions: Functions
    """Our functions, by the names of those that they replace in the module of the mixer's class. All must be there."""
    make: Callable[[Any, int, int], nn.Module]
    """Makes the state from the mixer, the sliding window of a ring in tokens, and the context length in tokens."""
    rules: tuple[str, str] | None = None
    """The names of transformers' functions for chunks and for single rows, if the two differ by more than rounding."""

    def mixer(self, layer: nn.Module) -> nn.Module | None:
        found = getattr(layer, self.place, None)
        fits = hasattr(found, self.attribute)
        return found if fits and all(hasattr(_module(found), name) for name in self.functions) else None


_DELTA_RULES = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
_KIMI_RULES = "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"
_DELTA: Functions = {**CONVOLUTION, **dict.fromkeys(_DELTA_RULES, delta_rule)}
_KIMI: Functions = {**CONVOLUTION, **dict.fromkeys(_KIMI_RULES, delta_rule)}
_MAMBA2: Functions = {**CONVOLUTION, "mamba2_chunk_scan": scan, "mamba2_selective_state_update": step}
FORMS = (
    Form("linear_attn", "A_log", _DELTA, lambda mixer, *_: GatedDeltaState(mixer), _DELTA_RULES),
    Form("self_attn", "forget_gate", _KIMI, lambda mixer, *_: KimiDeltaState(mixer), _KIMI_RULES),
    Form("conv", "conv_kernel_size", CONVOLUTION, ShortConvState),
    Form("mamba", "A_log", _MAMBA2, lambda mixer, *_: Mamba2State(mixer)),
    Form("mixer", "A_log", _MAMBA2, lambda mixer, *_: Mamba2State(mixer)),
)


def form_of(layer: nn.Module) -> Form | None:
    """Return the form of the mixer that keeps a state in a decoder layer, None without one."""
    return next((form for form in FORMS if form.mixer(layer) is not None), None)


def mixer_with_state(layer: nn.Module) -> Any:  # noqa: ANN401 - a class of transformers
    """Return the submodule of a decoder layer that keeps a state in place of keys and values, None without one."""
    return next((mixer for form in FORMS if (mixer := form.mixer(layer)) is not None), None)


def attention_of(layer: nn.Module) -> Any:  # noqa: ANN401 - a class of transformers
    """Return the attention of a decoder layer to text, None if it has none."""
    mixer = getattr(layer, "mixer", None)
    found = getattr(layer, "self_attn", mixer if hasattr(mixer, "k_proj") else None)
    return None if found is mixer_with_state(layer) else found


def give_state(layer: nn.Module, window: int, max_seq_len: int) -> None:
    """Give the layer's mixer its state, as ``kept_state``, if it keeps one. ``window`` and ``max_seq_len`` are in
    tokens."""
    form = form_of(layer)
    if form is not None:
        mixer: Any = form.mixer(layer)
        mixer.kept_state = form.make(mixer, window, max_seq_len)


@contextmanager
def use_states(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Replace the functions that transformers' layers call, in the modules of their classes."""
    forms = [(form, form.mixer(layer)) for layer in layers if (form := form_of(layer)) is not None]
    ours = {(_module(mixer), name): other for form, mixer in forms for name, other in form.functions.items()}
    with _replaced(ours):
        yield


@contextmanager
def token_by_token(model: nn.Module) -> Iterator[None]:
    """Make transformers' own layers of a delta rule in ``model`` compute all rows by their rule for single rows.

    Their rule for chunks gives states that differ from it by 1e-4 of their standard deviation in float32.
    """
    forms = [(form, form.mixer(layer)) for layer in model.modules() if (form := form_of(layer)) is not None]
    found = [(_module(mixer), form.rules) for form, mixer in forms if form.rules is not None]
    with _replaced({(module, chunk): getattr(module, row) for module, (chunk, row) in found}):
        yield


def _module(mixer: nn.Module | None) -> ModuleType:
    return sys.modules[type(mixer).__module__]


@contextmanager
def _replaced(parts: dict[tuple[ModuleType, str], Any]) -> Iterator[None]:
    kept = {(module, name): getattr(module, name) for module, name in parts}
    try:
        for (module, name), other in parts.items():
            setattr(module, name, other)
        yield
    finally:
        for (module, name), original in kept.items():
            setattr(module, name, original)


class ExactVectors:
    """Notes the vectors of a model's recurrent layers while a checkpoint is read, and gives them back in float32."""

    def __init__(self, model: nn.Module):
        self.owners: dict[str, tuple[nn.Module, str]] = {}
        """The module and the attribute of each vector, by its name in the model."""
        for prefix, layer in model.named_modules():
            form = form_of(layer)
            if form is not None:
                self.owners |= _vectors(layer.get_submodule(form.place), f"{prefix}.{form.place}")
        self.values: dict[str, Tensor] = {}

    def seen(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield ``tensors`` (by their names in the model) unchanged, and note the vectors among them."""
        for name, value in tensors:
            if name in self.owners:
                self.values[name] = value.float()
            yield name, value

    def restore(self) -> None:
        """Assign the noted vectors to the model."""
        for name, value in self.values.items():
            owner, attribute = self.owners[name]
            setattr(owner, attribute, nn.Parameter(value, requires_grad=False))


def _vectors(mixer: nn.Module, prefix: str) -> dict[str, tuple[nn.Module, str]]:
    """Return the parameters of a mixer that have at most one dimension longer than 1, without those of its linears and
    of its convolution."""
    found = {}
    for place, module in mixer.named_modules():
        if not isinstance(module, nn.Linear | nn.Conv1d):
            for attribute, value in module.named_parameters(recurse=False):
                if value.numel() == max(value.shape, default=1):
                    found[".".join(filter(None, (prefix, place, attribute)))] = module, attribute
    return found
