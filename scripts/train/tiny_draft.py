"""Trains gemma4-tiny's EAGLE-3 draft head by training-time test.

In training-time test (EAGLE-3, arXiv 2503.01840) the head is unrolled over its own recurrent features, as in inference.
Step j at slot p embeds token p + 1 + j, takes step j - 1's feature, has position p + j, and attends to the first step's
keys up to p and to the keys of its own slot in the steps between. The head learns the target's own distribution. There
are seven steps, as in the paper. Three of four pieces are completions by the target itself; their tokens also determine
the draft vocabulary.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from tiny_training import (
    STEP_WEIGHT,
    Pieces,
    frozen,
    initial_matrices,
    save_speculator,
    save_tensors,
    stored,
    taught,
    train,
)
from transformers import Gemma4ForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from eagle3.export.draft.kinds.eagle.head import Head as DraftHead
from eagle3.export.draft.loading import load_draft
from eagle3.export.draft.reading import read_draft
from eagle3.targets.attention import EagerAttention

TAPS, DRAFT_VOCABULARY, CHAIN_LEN = (1, 3, 5), 1024, 3
UNROLLED = 7
LINEARS = {"model_type": "llama", "intermediate_size": 768, "num_hidden_layers": 1, "mlp_bias": False}


def initial_checkpoint(folder: Path, target: Gemma4ForCausalLM, counts: Counter, seed: int) -> None:
    """Write a speculators folder with an untrained head over the most frequent tokens and the target's embedding."""
    torch.manual_seed(seed)
    vocabulary, hidden, width, heads, keys = target.config.vocab_size, 256, 768, 4 * 64, 2 * 64
    ids = torch.tensor(sorted(token for token, _ in counts.most_common(DRAFT_VOCABULARY)))
    shapes = {"fc": (hidden, len(TAPS) * hidden), "lm_head": (DRAFT_VOCABULARY, hidden)}
    attention = {"q": (heads, 2 * hidden), "k": (keys, 2 * hidden), "v": (keys, 2 * hidden), "o": (hidden, heads)}
    shapes |= {f"layers.0.self_attn.{name}_proj": shape for name, shape in attention.items()}
    shapes |= {f"layers.0.mlp.{name}_proj": (width, hidden) for name in ("gate", "up")}
    tensors = initial_matrices(shapes | {"layers.0.mlp.down_proj": (hidden, width)})
    norms = ("norm", *(f"layers.0.{n}" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")))
    tensors |= {name: torch.ones(hidden) for name in norms}
    tensors["embed_tokens"] = target.model.embed_tokens.weight.detach().float().clone()
    tensors["lm_head"] = tensors["embed_tokens"][ids].clone()
    tensors = {f"{name}.weight": value for name, value in tensors.items()}
    tensors["d2t"] = ids - torch.arange(DRAFT_VOCABULARY)
    tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, ids, True)
    fields = {"draft_vocab_size": DRAFT_VOCABULARY, "eagle_aux_hidden_state_layer_ids": list(TAPS)}
    fields |= {"norm_before_residual": True, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
    layer = LINEARS | {"vocab_size": vocabulary}
    save_speculator(folder, "eagle3", "Eagle3DraftModel", CHAIN_LEN, layer, fields, tensors)


class Unroll:
    """Runs the head's layer over a batch of whole sequences for several steps. ``EagerAttention`` runs one sequence at
    a time."""

    def __init__(self, head: DraftHead, length: int):
        self.head, self.attn = head, head.layers[0].self_attn
        self.causal = torch.ones(length, length, dtype=torch.bool).tril()
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def step(self, tokens: torch.Tensor, feature: torch.Tensor) -> torch.Tensor:
        """Return the recurrent feature [B, T, H] of ``tokens`` [B, T] and ``feature`` [B, T, H]. Call it once per step,
        in order."""
        layer, attn, step = self.head.layers[0], self.attn, len(self.keys)
        normed = layer.hidden_norm(feature)
        residual = normed if layer.norm_before_residual else feature
        x = torch.cat((layer.input_layernorm(self.head.embed_tokens(tokens)), normed), dim=-1)
        query, key, value = (
            proj(x).unflatten(-1, (-1, attn.head_dim)).transpose(1, 2)
            for proj in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        positions = torch.arange(step, step + tokens.shape[1])[None]
        query, key = apply_rotary_pos_emb(query, key, *self.head.rotary_emb(x, positions))
        groups = attn.num_key_value_groups
        self.keys.append(key.repeat_interleave(groups, 1))
        self.values.append(value.repeat_interleave(groups, 1))
        scores = (query @ self.keys[0].mT * attn.scaling).masked_fill(~self.causal, float("-inf"))
        own = [(query * k).sum(-1, keepdim=True) * attn.scaling for k in self.keys[1:]]
        weights = torch.cat([scores, *own], dim=-1).softmax(-1)
        out = weights[..., : scores.shape[-1]] @ self.values[0]
        for index, v in enumerate(self.values[1:]):
            out = out + weights[..., scores.shape[-1] + index, None] * v
        x = residual + attn.o_proj(out.transpose(1, 2).flatten(2))
        return x + layer.mlp(layer.post_attention_layernorm(x))


def unrolled_loss(head: DraftHead, target: Gemma4ForCausalLM, piece: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy against the target's own distribution on the draft vocabulary, weighted by 0.8^step."""
    states, wanted = taught(target, piece)
    wanted = wanted[..., torch.arange(head.d2t.numel()) + head.d2t]  # not renormalized: other tokens count as zero
    length = piece.shape[1] - UNROLLED
    unroll = Unroll(head, length)
    feature = head.fuse(tuple(states[tap][:, :length] for tap in TAPS))
    total = torch.zeros(())
    for step in range(UNROLLED):
        feature = unroll.step(piece[:, 1 + step : 1 + step + length], feature)
        logits = head.lm_head(head.norm(feature)).float().log_softmax(-1)
        aim = wanted[:, 1 + step : 1 + step + length]
        total = total - STEP_WEIGHT**step * (aim * logits).sum(-1).mean()
    return total / sum(STEP_WEIGHT**step for step in range(UNROLLED))


def train_draft(folder: Path, target_folder: Path, pieces: Pieces, steps: int, seed: int, log: Callable) -> dict:
    """Train the head, and write a speculators folder at intervals."""
    torch.manual_seed(seed)
    target = frozen(target_folder)
    counts = Counter(pieces.written[:, 64:].flatten().tolist())
    initial_checkpoint(folder, target, counts, seed)
    draft = read_draft(folder)
    shared = SimpleNamespace(embed_tokens=target.model.embed_tokens, lm_head=target.lm_head)
    head = load_draft(draft, 1024, torch.float32, EagerAttention, shared).requires_grad_(True)

    def save() -> None:
        t2d = torch.zeros(target.config.vocab_size, dtype=torch.bool)
        t2d[torch.arange(DRAFT_VOCABULARY) + head.d2t] = True
        save_tensors(folder, {**stored(draft, head), "t2d": t2d})

    figures = train("draft", head, lambda piece: unrolled_loss(head, target, piece), pieces, steps, save, log)
    covered = sum(counts[int(i + o)] for i, o in enumerate(head.d2t)) / sum(counts.values())
    return figures | {"draft_vocabulary_covers": round(covered, 4)}
