"""The reference for a DFlash head: its formulas in plain PyTorch, a row at a time, without modules or caches.

It reads a checkpoint's own configuration and tensor names, so that a mistake in reading them shows as well. All
features of the context are given at once; nothing is kept from one block to the next.

Source: the papers (arXiv 2602.06036, 2605.29707) and the code of speculators, z-lab, DeepSpec and SpecForge.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from transformers import LlamaConfig


@dataclass(frozen=True)
class Drafter:
    """Computes a head. ``config`` is the checkpoint's JSON, ``layer`` transformers' configuration of its layers.
    ``tensors`` are float32, under the checkpoint's names. ``embedding`` and ``lm_head`` [V, H] are the target's;
    it multiplies the rows of its embedding by ``embedding_scale``."""

    config: dict[str, Any]
    layer: "LlamaConfig"
    tensors: dict[str, Tensor]
    embedding: Tensor
    lm_head: Tensor
    embedding_scale: float = 1.0

    @property
    def block_size(self) -> int:
        return self._said("block_size")

    @property
    def first_row(self) -> int:
        """The first row of a block that proposes a token."""
        if self._domino is not None:
            return 0 if self._said("shift_label") in (True, None) else 1
        biased = "markov_head.markov_w1.weight" in self.tensors
        if (said := self._said("sample_from_anchor")) is not None:
            return 0 if said else 1
        if (said := self._said("dspark_bonus_anchor")) is not None:
            return 1 if said else 0
        if "transformer_layer_config" in self.config:
            methods = self.config.get("speculators_config", {}).get("proposal_methods") or [{}]
            return 0 if biased and methods[0].get("speculative_tokens") == self.block_size else 1
        return 0 if biased or self._of_deepspec or self._said("projector_type") == "dspark" else 1

    @property
    def _of_deepspec(self) -> bool:
        return "num_anchors" in self.config and "target_layer_ids" not in (self.config.get("dflash_config") or {})

    @property
    def _scale(self) -> float:
        """The factor of a token's row: a z-lab head without one, and without DFlash2's selector or a bias by the token
        before, takes the target's."""
        if self._of_gemma4:
            return self.layer.hidden_size**0.5
        if (said := self._said("input_embedding_scale")) is not None:
            return said
        others = "transformer_layer_config" in self.config or self._of_deepspec or self._of_muse_glimmer
        later = ("candidate_selector.", "markov_head.", "embed_tokens.weight")
        own = any(part in name for name in self.tensors for part in later)
        return 1.0 if own or others else self.embedding_scale

    @property
    def _passes(self) -> int:
        return 6 if self._said("num_jacobi_passes") is None else self._said("num_jacobi_passes")

    def fuse(self, taps: list[Tensor]) -> Tensor:
        """Fuse the target's states, each [T, H_target], into features [T, H]."""
        fc, norm = ("encoder.fc", "encoder.output_norm_enc") if self._of_muse_glimmer else ("fc", "hidden_norm")
        return self._norm(self._linear(torch.cat(taps, dim=-1), fc), norm)

    @property
    def _domino(self) -> str | None:
        """The beginning of the names of a Domino's tensors, None for a head without them."""
        of_gru = "prefix_gru.weight_ih_l0"
        return next((name.removesuffix(of_gru) for name in self.tensors if name.endswith(of_gru)), None)

    def __call__(self, features: Tensor, anchor: int, before: int | None = None) -> tuple[Tensor, Tensor]:
        """Draft the block behind features [P, H], whose first token is ``anchor``, behind ``before`` in the text if
        there is such a token; return the logits [rows, V] and states [rows, H] of the rows that propose."""
        ids = torch.tensor([anchor] + [self._said("mask_token_id")] * (self.block_size - 1))
        x = self.tensors.get("embed_tokens.weight", self.embedding)[ids] * self._scale
        for index in range(self.layer.num_hidden_layers):
            at = f"layers.{index}"
            if self._of_gemma4:
                x = self._gemma4_layer(index, features, x)
                continue
            normed = self._norm(x, f"{at}.input_layernorm")
            inner = self._convolved(normed, normed, f"{at}.attention_conv", 0)
            x = x + self._convolved(self._attention(index, features, inner), normed, f"{at}.attention_conv", 1)
            normed = self._norm(x, f"{at}.post_attention_layernorm")
            inner = self._convolved(normed, normed, f"{at}.mlp_conv", 0)
            gated = self._activation(self._linear(inner, f"{at}.mlp.gate_proj"))
            gated = self._linear(gated * self._linear(inner, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj")
            x = x + self._convolved(gated, normed, f"{at}.mlp_conv", 1)
        block = self._norm(x, "norm")
        state = block[self.first_row :]
        logits = F.linear(state, self.tensors.get("lm_head.weight", self.lm_head), self._bias("lm_head"))
        logits, cap = logits * (self._said("output_multiplier") or 1.0), self._said("final_logit_softcapping")
        logits = torch.tanh(logits / cap) * cap if cap else logits
        if "refiner_head.mix_l" in self.tensors:
            return self._refined(logits, block, [anchor if before is None else before, anchor]), state
        return self._walked(logits, state, anchor), state

    @property
    def _of_muse_glimmer(self) -> bool:
        return "MuseGlimmerAssistantModel" in self.config.get("architectures", [])

    @property
    def _of_gemma4(self) -> bool:
        return "Gemma4DSparkModel" in self.config.get("architectures", [])

    def _gemma4_layer(self, index: int, features: Tensor, x: Tensor) -> Tensor:
        """Norms before and behind attention and MLP, and a factor of the layer's own."""
        at = f"layers.{index}"
        out = self._attention(index, features, self._norm(x, f"{at}.input_layernorm"))
        x = x + self._norm(out, f"{at}.post_attention_layernorm")
        inner = self._norm(x, f"{at}.pre_feedforward_layernorm")
        gated = self._activation(self._linear(inner, f"{at}.mlp.gate_proj")) * self._linear(inner, f"{at}.mlp.up_proj")
        x = x + self._norm(self._linear(gated, f"{at}.mlp.down_proj"), f"{at}.post_feedforward_layernorm")
        return x * self._get(f"{at}.layer_scalar")

    def _refined(self, logits: Tensor, block: Tensor, given: list[int]) -> Tensor:
        """xPress: the logits of rows, each behind the token that the pass before gave to the row before it."""
        at, refined = "refiner_head", logits
        whole = self._linear(block.mean(0), f"{at}.down_g")
        mix, table = self._get(f"{at}.mix_l"), self._get(f"{at}.token_embed.weight")  # [rank, row, row that it sees]
        for _ in range(self._passes):
            proposed = [self._in_target(row) for row in refined]
            before = (given if self.first_row else given[1:]) + proposed[:-1]
            inner = [
                self._linear(torch.cat([self._linear(state, f"{at}.down_h"), whole, table[token]]), f"{at}.in_proj")
                for state, token in zip(block, before, strict=True)
            ]
            rows = []
            for row, own in enumerate(inner):
                x = own + sum((mix[:, row, seen] * inner[seen] for seen in range(row + 1)), torch.zeros_like(own))
                gate = self._linear(x, f"{at}.mlp_gate")
                x = x + self._linear(gate * torch.sigmoid(gate) * self._linear(x, f"{at}.mlp_up"), f"{at}.mlp_down")
                rows.append(self._linear(x, f"{at}.readout"))
            refined = logits + torch.stack(rows)[self.first_row :]
        return refined

    def _convolved(self, x: Tensor, given: Tensor, name: str, which: int) -> Tensor:
        """DFlash2: row r becomes the sum over taps t of x[r - t] * (base kernel + what row r of ``given`` adds)."""
        base = self.tensors.get(f"{name}.base_kernel")
        if base is None:
            return x
        base, added = base[which], F.linear(given, self._get(f"{name}.kernel_projection.weight"))
        added = added.view(len(x), 2, len(base), -1)[:, which].repeat_interleave(self._said("conv_group_size"), dim=-1)
        rows = [
            sum(
                (x[row - tap] * (base[tap] + added[row, tap]) for tap in range(min(row + 1, len(base)))),
                x.new_zeros(()),
            )
            for row in range(len(x))
        ]
        return torch.stack(rows)

    def _walked(self, logits: Tensor, state: Tensor, anchor: int) -> Tensor:
        """Choose tokens from left to right where a row's scores depend on the token before; return the scores."""
        token, rows, memory, chosen_before = anchor, [], None, [anchor]
        for row in range(len(logits)):
            scores = logits[row].clone()
            if self._domino is not None:
                scores += self._bias_behind_all(chosen_before, state[row])
            elif "markov_head.markov_w1.weight" in self.tensors:
                bias, memory = self._bias_behind(token, state[row], memory)
                scores += bias
            elif "candidate_selector.successor_codebook" in self.tensors:
                best = scores.topk(self._said("selector_top_k")).indices
                book, other = (
                    self._get(f"candidate_selector.{each}_codebook") for each in ("predecessor", "successor")
                )
                context = book[token] * F.linear(state[row], self._get("candidate_selector.hidden_projection.weight"))
                chosen = scores[best] + other[best] @ context
                scores = torch.full_like(scores, float(chosen.min() - 1)).index_copy(0, best, chosen)
            rows.append(scores)
            token = self._in_target(scores)
            chosen_before.append(token)
        return torch.stack(rows)

    def _in_target(self, scores: Tensor) -> int:
        """Return the best token, as an id of the target."""
        token = int(scores.argmax())
        return token + int(self.tensors["d2t"][token]) if "d2t" in self.tensors else token

    def _bias_behind(self, token: int, state: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """DSpark: the bias of a row behind ``token``, and the recurrent state behind it."""
        before, kind = self._get("markov_head.markov_w1.weight")[token], self._said("markov_head_type")
        if kind == "gated":
            before = before * torch.sigmoid(self._linear(torch.cat([state, before]), "markov_head.gate_proj"))
        elif kind == "rnn":
            memory = torch.zeros_like(before) if memory is None else memory
            joint = self._linear(torch.cat([memory, before, state]), "markov_head.joint_proj")
            gate, candidate, before = joint.chunk(3)
            memory = torch.sigmoid(gate) * memory + torch.sigmoid(-gate) * torch.tanh(candidate)
            before = torch.tanh(before)
        return F.linear(before, self._get("markov_head.markov_w2.weight")), memory

    def _bias_behind_all(self, tokens: list[int], state: Tensor) -> Tensor | float:
        """Domino: the bias of a row behind the anchor and the tokens that the rows before chose, 0 for the first rows.
        A gate of ``torch.nn.GRU`` has a third of the rows of its weights: reset, update, new."""
        first = self._said("pure_draft_prefix_len")
        if len(tokens) <= (1 if first is None else first):
            return 0.0
        of_token, of_memory = (
            self._get(f"{self._domino}prefix_gru.weight_{which}_l0").unflatten(0, (3, -1)) for which in ("ih", "hh")
        )
        memory = torch.zeros(of_memory.shape[-1])
        for token in tokens:
            x = self.tensors.get("embed_tokens.weight", self.embedding)[token] * self._scale
            reset, update = (torch.sigmoid(of_token[gate] @ x + of_memory[gate] @ memory) for gate in (0, 1))
            new = torch.tanh(of_token[2] @ x + reset * (of_memory[2] @ memory))
            memory = new + update * (memory - new)
        inner = self._get(f"{self._domino}embed_proj.0.weight") @ torch.cat([state, memory])
        return self._get(f"{self._domino}embed_proj.2.weight") @ (inner * torch.sigmoid(inner))

    def _attention(self, index: int, features: Tensor, x: Tensor) -> Tensor:
        at, size, start = f"layers.{index}.self_attn", self.layer.head_dim, len(features)
        both = torch.cat([features, x])  # keys and values are of the context and of the block
        of_value = f"{at}.v_proj" if self._has(f"{at}.v_proj.weight") else f"{at}.k_proj"
        heads = [self._linear(rows, at) for rows, at in ((x, f"{at}.q_proj"), (both, f"{at}.k_proj"), (both, of_value))]
        query, key, value = (each.unflatten(-1, (-1, size)) for each in heads)  # [rows, heads, size]
        if self._of_gemma4:
            value = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + self.layer.rms_norm_eps)
        query, key = self._norm(query, f"{at}.q_norm"), self._norm(key, f"{at}.k_norm")
        query, key = self._rotated(query, start), self._rotated(key, 0)
        groups, out = query.shape[1] // key.shape[1], []
        for row in range(len(x)):
            seen = [place for place in range(len(both)) if self._sees(index, start, start + row, place)]
            keys, values = (each[seen].repeat_interleave(groups, dim=1) for each in (key, value))
            scores = torch.einsum("hd,shd->hs", query[row], keys) * (1 if self._of_gemma4 else size**-0.5)
            weights = scores.softmax(-1)
            out.append(torch.einsum("hs,shd->hd", weights, values).flatten())
        return self._linear(torch.stack(out), f"{at}.o_proj")

    def _sees(self, index: int, start: int, at: int, place: int) -> bool:
        """Return True if the row at position ``at`` of a block from ``start`` on attends to position ``place``."""
        kinds, window = self.layer.layer_types, self.layer.sliding_window
        slides = bool(kinds) and kinds[index] == "sliding_attention"
        if "transformer_layer_config" in self.config:
            if place >= start:
                return place <= at or not slides or bool(self.config.get("sliding_window_non_causal"))
            return not slides or start - place <= window
        if self._of_muse_glimmer:
            return not slides or abs(at - place) <= window
        named = [self._said(key) for key in ("is_causal", "causal", "causal_head")]
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

    def _activation(self, x: Tensor) -> Tensor:
        from transformers.activations import ACT2FN

        return ACT2FN[self.layer.hidden_act](x)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(variance + self.layer.rms_norm_eps) * self._get(f"{name}.weight")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._get(f"{name}.weight"), self._bias(name))

    def _said(self, key: str) -> Any:  # noqa: ANN401 - of whatever type the JSON has
        return (self.config.get("dflash_config") or {}).get(key, self.config.get(key))

    def _bias(self, name: str) -> Tensor | None:
        return self.tensors.get(f"{name}.bias", self.tensors.get(f"model.{name}.bias"))

    def _has(self, name: str) -> bool:
        return name in self.tensors or f"model.{name}" in self.tensors

    def _get(self, name: str) -> Tensor:
        found = self.tensors.get(name, self.tensors.get(f"model.{name}"))
        if found is None:
            raise KeyError(name)
        return found
