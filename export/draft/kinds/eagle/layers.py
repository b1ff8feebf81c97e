"""A draft head's decoder layers: transformers' attention and MLP, with the differences between the kinds of heads.

first layer (EAGLE-3, P-EAGLE):  e = input_layernorm(embed(token));  h = hidden_norm(f)
                                 x = (h if norm_before_residual else f) + attention(cat[e, h])
first layer (EAGLE 1, 2, HASS):  f = fc(cat[embed_norm(embed(token)), f]);  x = f + attention(f) later layers:
x = f + attention(input_layernorm(f)); SGLang's use hidden_norm all:                             g = x +
mlp(post_attention_layernorm(x))
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Gemma4TextConfig, LlamaConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextAttention
from transformers.models.glm4_moe import modeling_glm4_moe
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from eagle3.export.draft.kinds import EAGLE
from eagle3.export.draft.kinds.eagle.description import EagleDescription
from eagle3.targets.attention import HF_ATTENTION

RMSNorm = modeling_llama.LlamaRMSNorm  # x * w with the variance in float32, as in Qwen3 and GLM

Keep = Callable[[Tensor], Tensor]
"""A function that selects rows: [1, T, ...] -> [1, R, ...]."""


class DraftLayer(nn.Module):
    """Layer ``index`` of a draft head. A norm that the checkpoint does not have is None."""

    input_layernorm: nn.Module | None
    hidden_norm: nn.Module | None
    post_attention_layernorm: nn.Module

    def __init__(self, draft: EagleDescription, index: int):
        super().__init__()
        config, where = _config(draft), f"layers.{index}"
        self.first = index == 0
        self.joins = self.first and draft.kind != EAGLE
        """True if attention takes the embedding concatenated with the feature."""
        self.norm_before_residual = self.joins and draft.norm_before_residual
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            norm = RMSNorm(config.hidden_size, config.rms_norm_eps) if draft.has(f"{where}.{name}") else None
            setattr(self, name, norm)
        self.self_attn = self.attention_of(draft, where)
        self.mlp = modeling_llama.LlamaMLP(config)
        width = config.hidden_size * (2 if self.joins else 1)
        for owner, names in ((self.self_attn, "qkvo"), (self.mlp, ("gate", "up", "down"))):
            part = "self_attn" if owner is self.self_attn else "mlp"
            for name in (f"{each}_proj" for each in names):
                linear, bias = getattr(owner, name), f"{where}.{part}.{name}.bias" in draft.headers
                if linear is None:
                    continue
                inputs = width if name in ("q_proj", "k_proj", "v_proj") else linear.in_features
                setattr(owner, name, nn.Linear(inputs, linear.out_features, bias=bias))

    def attention_of(self, draft: EagleDescription, where: str) -> nn.Module:
        """Return the attention, whose linears ``__init__`` then replaces. ``where`` is the layer's name. With a partial
        RoPE it is GLM's attention. That splits each head, which would cost time in a head with RoPE on all
        dimensions."""
        if _rotates_in_part(draft):
            attention: Any = modeling_glm4_moe.Glm4MoeAttention
        elif draft.has(f"{where}.self_attn.q_norm"):
            attention = modeling_qwen3.Qwen3Attention
        else:
            attention = modeling_llama.LlamaAttention
        return attention(_config(draft), layer_idx=0)

    def forward(self, embedding: Tensor, feature: Tensor, keep: Keep | None, **attention: Any) -> Tensor:
        """Compute embedding (used by the first layer only) and feature, each [1, T, H] -> [1, T, H], or only the rows
        that ``keep`` selects. For the other rows only keys and values are computed."""
        if self.joins:
            normed, embedding = _normed(self.hidden_norm, feature), _normed(self.input_layernorm, embedding)
            residual, x = normed if self.norm_before_residual else feature, torch.cat((embedding, normed), dim=-1)
        else:
            residual, x = feature, _normed(self.input_layernorm or self.hidden_norm, feature)
        attended, _ = self.self_attn(x, **attention)
        if keep:
            residual, attended = keep(residual), keep(attended)
        x = residual + attended
        return x + self.mlp(self.post_attention_layernorm(x))


def rotary_table(draft: EagleDescription) -> nn.Module:
    """Return transformers' rotary embedding, in float32."""
    partial = _rotates_in_part(draft)
    return (modeling_glm4_moe.Glm4MoeRotaryEmbedding if partial else modeling_llama.LlamaRotaryEmbedding)(draft.layer)


def _normed(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def _rotates_in_part(draft: EagleDescription) -> bool:
    return draft.layer.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0


def _config(draft: EagleDescription) -> LlamaConfig:
    config = deepcopy(draft.layer)
    config._attn_implementation = HF_ATTENTION
    config.layer_types, config.sliding_window = ["full_attention"], None  # kv_attention applies the window
    config.use_qk_norm = draft.has("layers.0.self_attn.q_norm")
    return config


class Gemma4DraftLayer(DraftLayer):
    """The only layer of a DeepSpec EAGLE-3 head for Gemma 4."""

    layer_scalar: Tensor

    def __init__(self, draft: EagleDescription, index: int):
        super().__init__(draft, index)
        size, eps = draft.hidden_size, draft.layer.rms_norm_eps
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.register_buffer("layer_scalar", torch.empty(1))

    def attention_of(self, draft: EagleDescription, where: str) -> Gemma4TextAttention:
        layer = draft.layer
        config = Gemma4TextConfig(
            hidden_size=layer.hidden_size,
            num_hidden_layers=1,
            layer_types=["full_attention"],
            num_attention_heads=layer.num_attention_heads,
            num_key_value_heads=layer.num_key_value_heads,
            num_global_key_value_heads=layer.num_key_value_heads,
            head_dim=layer.head_dim,
            global_head_dim=layer.head_dim,
            num_kv_shared_layers=0,
            attention_k_eq_v=not draft.has(f"{where}.self_attn.v_proj"),
            rms_norm_eps=layer.rms_norm_eps,
        )
        config._attn_implementation = HF_ATTENTION
        return Gemma4TextAttention(config, layer_idx=0)

    def forward(self, embedding: Tensor, feature: Tensor, keep: Keep | None, **attention: Any) -> Tensor:
        """Compute embedding (scaled) and feature, each [1, T, H] -> [1, T, H], or only the rows that ``keep``
        selects."""
        assert self.input_layernorm is not None and self.hidden_norm is not None, "a first layer has both"
        both = torch.cat((self.input_layernorm(embedding), self.hidden_norm(feature)), dim=-1)
        attended, _ = self.self_attn(both, shared_kv_states={}, **attention)
        if keep:
            feature, attended = keep(feature), keep(attended)
        x = feature + self.post_attention_layernorm(attended)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar
