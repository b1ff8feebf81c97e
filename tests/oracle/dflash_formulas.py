"""The reference for a DFlash head: its formulas in plain PyTorch, a row at a time, without modules or caches.

It reads a checkpoint's own configuration and tensor names, so that a mistake in reading them shows as well. It takes
all features of the context at once, and keeps nothing from one block to the next.

Source: the papers (arXiv 2602.06036, 2605.29707) and the code of speculators, z-lab, DeepSpec and SpecForge.
"""

from functools import cached_property

import torch
from dflash_reference import Formulas, Reference
from dflash_variants import FORMULAS
from torch import Tensor
from torch.nn import functional as F


class Drafter(Reference):
    """Computes a head from its checkpoint, with the formulas of the variant whose tensors the checkpoint has."""

    @cached_property
    def variant(self) -> Formulas:
        known = (formulas for formulas in FORMULAS if formulas.knows(self))
        return next(known, Formulas)(self)

    @property
    def block_size(self) -> int:
        return self.said("block_size")

    @property
    def first_row(self) -> int:
        """The first row of a block that proposes a token."""
        if (own := self.variant.first_row()) is not None:
            return own
        if (said := self.said("sample_from_anchor")) is not None:
            return 0 if said else 1
        if (said := self.said("dspark_bonus_anchor")) is not None:
            return 1 if said else 0
        if "transformer_layer_config" in self.config:
            methods = self.config.get("speculators_config", {}).get("proposal_methods") or [{}]
            whole = methods[0].get("speculative_tokens") == self.block_size
            return 0 if self.variant.anchor_proposes and whole else 1
        return 0 if self.variant.anchor_proposes or self._of_deepspec else 1

    @property
    def _of_deepspec(self) -> bool:
        return "num_anchors" in self.config and "target_layer_ids" not in (self.config.get("dflash_config") or {})

    @property
    def scale(self) -> float:
        """The factor by which the head multiplies rows of the embedding. A z-lab head without a factor takes the
        target's, unless its code uses the rows unscaled."""
        if self._of_gemma4:
            return self.layer.hidden_size**0.5
        if (said := self.said("input_embedding_scale")) is not None:
            return said
        others = "transformer_layer_config" in self.config or self._of_deepspec or self._of_muse_glimmer
        own = any("embed_tokens.weight" in name for name in self.tensors)
        return 1.0 if own or others or self.variant.scales_nothing else self.embedding_scale

    def fuse(self, taps: list[Tensor]) -> Tensor:
        """Fuse the target's states, each [T, H_target], into features [T, H]."""
        fc, norm = ("encoder.fc", "encoder.output_norm_enc") if self._of_muse_glimmer else ("fc", "hidden_norm")
        return self.norm(self.linear(torch.cat(taps, dim=-1), fc), norm)

    def __call__(self, features: Tensor, anchor: int, before: int | None = None) -> tuple[Tensor, Tensor]:
        """Draft the block after the context's features [P, H]. Its first token is ``anchor``; ``before`` is the token
        before that in the text, None if there is none. Return the logits [rows, V] and states [rows, H] of the rows
        that propose."""
        ids = torch.tensor([anchor] + [self.said("mask_token_id")] * (self.block_size - 1))
        x, convolved = self.embed(ids), self.variant.convolved
        for index in range(self.layer.num_hidden_layers):
            at = f"layers.{index}"
            if self._of_gemma4:
                x = self._gemma4_layer(index, features, x)
                continue
            normed = self.norm(x, f"{at}.input_layernorm")
            inner = convolved(normed, normed, f"{at}.attention_conv", 0)
            x = x + convolved(self._attention(index, features, inner), normed, f"{at}.attention_conv", 1)
            normed = self.norm(x, f"{at}.post_attention_layernorm")
            inner = convolved(normed, normed, f"{at}.mlp_conv", 0)
            gated = self.activation(self.linear(inner, f"{at}.mlp.gate_proj"))
            gated = self.linear(gated * self.linear(inner, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj")
            x = x + convolved(gated, normed, f"{at}.mlp_conv", 1)
        block = self.norm(x, "norm")
        state = block[self.first_row :]
        logits = F.linear(state, self.tensors.get("lm_head.weight", self.lm_head), self.bias("lm_head"))
        logits, cap = logits * (self.said("output_multiplier") or 1.0), self.said("final_logit_softcapping")
        logits = torch.tanh(logits / cap) * cap if cap else logits
        return self.variant.scores(logits, block, anchor, before), state

    @property
    def _of_muse_glimmer(self) -> bool:
        return "MuseGlimmerAssistantModel" in self.config.get("architectures", [])

    @property
    def _of_gemma4(self) -> bool:
        return "Gemma4DSparkModel" in self.config.get("architectures", [])

    def _gemma4_layer(self, index: int, features: Tensor, x: Tensor) -> Tensor:
        """Compute a layer of Gemma 4: norms before and after attention and MLP, and a factor for the whole layer."""
        at = f"layers.{index}"
        out = self._attention(index, features, self.norm(x, f"{at}.input_layernorm"))
        x = x + self.norm(out, f"{at}.post_attention_layernorm")
        inner = self.norm(x, f"{at}.pre_feedforward_layernorm")
        gated = self.activation(self.linear(inner, f"{at}.mlp.gate_proj")) * self.linear(inner, f"{at}.mlp.up_proj")
        x = x + self.norm(self.linear(gated, f"{at}.mlp.down_proj"), f"{at}.post_feedforward_layernorm")
        return x * self.get(f"{at}.layer_scalar")

    def _attention(self, index: int, features: Tensor, x: Tensor) -> Tensor:
        at, size, start = f"layers.{index}.self_attn", self.layer.head_dim, len(features)
        both = torch.cat([features, x])  # keys and values come from the context and the block
        of_value = f"{at}.v_proj" if self.has(f"{at}.v_proj.weight") else f"{at}.k_proj"
        heads = [self.linear(rows, at) for rows, at in ((x, f"{at}.q_proj"), (both, f"{at}.k_proj"), (both, of_value))]
        query, key, value = (each.unflatten(-1, (-1, size)) for each in heads)  # [rows, heads, size]
        if self._of_gemma4:
            value = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + self.layer.rms_norm_eps)
        query, key = self.norm(query, f"{at}.q_norm"), self.norm(key, f"{at}.k_norm")
        query, key = self._rotated(query, start), self._rotated(key, 0)
        groups, out = query.shape[1] // key.shape[1], []
        for row in range(len(x)):
            seen = [place for place in range(len(both)) if self._sees(index, start, start + row, place)]
            keys, values = (each[seen].repeat_interleave(groups, dim=1) for each in (key, value))
            scores = torch.einsum("hd,shd->hs", query[row], keys) * (1 if self._of_gemma4 else size**-0.5)
            weights = scores.softmax(-1)
            out.append(torch.einsum("hs,shd->hd", weights, values).flatten())
        return self.linear(torch.stack(out), f"{at}.o_proj")

    def _sees(self, index: int, start: int, at: int, place: int) -> bool:
        """Return True if the row at position ``at``, in a block that begins at ``start``, attends to position
        ``place``."""
        kinds, window = self.layer.layer_types, self.layer.sliding_window
        slides = bool(kinds) and kinds[index] == "sliding_attention"
        if "transformer_layer_config" in self.config:
            if place >= start:
                return place <= at or not slides or bool(self.config.get("sliding_window_non_causal"))
            return not slides or start - place <= window
        if self._of_muse_glimmer:
            return not slides or abs(at - place) <= window
        named = [self.said(key) for key in ("is_causal", "causal", "causal_head")]
        causal = next((each for each in named if each is not None), slides)
        return (place <= at or not causal) and (not slides or at - place < window)

    def _rotated(self, heads: Tensor, start: int) -> Tensor:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        rope, scale, size = self.layer.rope_parameters, 1.0, heads.shape[-1]
        if rope["rope_type"] == "default":
            frequencies = rope["rope_theta"] ** (-torch.arange(0, size, 2) / size)
        else:
            frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](self.layer, "cpu")
        angles = torch.outer(torch.arange(start, start + len(heads)).float(), frequencies)[:, None]
        left, right = heads.chunk(2, dim=-1)
        cos, sin = angles.cos() * scale, angles.sin() * scale
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
