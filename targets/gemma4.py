"""Gemma 4, text only. The dense 31B is ExecuTorch's own ``Gemma4_31B`` with taps; the backend computes attention.

Norms, MLP, ring caches and masks are ExecuTorch's. Two things differ: an attention layer calls its ``kv_attention``
submodule, and the rotary tables are those of transformers, computed once per forward instead of once per layer.

E2B, E4B and 26B-A4B have per-layer inputs, layers that share keys, or experts, which ``Gemma4_31B`` does not have.
These are computed by transformers' own model (``decoder_layers.py``).
"""

from dataclasses import replace
from types import MethodType
from typing import Any, NamedTuple

import torch
from executorch.examples.models.gemma4_31b.model import (
    Gemma4_31B,
    Gemma4_31BConfig,
    Gemma4Attention,
    _hf_to_model_key,
    materialize_runtime_buffers,
)
from torch import Tensor, nn
from transformers import Gemma4TextConfig
from transformers.initialization import no_init_weights
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from eagle3.targets import decoder_layers
from eagle3.targets.attention import AttentionFactory, KVCacheShape
from eagle3.targets.sinks import softcapped
from eagle3.targets.spec import Convert, Skeleton, Weights


class SharedInputs(NamedTuple):
    """The inputs that all layers of one kind share in a forward: the ``rows`` of its attention modules, and cos and sin
    [1, T, head_dim]."""

    attention: Any
    cos: Tensor
    sin: Tensor


def executorch_config(config: Gemma4TextConfig, max_seq_len: int) -> Gemma4_31BConfig:
    """Make ExecuTorch's configuration from transformers'.

    ExecuTorch's own ``from_hf_config`` reads ``global_head_dim``, which transformers 5.23 no longer writes (the sizes
    of full layers are in ``per_layer_config``), and silently falls back to the 31B's.
    """
    sliding, full = (
        config.per_layer_config[config.layer_types.index(kind)] for kind in ("sliding_attention", "full_attention")
    )
    rope = config.rope_parameters
    return Gemma4_31BConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=sliding.num_key_value_heads,
        head_dim=sliding.head_dim,
        num_global_key_value_heads=full.num_key_value_heads,
        global_head_dim=full.head_dim,
        attention_k_eq_v=config.attention_k_eq_v,
        sliding_rope_theta=rope["sliding_attention"]["rope_theta"],
        full_rope_theta=rope["full_attention"]["rope_theta"],
        full_partial_rotary_factor=rope["full_attention"].get("partial_rotary_factor", 1.0),
        rms_norm_eps=config.rms_norm_eps,
        hidden_activation=config.hidden_activation,
        final_logit_softcapping=config.final_logit_softcapping,
        tie_word_embeddings=config.tie_word_embeddings,
        sliding_window=config.sliding_window,
        layer_types=list(config.layer_types),
        max_seq_len=max_seq_len,
    )


def is_dense(config: Gemma4TextConfig) -> bool:
    """Return True for a configuration that ``Gemma4_31B`` computes, and False if transformers' own model must compute
    it."""
    others = ("hidden_size_per_layer_input", "num_kv_shared_layers", "enable_moe_block", "use_double_wide_mlp")
    both = {"sliding_attention", "full_attention"} <= set(config.layer_types)
    return both and config.final_logit_softcapping is not None and not any(getattr(config, each) for each in others)


def _attend(self: Gemma4Attention, x: Tensor, _input_pos: Tensor, rows: SharedInputs) -> Tensor:
    """Replaces ``Gemma4Attention.forward``; ``kv_attention`` has the cache. x [1, T, H] -> [1, T, H]."""
    query = self.q_proj(x).unflatten(-1, (self.n_heads, self.head_dim))
    raw_key = self.k_proj(x).unflatten(-1, (self.n_kv_heads, self.head_dim))
    raw_value = raw_key if self.k_eq_v else self.v_proj(x).unflatten(-1, (self.n_kv_heads, self.head_dim))
    query, key = apply_rotary_pos_emb(self.q_norm(query), self.k_norm(raw_key), rows.cos, rows.sin, unsqueeze_dim=2)
    out = self.kv_attention(query, key, self.v_norm(raw_value), rows.attention, self.scaling)
    return self.o_proj(out.flatten(2))


class Gemma4TapTarget(nn.Module):
    """See ``TapTarget``."""

    recurrent = None

    def __init__(self, model: Gemma4_31B, max_seq_len: int, attention: AttentionFactory, dtype: torch.dtype):
        super().__init__()
        self.model = model
        for layer in model.layers:
            attn = layer.self_attn
            window = model.config.sliding_window if attn.is_sliding else 0
            del attn.kv_cache
            heads, kv_heads = attn.n_heads, attn.n_kv_heads
            shape = KVCacheShape(kv_heads, attn.head_dim, max_seq_len, window, dtype, heads=heads)
            attn.kv_attention = attention(shape)
            attn.forward = MethodType(_attend, attn)

    @property
    def embed_tokens(self) -> nn.Embedding:
        return self.model.embed_tokens

    @property
    def lm_head(self) -> nn.Linear:
        return self.model.lm_head

    def embed(self, tokens: Tensor) -> Tensor:
        return self.model.embed_tokens(tokens) * self.model.embed_normalizer

    def kept(self, kind: str) -> nn.Module | None:
        sliding = kind == "sliding_attention"
        attns = [layer.self_attn for layer in self.model.layers if layer.is_sliding == sliding]
        return attns[-1].kv_attention if attns else None

    def forward(self, tokens: Tensor, input_pos: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        x = self.embed(tokens)
        kinds = {layer.is_sliding: layer.self_attn for layer in self.model.layers}
        rows = {kind: self._rows(attn, input_pos, x) for kind, attn in kinds.items()}
        states = [x]
        for layer in self.model.layers:
            states.append(layer(states[-1], input_pos, rows.get(True), rows.get(False)))
        return self.model.norm(states[-1]), tuple(states[tap] for tap in taps)

    def scores(self, state: Tensor) -> Tensor:
        return self.model.lm_head(state)

    def capped(self, scores: Tensor) -> Tensor:
        return softcapped(scores.float(), self.model.logit_softcap)

    def logits(self, state: Tensor) -> Tensor:
        return self.capped(self.scores(state))

    @staticmethod
    def _rows(attn: Gemma4Attention, input_pos: Tensor, x: Tensor) -> SharedInputs:
        tables = rotary(input_pos, attn.inv_freq, attn.rope_scale, x.dtype)
        return SharedInputs(attn.kv_attention.rows(input_pos), *tables)


def rotary(positions: Tensor, inv_freq: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute cos and sin [1, T, head_dim] for positions [T] in float32, then round them."""
    angles = torch.outer(positions.float(), inv_freq)
    angles = torch.cat((angles, angles), dim=-1)[None]
    cos, sin = angles.cos(), angles.sin()
    if scale != 1:
        cos, sin = cos * scale, sin * scale
    return cos.to(dtype), sin.to(dtype)


def Target(  # noqa: N802 - the name of a class in other families
    model: nn.Module, max_seq_len: int, attention: AttentionFactory, dtype: torch.dtype
) -> Gemma4TapTarget | decoder_layers.DecoderLayersTarget:
    """Return the ``TapTarget`` over the model of a ``skeleton``."""
    family: Any = Gemma4TapTarget if isinstance(model, Gemma4_31B) else decoder_layers.Target
    return family(model, max_seq_len, attention, dtype)


def skeleton(config: Gemma4TextConfig, max_seq_len: int) -> Skeleton:
    """Return the model without weights: ExecuTorch's model, or transformers' own for a configuration that is not
    dense."""
    if not is_dense(config):
        unfilled = decoder_layers.skeleton(config, max_seq_len)

        def key_map(name: str) -> str | None:  # names from a GGUF file have ExecuTorch's form
            return unfilled.key_map(f"model.{name}") or unfilled.key_map(name)

        return replace(unfilled, key_map=key_map)
    with no_init_weights(), torch.device("meta"):
        model = Gemma4_31B(executorch_config(config, max_seq_len))
    tied = {"embed_tokens.weight": ("lm_head.weight", False)} if config.tie_word_embeddings else {}
    own = set(model.state_dict())  # the names in a checkpoint that ExecuTorch quantized
    return Skeleton(model, lambda name: name if name in own else _hf_to_model_key(name), tied)


def use_rotary_tables(model: Gemma4_31B, config: Gemma4TextConfig) -> None:
    """Use transformers' own rotary tables. ExecuTorch's tables cover only the 31B's two kinds of RoPE."""
    rotary = Gemma4TextRotaryEmbedding(config)
    for layer in model.layers:
        kind = "sliding_attention" if layer.self_attn.is_sliding else "full_attention"
        layer.self_attn.inv_freq = getattr(rotary, f"{kind}_inv_freq")
        layer.self_attn.rope_scale = getattr(rotary, f"{kind}_attention_scaling")


def load(
    weights: Weights,
    config: Gemma4TextConfig,
    max_seq_len: int,
    dtype: torch.dtype,
    attention: AttentionFactory,
    convert: Convert | None = None,
) -> Gemma4TapTarget | decoder_layers.DecoderLayersTarget:
    unfilled = skeleton(config, max_seq_len)
    if not is_dense(config):
        return decoder_layers.filled(unfilled, weights, max_seq_len, dtype, attention, convert)
    model: Any = unfilled.model
    unfilled.fill(weights, dtype, convert)
    target = Gemma4TapTarget(model, max_seq_len, attention, dtype)
    materialize_runtime_buffers(model, dtype)
    if config.dtype is not None:  # transformers rounds the factor to the checkpoint's dtype, as in training
        stored = getattr(torch, str(config.dtype).removeprefix("torch."))  # a saved configuration has the dtype's name
        model.embed_normalizer = model.embed_normalizer.to(stored).float()
    use_rotary_tables(model, config)
    return target.eval().requires_grad_(False)
