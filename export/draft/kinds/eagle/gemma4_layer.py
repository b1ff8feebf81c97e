"""The layer of DeepSpec's EAGLE-3 heads for Gemma 4: transformers' attention of Gemma 4 over the concatenation of
embedding and feature.

    e = input_layernorm(embed(token) * sqrt(H));  h = hidden_norm(f)
    x = f + post_attention_layernorm(attention(cat[e, h]))
    g = (x + post_feedforward_layernorm(mlp(pre_feedforward_layernorm(x)))) * layer_scalar

Attention norms its values, which may be the projection of the keys, and does not scale its scores. Source:
deepseek-ai/DeepSpec, ``Gemma4Eagle3DecoderLayer``.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextAttention

from eagle3.export.draft.kinds.eagle.description import EagleDescription
from eagle3.export.draft.kinds.eagle.layers import DraftLayer, Keep, RMSNorm
from eagle3.targets.attention import HF_ATTENTION


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
