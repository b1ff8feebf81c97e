"""The EAGLE-3 drafter written out from its formulas: no module, no cache, every row computed anew.

What ``DraftHead`` computes is held against this (``eagle3.export.twin.draft``). It reads a checkpoint's own
configuration and tensor names, so that a mistake in reading them shows as well:

    a = cat(taps);  a = input_norm(a) if norm_before_fc;  a = cat(fc_norm_i(a_i)) if fc_norm;  f = fc(a)
    e = input_layernorm(embed(token));  h = hidden_norm(f);  r = h if norm_before_residual else f
    x = r + attention(cat[e, h]);  g = x + mlp(post_attention_layernorm(x))
    logits = lm_head(norm(g));  the next f is norm(g) if norm_output else g

Source: the EAGLE-3 paper (arXiv 2503.01840), SafeAILab's and speculators' code, vLLM's where the window of the
attention moves with the chain (in speculators' training it stays where the first step of a slot had it).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_LAYER_PREFIXES = ("layers.0.", "midlayer.")


@dataclass(frozen=True)
class Drafter:
    """``config`` is the checkpoint's JSON, ``layer`` transformers' configuration of its decoder layer, ``tensors`` are
    float32 by the checkpoint's names. H is the draft's hidden size, V its vocabulary."""

    config: dict[str, Any]
    layer: Any
    tensors: dict[str, Tensor]

    def fuse(self, taps: list[Tensor]) -> Tensor:
        """The target's states, each [T, H_target], as features [T, H]."""
        if self.config.get("fc_norm"):
            taps = [self._norm(tap, f"fc_norm.{index}") for index, tap in enumerate(taps)]
        states = torch.cat(taps, dim=-1)
        return self._linear(self._norm(states, "input_norm") if self.config.get("norm_before_fc") else states, "fc")

    def __call__(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Rows at positions 0, 1, 2, ...: embedded tokens and features, each [T, H] -> logits [T, V], next features."""
        normed = self._norm(features, "hidden_norm")
        residual = normed if self.config.get("norm_before_residual") else features
        both = torch.cat([self._norm(embedded, "input_layernorm"), normed], dim=-1)
        x = residual + self._attention(both)
        inner = self._norm(x, "post_attention_layernorm")
        gate = self._activation()(self._linear(inner, "mlp.gate_proj"))
        g = x + self._linear(gate * self._linear(inner, "mlp.up_proj"), "mlp.down_proj")
        out = self._norm(g, "norm")
        return self._linear(out, "lm_head"), out if self.config.get("norm_output") else g

    def _attention(self, x: Tensor) -> Tensor:
        heads = self.layer.num_attention_heads
        size = getattr(self.layer, "head_dim", None) or self.layer.hidden_size // heads
        query, key, value = (
            self._linear(x, f"self_attn.{name}_proj").unflatten(-1, (-1, size)).transpose(0, 1) for name in "qkv"
        )  # [heads or kv_heads, T, size]
        if self._find("self_attn.q_norm.weight") is not None:
            query, key = self._norm(query, "self_attn.q_norm"), self._norm(key, "self_attn.k_norm")
        query, key = self._rotated(query, size), self._rotated(key, size)
        groups = heads // len(key)
        key, value = key.repeat_interleave(groups, dim=0), value.repeat_interleave(groups, dim=0)
        scores = query @ key.transpose(1, 2) / size**0.5
        scores = scores.masked_fill(~self._visible(len(x)), float("-inf"))
        return self._linear((scores.softmax(-1) @ value).transpose(0, 1).flatten(1), "self_attn.o_proj")

    def _visible(self, rows: int) -> Tensor:
        """Which rows a row attends to: those up to itself, within the window if there is one. bool [T, T]."""
        distance = torch.arange(rows)[:, None] - torch.arange(rows)[None, :]
        visible = distance >= 0
        written = self.config["transformer_layer_config"]
        kinds = written.get("layer_types") or getattr(self.layer, "layer_types", None) or [None]
        return visible & (distance < self.layer.sliding_window) if kinds[0] == "sliding_attention" else visible

    def _rotated(self, x: Tensor, size: int) -> Tensor:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        rope, scale = self.layer.rope_parameters, 1.0
        if rope["rope_type"] == "default":
            frequencies = rope["rope_theta"] ** (-torch.arange(0, size, 2) / size)
        else:
            frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](self.layer, "cpu")
        angles = torch.outer(torch.arange(x.shape[1]).float(), frequencies)
        cos, sin = angles.cos() * scale, angles.sin() * scale
        half = cos.shape[-1]
        left, right = x[..., :half], x[..., half : 2 * half]
        return torch.cat([left * cos - right * sin, right * cos + left * sin, x[..., 2 * half :]], dim=-1)

    def _activation(self) -> Callable[[Tensor], Tensor]:
        from transformers.activations import ACT2FN

        return ACT2FN[self.layer.hidden_act]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(variance + self.layer.rms_norm_eps) * self._find(f"{name}.weight")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._find(f"{name}.weight"), self._find(f"{name}.bias"))

    def _find(self, name: str) -> Tensor | None:
        for model in ("", "model."):
            for prefix in ("", *_LAYER_PREFIXES):
                if f"{model}{prefix}{name}" in self.tensors:
                    return self.tensors[f"{model}{prefix}{name}"]
        return None
