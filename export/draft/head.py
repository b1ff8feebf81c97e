"""The EAGLE-3 draft head: one decoder layer over a token's embedding and the target's fused hidden states.

    f = fc(cat(taps))                       # the first step; later steps take the g before
    e = input_layernorm(embed(token)); h = hidden_norm(f)
    x = (h if norm_before_residual else f) + attention(cat[e, h])
    g = x + mlp(post_attention_layernorm(x))
    logits = lm_head(norm(g)); the next f is norm(g) if norm_output else g

Source: the EAGLE-3 paper (arXiv 2503.01840) and speculators' Eagle3DraftModel, whose numbers tests/golden holds.
"""

from copy import deepcopy

import torch
from executorch.extension.llm.export.load import load_checkpoint
from torch import Tensor, nn
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from eagle3.export.draft.description import DraftDescription
from eagle3.targets.attention import HF_ATTENTION, AttentionFactory, KVCacheShape, attention_mask, ring_window

RMSNorm = modeling_llama.LlamaRMSNorm  # x * w, variance in float32; Qwen3's is the same
_PARTS = {
    "llama": (modeling_llama.LlamaAttention, modeling_llama.LlamaMLP),
    "qwen3": (modeling_qwen3.Qwen3Attention, modeling_qwen3.Qwen3MLP),
}


class DraftLayer(nn.Module):
    """transformers' attention and MLP, the projections widened to twice the hidden size."""

    def __init__(self, config, norm_before_residual: bool):
        super().__init__()
        self.norm_before_residual = norm_before_residual
        norm = {"hidden_size": config.hidden_size, "eps": config.rms_norm_eps}
        self.input_layernorm, self.hidden_norm = RMSNorm(**norm), RMSNorm(**norm)
        self.post_attention_layernorm = RMSNorm(**norm)
        attention, mlp = _PARTS[config.model_type]
        self.self_attn = attention(config, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            wide = nn.Linear(2 * config.hidden_size, narrow.out_features, bias=narrow.bias is not None)
            setattr(self.self_attn, name, wide)
        self.mlp = mlp(config)

    def forward(self, embedding: Tensor, feature: Tensor, last: bool, **attention) -> Tensor:
        """[1, T, H] twice -> [1, T, H], or [1, 1, H] of the last row: only its keys and values outlive the others."""
        normed = self.hidden_norm(feature)
        residual = normed if self.norm_before_residual else feature
        attended, _ = self.self_attn(torch.cat((self.input_layernorm(embedding), normed), dim=-1), **attention)
        if last:
            residual, attended = residual[:, -1:], attended[:, -1:]
        x = residual + attended
        return x + self.mlp(self.post_attention_layernorm(x))


class DraftHead(nn.Module):
    """A draft head with a KV cache of its own. Draft slot p pairs the target's feature at p with token p + 1."""

    def __init__(self, draft: DraftDescription, max_seq_len: int):
        super().__init__()
        config, size = deepcopy(draft.layer), draft.hidden_size
        config._attn_implementation = HF_ATTENTION
        config.layer_types = ["full_attention"]  # the window is kv_attention's
        self.max_seq_len, self.norm_output = max_seq_len, draft.norm_output
        self.window = ring_window(draft.window, max_seq_len)
        if draft.has_embedding:
            self.embed_tokens = nn.Embedding(*draft.headers["embed_tokens.weight"].shape)
        eps = config.rms_norm_eps
        self.input_norm = RMSNorm(draft.taps_width, eps) if draft.norm_before_fc else None
        norms = [name for name in draft.headers if name.startswith("fc_norm.")]  # one per tap
        self.fc_norm = nn.ModuleList(RMSNorm(draft.headers[name].shape[0], eps) for name in norms) if norms else None
        self.fc = nn.Linear(draft.taps_width, size, bias="fc.bias" in draft.headers)
        self.layer = DraftLayer(config, draft.norm_before_residual)
        self.norm = RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, draft.draft_vocab_size, bias=False)
        d2t = torch.empty(draft.draft_vocab_size, dtype=torch.long) if draft.maps_vocabulary else None
        self.register_buffer("d2t", d2t)
        self._slots_written = 0  # eager mode alone: exported programs leave positions to their caller

    def attach(self, draft: DraftDescription, attention: AttentionFactory, dtype: torch.dtype, embedding: nn.Embedding):
        """Make what no checkpoint holds: the KV cache, the rotary table (float32), a shared embedding."""
        config = draft.layer
        self.layer.self_attn.kv_attention = attention(
            KVCacheShape(
                config.num_key_value_heads, self.layer.self_attn.head_dim, self.max_seq_len, self.window, dtype
            )
        )
        if self.d2t is not None:
            self.d2t = self.d2t.long()
        self.rotary_emb = modeling_llama.LlamaRotaryEmbedding(config)
        if not draft.has_embedding:
            self.embed_tokens = embedding
        return self

    def fuse(self, taps: tuple[Tensor, ...]) -> Tensor:
        """The target's tapped states, each [1, T, H_target], as one feature [1, T, H]."""
        if self.fc_norm is not None:
            taps = tuple(norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True))
        states = torch.cat(taps, dim=-1)
        return self.fc(states if self.input_norm is None else self.input_norm(states))

    def forward(self, tokens: Tensor, feature: Tensor, input_pos: Tensor, last: bool = False) -> tuple[Tensor, Tensor]:
        """Run draft slots ``input_pos`` and write their keys and values.

        Args:
            tokens: int64 [1, T], target ids; slot p takes token p + 1
            feature: [1, T, H], from ``fuse`` or a recurrent feature
            input_pos: int64 [T], consecutive, at most one past the last slot written
            last: give the last row alone

        Returns:
            draft logits [1, T or 1, draft_vocab_size] and the recurrent feature [1, T or 1, H]

        Raises:
            ValueError: (eager mode) positions that leave a gap or pass ``max_seq_len``
        """
        if not torch.compiler.is_exporting():
            self._check_positions(input_pos)
        mask = attention_mask(input_pos, self.max_seq_len, self.window)
        out = self.layer(
            self.embed_tokens(tokens),
            feature,
            last,
            position_embeddings=self.rotary_emb(feature, input_pos[None]),
            attention_mask=self.layer.self_attn.kv_attention.rows(input_pos, mask),
        )
        normed = self.norm(out)
        return self.lm_head(normed), normed if self.norm_output else out

    def target_ids(self, logits: Tensor) -> Tensor:
        """Greedy proposals as ids of the target's vocabulary: [..., draft_vocab_size] -> int64 [...]."""
        ids = logits.argmax(-1)
        return ids if self.d2t is None else ids + self.d2t[ids]

    def _check_positions(self, input_pos: Tensor) -> None:
        first, count = int(input_pos[0]), input_pos.numel()
        if not torch.equal(input_pos, torch.arange(first, first + count)):
            raise ValueError(f"draft positions {input_pos.tolist()} are not consecutive")
        if first > self._slots_written:
            raise ValueError(f"draft position {first} leaves a gap: slots 0..{self._slots_written - 1} are written")
        if first + count > self.max_seq_len:
            raise ValueError(f"draft position {first + count - 1} is past max_seq_len {self.max_seq_len}")
        self._slots_written = first + count


def load_draft(
    draft: DraftDescription, max_seq_len: int, dtype: torch.dtype, attention: AttentionFactory, embedding: nn.Embedding
) -> DraftHead:
    """Load a draft head; ``embedding`` is the target's, for a head without one of its own."""
    with torch.device("meta"):
        head = DraftHead(draft, max_seq_len)
    load_checkpoint("", head, key_map=draft.tensor_names.get, dtype=dtype, raw_iter=lambda _: draft.source.tensors())
    return head.attach(draft, attention, dtype, embedding).eval().requires_grad_(False)
