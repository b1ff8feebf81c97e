"""Runs any decoder-only family of transformers: its own model, unmodified, with taps; the backend computes attention.

transformers' own forward runs. Its layers call attention by name (``config._attn_implementation``). The function
registered under that name passes queries, keys and values to the ``kv_attention`` submodule that the backend made, with
the rows of this forward. transformers makes no mask for a name that has no mask function.

This module does not check that a family is computed correctly. The twin check compares it with transformers.
"""

import inspect
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from eagle3.targets.attention import (
    HF_ATTENTION,
    AttentionFactory,
    ForwardRows,
    KVCacheShape,
    has_sinks,
    ring_window,
    shares_keys,
)
from eagle3.targets.complex_rotary import RealRotary
from eagle3.targets.conversion import Conversion
from eagle3.targets.experts import Experts
from eagle3.targets.past import Past
from eagle3.targets.recurrent import RecurrentPositions
from eagle3.targets.sinks import softcapped
from eagle3.targets.spec import (
    HYBRID,
    RECURRENT,
    WITHOUT_PAST,
    Convert,
    Skeleton,
    Weights,
    Window,
    has_field,
    is_recurrent,
    layer_windows,
)
from eagle3.targets.state_mixers import attention_of, give_state, mixer_with_state, use_states
from eagle3.targets.text_part import TextPart, build

SOFTCAP = "final_logit_softcapping"


class DecoderLayersTarget(nn.Module):
    """See ``TapTarget``. ``model`` is a transformers causal language model with ``model.layers``, or the text part of a
    multimodal one."""

    causal_lm: PreTrainedModel | TextPart

    def __init__(
        self,
        model: PreTrainedModel | TextPart,
        max_seq_len: int,
        attention: AttentionFactory,
        dtype: torch.dtype,
    ):
        super().__init__()
        config = model.config
        config._attn_implementation = HF_ATTENTION
        self.causal_lm, self.slots, self.rows = model, max_seq_len, ForwardRows()
        self.cap, self.caps_itself = _softcap(model)
        self.past_name = past_name(model.model)
        for index, (layer, window) in enumerate(zip(self.layers, layer_windows(config), strict=True)):
            give_state(layer, window.tokens, max_seq_len)
            attn = attention_of(layer)
            if attn is None:
                continue
            attn.kv_window, attn.forward_rows = window, self.rows
            if shares_keys(attn):
                attn.kept = [self.kept(attn.layer_type)]  # in a list, since the module is a submodule of another layer
                continue
            own = config.per_layer_config[index]
            ring = ring_window(window.tokens, max_seq_len)
            heads = own.num_attention_heads
            keys = getattr(attn, "qk_head_dim", None) or attn.head_dim
            kv_heads = _key_heads(attn, own, keys)
            head_dim = max(keys, getattr(attn, "v_head_dim", None) or 0)  # the narrower of keys and values is padded
            sinks = has_sinks(attn)
            shape = KVCacheShape(kv_heads, head_dim, max_seq_len, ring, dtype, sinks, window.chunked, heads=heads)
            attn.kv_attention = attention(shape)
        self.recurrent: RecurrentPositions | None = RecurrentPositions() if is_recurrent(config) else None

    @property
    def layers(self) -> nn.ModuleList:
        return self.causal_lm.model.layers

    @property
    def embed_tokens(self) -> nn.Embedding:
        """The embedding's raw rows; the module of some families scales them."""
        module = _embedding(self.causal_lm.model)
        if type(module) is nn.Embedding:
            return module
        rows = nn.Embedding(1, 1, device="meta")
        rows.weight = module.weight
        return rows

    @property
    def lm_head(self) -> nn.Linear:
        return self.causal_lm.lm_head

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed as the family's own module does. No head needs this in a family that scales outside of the module."""
        return _embedding(self.causal_lm.model)(tokens)

    def kept(self, kind: str) -> nn.Module | None:
        kinds = getattr(self.causal_lm.config, "layer_types", None) or ["full_attention"] * len(self.layers)
        attns = [attention_of(layer) for layer, own in zip(self.layers, kinds, strict=True) if own == kind]
        keeping = [attn for attn in attns if not shares_keys(attn)]
        return keeping[-1].kv_attention if keeping else None

    def forward(self, tokens: Tensor, input_pos: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        states: dict[int, Tensor] = {}
        count = len(self.layers)

        def keep_output(_module: nn.Module, _args: object, output: Tensor | tuple[Tensor, ...]) -> None:
            states[count] = output[0] if isinstance(output, tuple) else output

        hooks = []
        for index, layer in enumerate(self.layers):

            def keep_input(
                _module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any], index: int = index
            ) -> None:
                states[index] = args[0] if args else kwargs["hidden_states"]

            hooks.append(layer.register_forward_pre_hook(keep_input, with_kwargs=True))
        hooks.append(self.layers[-1].register_forward_hook(keep_output))
        try:
            self.rows.by_window = self._rows(input_pos)
            recurrent = None if self.recurrent is None else self.recurrent.rows(input_pos)
            positions = {"position_ids": input_pos[None], self.past_name: Past(input_pos, self.layers, recurrent)}
            with RealRotary(), use_states(self.layers):
                out = self.causal_lm.model(tokens, use_cache=False, **positions)
        finally:
            self.rows.by_window = {}
            for hook in hooks:
                hook.remove()
        for index in reversed(range(count)):
            # for layers that are skipped for text, the input is that of the next layer
            states.setdefault(index, states[index + 1])
        state = out.last_hidden_state
        if self.recurrent is not None and recurrent is not None:
            valid = self.recurrent.advance(recurrent)
            state = state + torch.where(valid, 0.0, float("nan")).to(state.dtype)
        return state, tuple(states[tap] for tap in taps)

    def scores(self, state: Tensor) -> Tensor:
        """Compute the scores by the part of transformers' own forward after the final state, because some families
        scale the output of ``lm_head``."""
        tail = _Tail(self.causal_lm, state, self.causal_lm.lm_head, self.caps_itself)
        return type(tail.owner).forward(tail, inputs_embeds=state).logits

    def capped(self, scores: Tensor) -> Tensor:
        """Apply the softcap as transformers does, in the dtype of ``scores``. Returns float32."""
        return softcapped(scores, self.cap).float()

    def logits(self, state: Tensor) -> Tensor:
        return self.capped(self.scores(state))

    def _rows(self, input_pos: Tensor) -> dict[Window, Any]:
        """Return the ``rows`` of the attention modules, by window."""
        rows: dict[Window, Any] = {}
        for attn in map(attention_of, self.layers):
            window = None if attn is None else attn.kv_window
            if window is not None and window not in rows:
                rows[window] = attn.kv_attention.rows(input_pos)
        return rows


def past_name(model: nn.Module) -> str:
    """Return the name of the argument of a transformers model's forward that takes its cache. The name changes in
    transformers 5.24; the old one works until 5.40, with a warning."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _embedding(decoder: Any) -> Any:  # noqa: ANN401 - classes of transformers
    """Return the embedding of a decoder, None if it has none of the names that are known."""
    other = getattr(decoder, "embeddings", None)  # of Nemotron-H; in other classes it holds more than the embedding
    return getattr(decoder, "embed_tokens", other if isinstance(other, nn.Embedding) else None)


class _Tail:
    """The model that computes logits, with a decoder that only returns ``state``. Unless ``capped``, it applies no
    softcap."""

    def __init__(self, causal_lm: PreTrainedModel | TextPart, state: Tensor, lm_head: nn.Module, capped: bool = False):
        self.owner = causal_lm.owner if isinstance(causal_lm, TextPart) else causal_lm
        self.lm_head, self.model = lm_head, _Decoder(getattr(self.owner, "model", None), state)
        self.config = self.owner.config if capped else _uncapped(self.owner.config)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the model has
        return getattr(self.owner, name)


class _Decoder:
    """A decoder that only returns ``state``. Its other attributes are those of ``decoder``: Falcon-H1's has a factor of
    the logits."""

    def __init__(self, decoder: nn.Module | None, state: Tensor):
        self._decoder, self._state = decoder, state

    def __call__(self, *_args: object, **_kwargs: object) -> "_Output":
        return _Output(self._state)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the decoder has
        return getattr(self._decoder, name)


class _Output:
    """The output of a decoder. All other fields that a wrapper copies from it are None."""

    def __init__(self, state: Tensor):
        self.last_hidden_state = state

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _uncapped(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration without a softcap. It is copied if it or its text part has one."""
    text = config.get_text_config()
    if getattr(text, SOFTCAP, None) is None:
        return config
    plain = copy(text)
    plain.__dict__[SOFTCAP] = None  # a strict class refuses null in its constructor
    if text is config:
        return plain
    whole = copy(config)
    for name, value in vars(config).items():
        if value is text:
            setattr(whole, name, plain)
    return whole


def _softcap(causal_lm: PreTrainedModel | TextPart) -> tuple[float | None, bool]:
    """Return the softcap to apply, None if there is none, and whether the class that computes the logits always applies
    its own.

    A wrapper may ignore the softcap of its text model's class.
    """
    cap = getattr(causal_lm.config, SOFTCAP, None)
    if cap is None:
        return None, False
    state = torch.full((1, 1, 1), 10.0 * cap)
    tails = (_Tail(causal_lm, state, nn.Identity(), capped) for capped in (True, False))
    try:
        with torch.device("cpu"):
            capped, plain = (type(tail.owner).forward(tail, inputs_embeds=state).logits for tail in tails)
    except TypeError:  # Muse Glimmer divides by its softcap without checking that there is one
        return None, True
    return (None if torch.equal(capped, plain) else cap), False


Target = DecoderLayersTarget


def skeleton(config: PreTrainedConfig, max_seq_len: int) -> Skeleton:  # noqa: ARG001 - as every family's
    """Return the model without weights. Raises ValueError for layers with an unsupported kind of attention."""
    layer_windows(config)
    with torch.device("meta"):
        model = build(config)
    _check_parts(model)
    tied = {source: (head, False) for head, source in model.all_tied_weights_keys.items() if head.endswith(".weight")}
    conversion = Conversion(model)

    return Skeleton(model, lambda name: conversion.name(text_name(name)), tied, conversion)


def _key_heads(attn: nn.Module, config: PreTrainedConfig, width: int) -> int:
    """Return the number of a layer's key-value heads, each ``width`` wide, from its own projection, or else from the
    configuration.

    In MiMo V2 Flash, sliding layers have twice the configuration's number. A class that lacks the field, such as
    Persimmon's, does not read it.
    """
    projection = getattr(attn, "k_proj", None)
    if isinstance(projection, nn.Linear):
        return projection.out_features // width
    shared = getattr(config, "num_key_value_heads", None) if has_field(config, "num_key_value_heads") else None
    return shared or config.num_attention_heads


def _check_parts(model: PreTrainedModel | TextPart) -> None:
    """Raise ValueError for a model that lacks a submodule ``DecoderLayersTarget`` needs; the message names it."""
    kind = type(model.wrapper if isinstance(model, TextPart) else model).__name__
    decoder: Any = getattr(model, "model", None)
    layers: Any = getattr(decoder, "layers", None)
    kinds = getattr(model.config, "layer_types", None) or [""] * len(layers or ())
    for layer, own in zip(layers or (), kinds, strict=False):
        if own in (RECURRENT, HYBRID) and mixer_with_state(layer) is None:
            raise ValueError(
                f"layer_types has {own}, but {type(layer).__name__} keeps a state that is not one of the gated delta "
                "rule, of Kimi's delta attention or of Mamba 2: eagle3-export --list-targets lists what is supported"
            )
    parts = (
        ("model.layers", layers),
        ("model.embed_tokens", _embedding(decoder)),
        ("lm_head", getattr(model, "lm_head", None)),
    )
    missing = [name for name, part in parts if part is None]
    if not missing:
        by_layer = enumerate(zip(layers, kinds, strict=False))
        missing = [f"model.layers.{at}.self_attn" for at, each in by_layer if _lacks_attention(*each)]
    if missing:
        raise ValueError(
            f"transformers' {kind} has no {missing[0]}, which every target has: eagle3-export --list-targets lists "
            "what is supported"
        )


def _lacks_attention(layer: nn.Module, kind: str) -> bool:
    """Return True if a layer of ``kind`` has no attention that is known. Mllama's layers that attend only to an image
    are skipped for text, so they need none."""
    attn = attention_of(layer)
    needs = kind == HYBRID or not (mixer_with_state(layer) or kind in WITHOUT_PAST or hasattr(layer, "cross_attn"))
    return isinstance(attn, nn.ModuleList) or (attn is None and needs)


def text_name(name: str) -> str:
    """Return the text model's name of a checkpoint's tensor. In multimodal checkpoints it has a longer prefix."""
    for prefix, own in (("model.language_model.", "model."), ("model.text_model.", "model."), ("language_model.", "")):
        if name.startswith(prefix):
            name = own + name.removeprefix(prefix)
    return name


def load(
    weights: Weights,
    config: PreTrainedConfig,
    max_seq_len: int,
    dtype: torch.dtype,
    attention: AttentionFactory,
    convert: Convert | None = None,
) -> DecoderLayersTarget:
    return filled(skeleton(config, max_seq_len), weights, max_seq_len, dtype, attention, convert)


def filled(
    unfilled: Skeleton,
    weights: Weights,
    max_seq_len: int,
    dtype: torch.dtype,
    attention: AttentionFactory,
    convert: Convert | None = None,
) -> DecoderLayersTarget:
    """Fill a ``skeleton`` with the tensors of a checkpoint, and return the target over it."""
    unfilled.fill(weights, dtype, convert)
    model: Any = unfilled.model
    make_buffers(model)
    return Target(model, max_seq_len, attention, dtype).eval().requires_grad_(False)


def make_buffers(model: PreTrainedModel | TextPart) -> None:
    """Initialize the buffers that no checkpoint holds (rotary tables, scales of embeddings) by transformers' own code,
    in float32. Loaded tensors are not changed."""
    for module in model.modules():
        if any(isinstance(child, Experts) for child in module.children()):
            _mark_initialized(module)  # otherwise its class would look for the tensors of transformers' own experts
        for parameter in module._parameters.values():
            if parameter is not None:
                _mark_initialized(parameter)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
            elif buffer is not None:
                _mark_initialized(buffer)
    model.initialize_weights()


def _mark_initialized(loaded: Any) -> None:  # noqa: ANN401 - a tensor or a module
    """Mark a tensor or module as loaded, as transformers' ``from_pretrained`` does."""
    loaded._is_hf_initialized = True
