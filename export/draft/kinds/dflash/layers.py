"""The decoder layers of a DFlash head: Qwen3's, whose keys and values are of the context's features as well."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.models.llama import modeling_llama

from eagle3.export.draft.kinds.dflash.description import DFlashDescription
from eagle3.export.draft.kinds.dflash.walks import Convolution
from eagle3.export.draft.layers import RMSNorm


class Place(NamedTuple):
    """The places of rows: what the attention's ``rows`` returned for them, and the rotary tables [1, T, head_dim]."""

    rows: Any
    cos: Tensor
    sin: Tensor


class DraftLayer(nn.Module):
    """A layer of the block: [1, B, H] -> [1, B, H]."""

    def __init__(self, draft: DFlashDescription, index: int):
        super().__init__()
        size, eps = draft.hidden_size, draft.layer.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = Attention(draft, index)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = modeling_llama.LlamaMLP(draft.layer)
        self.attention_conv = Convolution(draft) if draft.conv_taps else None
        self.mlp_conv = Convolution(draft) if draft.conv_taps else None

    def forward(self, x: Tensor, place: Place) -> Tensor:
        x = x + _between(self.attention_conv, lambda y: self.self_attn(y, place), self.input_layernorm(x))
        return x + _between(self.mlp_conv, self.mlp, self.post_attention_layernorm(x))


def _between(convolution: Convolution | None, part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return a part's output, between the two convolutions of a DFlash2."""
    if convolution is None:
        return part(x)
    x, added = convolution.prepare(x)
    return convolution.finish(part(x), added)


class KeysAndValues(nn.Module):
    """Projections of keys and values [1, T, H] -> [1, T, kv_heads, head_dim] each. They are apart from the queries',
    because the context has none, and linears of one module may be merged."""

    def __init__(self, draft: DFlashDescription, name: str):
        super().__init__()
        config = draft.layer
        self.shape = config.num_key_value_heads, config.head_dim
        outputs = config.num_key_value_heads * config.head_dim
        biases = [f"{name}.kept.{each}_proj.bias" in draft.headers for each in "kv"]
        self.k_proj, self.v_proj = (nn.Linear(draft.hidden_size, outputs, bias=bias) for bias in biases)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.k_proj(x).unflatten(-1, self.shape), self.v_proj(x).unflatten(-1, self.shape)


class Attention(nn.Module):
    """Attention of a block to the kept positions and to itself. ``kv_attention`` is the backend's."""

    kv_attention: Any

    def __init__(self, draft: DFlashDescription, index: int):
        super().__init__()
        config, name = draft.layer, f"layers.{index}.self_attn"
        self.shape = config.num_attention_heads, config.head_dim
        width = config.num_attention_heads * config.head_dim
        self.q_proj = nn.Linear(draft.hidden_size, width, bias=f"{name}.q_proj.bias" in draft.headers)
        self.kept = KeysAndValues(draft, name)
        self.o_proj = nn.Linear(width, draft.hidden_size, bias=f"{name}.o_proj.bias" in draft.headers)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def write(self, feature: Tensor, place: Place) -> None:
        """Write keys and values of the context's features [1, T, H]."""
        key, value = self.kept(feature)
        self.kv_attention.write(rotated(self.k_norm(key), place), value, place.rows)

    def forward(self, x: Tensor, place: Place) -> Tensor:
        """x [1, B, H] -> [1, B, H]"""
        query = rotated(self.q_norm(self.q_proj(x).unflatten(-1, self.shape)), place)
        key, value = self.kept(x)
        key, scale = rotated(self.k_norm(key), place), self.shape[1] ** -0.5
        return self.o_proj(self.kv_attention(query, key, value, place.rows, scale).flatten(2))


def rotated(heads: Tensor, place: Place) -> Tensor:
    """Return heads [1, T, heads, head_dim] with rotary embeddings."""
    return heads * place.cos.unsqueeze(2) + modeling_llama.rotate_half(heads) * place.sin.unsqueeze(2)
