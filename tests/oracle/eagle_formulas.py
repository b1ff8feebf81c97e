"""The reference for EAGLE heads: their formulas in plain PyTorch, without modules or caches. Every call recomputes all
rows.

``Head`` is compared with this (``eagle_oracle.py``). It reads a checkpoint's own configuration and tensor
names, and decides by the dialects' names instead of their ``Dialect`` records, so that a mistake in reading shows as
well. EAGLE-3 (taps a, embedded token E):

    a = cat(taps);  a = input_norm(a) if norm_before_fc;  a = cat(fc_norm_i(a_i)) if fc_norm;  f = fc(a)
    e = input_layernorm(E);  h = hidden_norm(f);  r = h if norm_before_residual else f
    x = r + attention(cat[e, h]);  g = x + mlp(post_attention_layernorm(x))
    logits = lm_head(norm(g));  the next f is norm(g) if norm_output else g

A later layer takes its norm of g instead of cat[e, h]. DeepSpec's head for Gemma 4 has E * sqrt(H), another layer
(``_gemma4_layer``) and a softcap of its logits. EAGLE 1 and 2: f is the target's final state, and the input of the
layer is x = fc(cat[E, f]); in NeMo's the next f is norm(g). P-EAGLE: step j is a separate row after the last one, with
the mask token and the feature fc(mask_hidden).

Source: the papers (EAGLE 2401.15077, EAGLE-3 2503.01840) and the code of SafeAILab, speculators and SGLang. The sliding
window moves with the chain, as in vLLM; in speculators' training it keeps the position of a slot's first step.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from transformers import LlamaConfig

_FIRST = ("layers.0.", "midlayer.", "transformer.")
_OTHER_NAMES = {
    "fc_norm.0": ("aux_norm_low",),
    "fc_norm.1": ("aux_norm_mid",),
    "fc_norm.2": ("aux_norm_high",),
    "fc": ("fusion_fc",),
    "embed_norm": ("embedding_layernorm", "embed_layernorm"),
    "norm": ("pre_lm_head_layernorm", "lm_head_layernorm"),
    "layers.0.input_layernorm": ("hidden_layernorm",),
}


@dataclass(frozen=True)
class Drafter:
    """Computes a draft head. ``config`` is the checkpoint's JSON, ``layer`` transformers' configuration of its decoder
    layers. ``tensors`` are float32, under the checkpoint's names. ``embedding`` and ``lm_head`` [V, H] are the
    target's, for a head without its own. H is the draft's hidden size, V its vocabulary size."""

    dialect: str
    config: dict[str, Any]
    layer: "LlamaConfig"
    tensors: dict[str, Tensor]
    embedding: Tensor
    lm_head: Tensor

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens [T] -> [T, H]."""
        own = self._find("embed_tokens.weight")
        rows = (self.embedding if own is None else own)[tokens]
        return rows * self.layer.hidden_size**0.5 if self._of_gemma4 else rows

    def fuse(self, taps: list[Tensor]) -> Tensor:
        """Fuse the target's states, each [T, H_target], into features [T, H]. A head that takes the final state returns
        that state."""
        if self._joins_in_fc or self._said("use_aux_hidden_state") is False:
            return taps[0]
        if self._find("fc_norm.0.weight") is not None:
            taps = [self._norm(tap, f"fc_norm.{index}") for index, tap in enumerate(taps)]
        states = torch.cat(taps, dim=-1)
        return self._linear(self._norm(states, "input_norm") if self._said("norm_before_fc") else states, "fc")

    def mask_rows(self, taps: int) -> tuple[Tensor, Tensor]:
        """Return the token id [] and the feature [1, H] of a mask row."""
        said = (self._said(key) for key in ("mask_token_id", "pard_token", "ptd_token_id"))
        hidden = self._get("mask_hidden").reshape(1, -1)
        return torch.tensor(next(id for id in said if id is not None)), self.fuse(list(hidden.chunk(taps, dim=-1)))

    def __call__(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Compute rows at positions 0, 1, 2, ...: tokens [T] and features [T, H] -> logits [T, V], the next
        features."""
        e, g = self.embed(tokens), features
        for index in range(self._layers):
            g = self._layer(index, e, g)
        normed = self._normed_if_there(g, "norm")
        said, specforge = self._said("norm_output"), self.dialect == "specforge"
        out = g if specforge and said is False else normed
        feeds = not specforge and (said or self._said("return_hidden_post_norm"))
        feeds = feeds or (self.dialect == "nemo" and self._joins_in_fc)
        logits = F.linear(out, self._vocabulary(), self._find("lm_head.bias"))
        if self._of_gemma4 and (cap := self._said("final_logit_softcapping")):
            logits = torch.tanh(logits / cap) * cap
        return logits, normed if feeds else g

    @property
    def _of_gemma4(self) -> bool:
        return "Gemma4Eagle3Model" in (self.config.get("architectures") or [])

    @property
    def _layers(self) -> int:
        found = [re.search(r"(additional_)?layers?\.(\d+)\.", name) for name in self.tensors]
        return 1 + max((int(each[2]) + bool(each[1]) for each in found if each), default=0)

    @property
    def _joins_in_fc(self) -> bool:
        return self._get("layers.0.self_attn.q_proj.weight").shape[1] == self.layer.hidden_size

    def _vocabulary(self) -> Tensor:
        own = self._find("lm_head.weight")
        if own is None and self._said("tie_word_embeddings") and not self._joins_in_fc:
            own = self._find("embed_tokens.weight")
        return self.lm_head if own is None else own

    def _layer(self, index: int, e: Tensor, f: Tensor) -> Tensor:
        at = f"layers.{index}."
        if self._of_gemma4:
            return self._gemma4_layer(at, e, f)
        if index == 0 and self._joins_in_fc:
            residual = self._linear(torch.cat([self._normed_if_there(e, "embed_norm"), f], dim=-1), "fc")
            x = self._normed_if_there(residual, f"{at}input_layernorm")
        elif index == 0:
            h = self._normed_if_there(f, f"{at}hidden_norm")
            residual = h if self._said("norm_before_residual") else f
            x = torch.cat([self._normed_if_there(e, f"{at}input_layernorm"), h], dim=-1)
        else:
            norms = ("hidden_norm", "input_layernorm")
            norms = norms if self.dialect in ("sglang", "specforge") else norms[::-1]
            name = next(name for name in norms if self._find(f"{at}{name}.weight") is not None)
            residual, x = f, self._norm(f, f"{at}{name}")
        x = residual + self._attention(index, x)
        inner = self._norm(x, f"{at}post_attention_layernorm")
        gate = self._activation()(self._linear(inner, f"{at}mlp.gate_proj"))
        return x + self._linear(gate * self._linear(inner, f"{at}mlp.up_proj"), f"{at}mlp.down_proj")

    def _gemma4_layer(self, at: str, e: Tensor, f: Tensor) -> Tensor:
        """Compute a layer of Gemma 4: norms before and after attention and MLP, and a factor for the whole layer."""
        both = torch.cat([self._norm(e, f"{at}input_layernorm"), self._norm(f, f"{at}hidden_norm")], dim=-1)
        x = f + self._norm(self._attention(0, both), f"{at}post_attention_layernorm")
        inner = self._norm(x, f"{at}pre_feedforward_layernorm")
        gate = self._activation()(self._linear(inner, f"{at}mlp.gate_proj"))
        out = self._linear(gate * self._linear(inner, f"{at}mlp.up_proj"), f"{at}mlp.down_proj")
        return (x + self._norm(out, f"{at}post_feedforward_layernorm")) * self._get(f"{at}layer_scalar")

    def _attention(self, index: int, x: Tensor) -> Tensor:
        at, heads = f"layers.{index}.self_attn.", self.layer.num_attention_heads
        size = self._get(f"{at}q_proj.weight").shape[0] // heads
        of_value = "v" if self._find(f"{at}v_proj.weight") is not None else "k"
        query, key, value = (
            self._linear(x, f"{at}{name}_proj").unflatten(-1, (-1, size)).transpose(0, 1)
            for name in ("q", "k", of_value)
        )  # [heads or kv_heads, T, size]
        if self._of_gemma4:
            value = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + self.layer.rms_norm_eps)
        if self._find(f"{at}q_norm.weight") is not None:
            query, key = self._norm(query, f"{at}q_norm"), self._norm(key, f"{at}k_norm")
        query, key = self._with_rotary(query, size), self._with_rotary(key, size)
        groups = heads // len(key)
        key, value = key.repeat_interleave(groups, dim=0), value.repeat_interleave(groups, dim=0)
        scores = query @ key.transpose(1, 2) / (1 if self._of_gemma4 else size**0.5)
        scores = scores.masked_fill(~self._visible(index, len(x)), float("-inf"))
        return self._linear((scores.softmax(-1) @ value).transpose(0, 1).flatten(1), f"{at}o_proj")

    def _visible(self, index: int, rows: int) -> Tensor:
        """Return the mask bool [T, T]: a row attends to itself and earlier rows, within the sliding window if there is
        one."""
        distance = torch.arange(rows)[:, None] - torch.arange(rows)[None, :]
        visible = distance >= 0
        if self.dialect == "nemo" and self._find("mask_hidden") is None:
            return visible  # the layer types are the target's
        written = self.config.get("transformer_layer_config", self.config)
        kinds = written.get("layer_types") or self.layer.layer_types or ["full_attention"] * (index + 1)
        return visible & (distance < self.layer.sliding_window) if kinds[index] == "sliding_attention" else visible

    def _with_rotary(self, x: Tensor, size: int) -> Tensor:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        rope, scale = self.layer.rope_parameters, 1.0
        if rope["rope_type"] == "default":
            dims = int(size * rope.get("partial_rotary_factor", 1.0))
            frequencies = rope["rope_theta"] ** (-torch.arange(0, dims, 2) / dims)
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

    def _normed_if_there(self, x: Tensor, name: str) -> Tensor:
        return x if self._find(f"{name}.weight") is None else self._norm(x, name)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(variance + self.layer.rms_norm_eps) * self._get(f"{name}.weight")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._get(f"{name}.weight"), self._find(f"{name}.bias"))

    def _said(self, key: str) -> Any:  # noqa: ANN401 - of whatever type the JSON has
        return (self.config.get("eagle_config") or {}).get(key, self.config.get(key))

    def _get(self, name: str) -> Tensor:
        found = self._find(name)
        if found is None:
            raise KeyError(name)
        return found

    def _find(self, name: str) -> Tensor | None:
        """Return a tensor by the name used here, with layers as ``layers.{i}.``. The checkpoint may have another name
        for it."""
        module, _, end = name.rpartition(".")
        names = [name, *(f"{other}.{end}" for other in _OTHER_NAMES.get(module, ()))]
        if name.startswith("layers."):
            names.append(f"mid{name.replace('layers', 'layer', 1)}")
        if name.startswith("layers.0."):
            names += [first + name.removeprefix("layers.0.") for first in _FIRST]
        elif later := re.match(r"layers\.(\d+)\.", name):
            names.append(f"additional_layers.{int(later[1]) - 1}.{name[later.end() :]}")
        found = (self.tensors.get(prefix + each) for each in names for prefix in ("", "model."))
        return next((tensor for tensor in found if tensor is not None), None)
