"""Any decoder-only family of transformers: its own model, unmodified, with taps and with attention left to the backend.

transformers' own forward runs, with whatever it multiplies, norms and rotates. Its layers call attention by name
(``config._attn_implementation``); ours hands queries, keys and values to the ``kv_attention`` submodule that the
backend made, with the rows of this forward. A name without a mask function of its own gets no mask from transformers.

Whether a family fits is not asked here: the twin check computes it both ways.
"""

from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_outputs import MoeModelOutputWithPast

from eagle3.targets.attention import (
    HF_ATTENTION,
    AttentionFactory,
    ForwardRows,
    KVCacheShape,
    has_sinks,
    ring_window,
)
from eagle3.targets.complex_rotary import RealRotary
from eagle3.targets.conversion import Conversion
from eagle3.targets.spec import Convert, Skeleton, Weights, Window, layer_windows

SOFTCAP = "final_logit_softcapping"


class DecoderLayersTarget(nn.Module):
    """See ``TapTarget``. ``model`` is a transformers causal language model with ``model.layers``."""

    def __init__(self, model: nn.Module, max_seq_len: int, attention: AttentionFactory, dtype: torch.dtype):
        super().__init__()
        config = model.config
        config._attn_implementation = HF_ATTENTION
        self.causal_lm, self.slots, self.rows = model, max_seq_len, ForwardRows()
        for layer, window in zip(self.layers, layer_windows(config), strict=True):
            attn = layer.self_attn
            attn.kv_window, attn.forward_rows = window, self.rows
            ring = ring_window(window.tokens, max_seq_len)
            kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
            head_dim = getattr(attn, "qk_head_dim", None) or attn.head_dim
            shape = KVCacheShape(kv_heads, head_dim, max_seq_len, ring, dtype, has_sinks(attn), attn.kv_window.chunked)
            attn.kv_attention = attention(shape)

    @property
    def layers(self) -> nn.ModuleList:
        return self.causal_lm.model.layers

    @property
    def embed_tokens(self) -> nn.Embedding:
        return self.causal_lm.model.embed_tokens

    @property
    def lm_head(self) -> nn.Linear:
        return self.causal_lm.lm_head

    def forward(self, tokens: Tensor, input_pos: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        states: list[Tensor] = []

        def keep_input(module, args, kwargs):
            states.append(args[0] if args else kwargs["hidden_states"])

        def keep_output(module, args, output):
            states.append(output[0] if isinstance(output, tuple) else output)

        hooks = [layer.register_forward_pre_hook(keep_input, with_kwargs=True) for layer in self.layers]
        hooks.append(self.layers[-1].register_forward_hook(keep_output))
        try:
            self.rows.by_window = self._rows(input_pos)
            positions = {"position_ids": input_pos[None], "past_key_values": _Past(input_pos[0])}
            with RealRotary():
                out = self.causal_lm.model(tokens, use_cache=False, **positions)
        finally:
            self.rows.by_window = {}
            for hook in hooks:
                hook.remove()
        return out.last_hidden_state, tuple(states[tap] for tap in taps)

    def scores(self, state: Tensor) -> Tensor:
        """By transformers' own forward from the final state on: some scale what ``lm_head`` gives."""
        return type(self.causal_lm).forward(_Tail(self.causal_lm, state), inputs_embeds=state).logits

    def capped(self, scores: Tensor) -> Tensor:
        """As transformers does, in the dtype of ``scores``."""
        cap = getattr(self.causal_lm.config, SOFTCAP, None)
        return (scores if cap is None else torch.tanh(scores / cap) * cap).float()

    def logits(self, state: Tensor) -> Tensor:
        return self.capped(self.scores(state))

    def _rows(self, input_pos: Tensor) -> dict[Window, Any]:
        """By window, what the attention modules of its layers want of a forward."""
        rows = {}
        for attn in (layer.self_attn for layer in self.layers):
            window = attn.kv_window
            if window not in rows:
                rows[window] = attn.kv_attention.rows(input_pos)
        return rows


class _Past:
    """transformers' cache as far as a layer asks it for positions (Llama 4): ``kv_attention`` holds what is in it."""

    def __init__(self, seen: Tensor):
        self._seen = seen

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        return self._seen

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        return key, value


class _Tail:
    """A causal language model whose decoder has run already: it gives ``state``, and caps nothing."""

    def __init__(self, causal_lm: nn.Module, state: Tensor):
        self._causal_lm, self._state = causal_lm, state
        self.config = causal_lm.config
        if getattr(self.config, SOFTCAP, None) is not None:
            self.config = copy(self.config)
            setattr(self.config, SOFTCAP, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._causal_lm, name)

    def model(self, *args, **kwargs) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=self._state)


Target = DecoderLayersTarget


def skeleton(config: PreTrainedConfig, max_seq_len: int) -> Skeleton:
    """Raises ValueError for a kind of layer without attention to all or a window of the positions before."""
    layer_windows(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(deepcopy(config))
    tied = {"model.embed_tokens.weight": ("lm_head.weight", False)} if config.tie_word_embeddings else {}
    conversion = Conversion(model)

    return Skeleton(model, lambda name: conversion.name(text_name(name)), tied, conversion)


def text_name(name: str) -> str:
    """A checkpoint's tensor by the text model's own name: multimodal ones have it one level down."""
    for prefix, own in (("model.language_model.", "model."), ("language_model.", "")):
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
    bones = skeleton(config, max_seq_len)
    bones.fill(weights, dtype, convert)
    make_buffers(bones.model)
    return Target(bones.model, max_seq_len, attention, dtype).eval().requires_grad_(False)


def make_buffers(model: nn.Module) -> None:
    """What no checkpoint holds (rotary tables, scales of embeddings), in float32, by transformers' own initialization;
    what has been loaded stays."""
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter._is_hf_initialized = True  # as from_pretrained marks what it has loaded
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
            elif buffer is not None:
                buffer._is_hf_initialized = True
    model.initialize_weights()
