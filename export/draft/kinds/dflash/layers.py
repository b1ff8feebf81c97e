"""The decoder layers of a DFlash head: Qwen3's or Gemma 4's. Their attention also has keys and values made from the
context's features."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

from eagle3.export.draft.kinds.dflash.description import DFlashDescription

RMSNorm = modeling_llama.LlamaRMSNorm


class Place(NamedTuple):
    """The positions of some rows: the result of the attention's ``rows`` for them, and the rotary tables [1, T,
    head_dim]."""

    rows: Any
    cos: Tensor
    sin: Tensor


class DraftLayer(nn.Module):
    """A decoder layer with the structure of Qwen3's: [1, B, H] -> [1, B, H]."""

    def __init__(self, draft: DFlashDescription, index: int):
        super().__init__()
        size, eps = draft.hidden_size, draft.layer.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = Attention(draft, index)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = modeling_llama.LlamaMLP(draft.layer)

    def forward(self, x: Tensor, place: Place) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), place)
        return x + self.mlp(self.post_attention_layernorm(x))


class Gemma4Layer(nn.Module):
    """A layer of Gemma 4: it also has norms after attention and MLP, and a factor of its own. [1, B, H] -> [1, B, H]"""

    layer_scalar: Tensor

    def __init__(self, draft: DFlashDescription, index: int):
        super().__init__()
        size, eps = draft.hidden_size, draft.layer.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.self_attn, self.mlp = Attention(draft, index), modeling_llama.LlamaMLP(draft.layer)
        self.register_buffer("layer_scalar", torch.empty(1))

    def forward(self, x: Tensor, place: Place) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), place))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar


class KeysAndValues(nn.Module):
    """Projections of keys and values [1, T, H] -> [1, T, kv_heads, head_dim] each. They are in a module of their own,
    since linears of one module may be merged and the context has no queries. Gemma 4 norms values, which may be the
    projection of the keys."""

    def __init__(self, draft: DFlashDescription, name: str):
        super().__init__()
        config = draft.layer
        self.shape = config.num_key_value_heads, config.head_dim
        self.normed, self.eps = draft.gemma4, config.rms_norm_eps
        outputs = config.num_key_value_heads * config.head_dim
        biases = [f"{name}.kept.{each}_proj.bias" in draft.headers for each in "kv"]
        self.k_proj, v_proj = (nn.Linear(draft.hidden_size, outputs, bias=bias) for bias in biases)
        self.v_proj = v_proj if draft.has(f"{name}.kept.v_proj") else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        key = self.k_proj(x).unflatten(-1, self.shape)
        value = key if self.v_proj is None else self.v_proj(x).unflatten(-1, self.shape)
        return key, _normed(value, self.eps) if self.normed else value


def _normed(x: Tensor, eps: float) -> Tensor:
    """Return x [..., head_dim] scaled to a mean square of 1: RMSNorm without a weight."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


class Attention(nn.Module):
    """The attention of a block to the cached positions and to itself. ``kv_attention`` is the backend's."""

    kv_attention: Any

    def __init__(self, draft: DFlashDescription, index: int):
        super().__init__()
        config, name = draft.layer, f"layers.{index}.self_attn"
        self.shape = config.num_attention_heads, config.head_dim
        self.scale = 1.0 if draft.gemma4 else config.head_dim**-0.5
        width = config.num_attention_heads * config.head_dim
        self.q_proj = nn.Linear(draft.hidden_size, width, bias=f"{name}.q_proj.bias" in draft.headers)
        self.kept = KeysAndValues(draft, name)
        self.o_proj = nn.Linear(width, draft.hidden_size, bias=f"{name}.o_proj.bias" in draft.headers)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def write(self, feature: Tensor, place: Place) -> None:
        """Write the keys and values of the context's features [1, T, H] into the cache."""
        key, value = self.kept(feature)
        self.kv_attention.write(rotated(self.k_norm(key), place), value, place.rows)

    def forward(self, x: Tensor, place: Place) -> Tensor:
        """Return the attention's output for the block: x [1, B, H] -> [1, B, H]."""
        query = rotated(self.q_norm(self.q_proj(x).unflatten(-1, self.shape)), place)
        key, value = self.kept(x)
        key = rotated(self.k_norm(key), place)
        return self.o_proj(self.kv_attention(query, key, value, place.rows, self.scale).flatten(2))


def rotated(heads: Tensor, place: Place) -> Tensor:
    """Apply the rotary embedding to heads [1, T, heads, head_dim]."""
    return heads * place.cos.unsqueeze(2) + modeling_llama.rotate_half(heads) * place.sin.unsqueeze(2)
