"""Llama, Qwen3 and what is built like them: transformers' own decoder layers, unmodified, with taps.

A layer calls its attention by name (``config._attn_implementation``); ours hands queries, keys and values to the
``kv_attention`` submodule that the backend made.
"""

from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from eagle3.targets.attention import HF_ATTENTION, AttentionFactory, KVCacheShape, causal_mask
from eagle3.targets.spec import Skeleton


class DecoderLayersTarget(nn.Module):
    """See ``TapTarget``. ``model`` is a transformers causal language model whose every layer attends fully."""

    def __init__(self, model: nn.Module, max_seq_len: int, attention: AttentionFactory, dtype: torch.dtype):
        super().__init__()
        config = model.config
        config._attn_implementation = HF_ATTENTION
        self.base, self.lm_head, self.slots = model.model, model.lm_head, max_seq_len
        for layer in self.base.layers:
            head_dim = layer.self_attn.head_dim
            layer.self_attn.kv_attention = attention(
                KVCacheShape(config.num_key_value_heads, head_dim, max_seq_len, dtype=dtype)
            )

    @property
    def embed_tokens(self) -> nn.Embedding:
        return self.base.embed_tokens

    def forward(self, tokens: Tensor, input_pos: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        states = [self.base.embed_tokens(tokens)]
        rotary = self.base.rotary_emb(states[0], position_ids=input_pos[None])
        rows = self.base.layers[0].self_attn.kv_attention.rows(input_pos, causal_mask(input_pos, self.slots))
        for layer in self.base.layers:
            states.append(layer(states[-1], attention_mask=rows, position_embeddings=rotary))
        return self.base.norm(states[-1]), tuple(states[tap] for tap in taps)

    def logits(self, state: Tensor) -> Tensor:
        return self.lm_head(state).float()


Target = DecoderLayersTarget


def skeleton(config: PreTrainedConfig, max_seq_len: int) -> Skeleton:
    """Raises ValueError for sliding attention."""
    if "sliding_attention" in (getattr(config, "layer_types", None) or []):
        raise ValueError("config.json has sliding attention layers, but this family has full attention alone")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(deepcopy(config))
    tied = {"model.embed_tokens.weight": ("lm_head.weight", False)} if config.tie_word_embeddings else {}
    # Old checkpoints hold rotary tables, which are made anew.
    return Skeleton(model, lambda name: None if name.endswith("rotary_emb.inv_freq") else name, tied)


def load(
    checkpoint: Path, config: PreTrainedConfig, max_seq_len: int, dtype: torch.dtype, attention: AttentionFactory
) -> DecoderLayersTarget:
    """Load a Hugging Face folder."""
    bones = skeleton(config, max_seq_len)
    model = bones.model
    bones.fill(checkpoint, dtype)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)  # on the host, in float32
    return Target(model, max_seq_len, attention, dtype).eval().requires_grad_(False)
