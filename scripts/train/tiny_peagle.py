"""Trains gemma4-tiny's P-EAGLE head, which proposes all tokens in one forward. Training starts from the EAGLE-3 head.

The head starts with the EAGLE-3 head's tensors, and with a second layer that is the identity. After random slots, rows
with the mask token and the mask feature follow, one for each further token. Row d after slot p has position p + d,
attends to the slots up to p and to the earlier rows after the same slot, and learns the target's own distribution of
token p + d + 2 (P-EAGLE, arXiv 2602.01469). The folder is written as speculators writes its own.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from tiny_draft import DRAFT_VOCABULARY, TAPS
from tiny_training import STEP_WEIGHT, Pieces, frozen, save_tensors, stored, taught, train
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Gemma4ForCausalLM

from eagle3.export.draft.kinds.eagle.head import Head as DraftHead
from eagle3.export.draft.kinds.eagle.tensor_names import MASK
from eagle3.export.draft.loading import load_draft
from eagle3.export.draft.reading import read_draft

MASK_TOKEN, PROPOSALS, ANCHORS, LAYERS = 3, 7, 32, 2
"""The mask token is <unk>, which no text has. ``PROPOSALS``: the proposals of a slot, one of them by its own row.
``ANCHORS``: the slots of a piece that are followed by mask rows in a step."""


def initial_checkpoint(folder: Path, eagle3: Path, seed: int) -> None:
    """Write a speculators folder with the EAGLE-3 head of the folder ``eagle3`` and a second layer that changes
    nothing."""
    torch.manual_seed(seed)
    config = json.loads((eagle3 / "config.json").read_text())
    config |= {"architectures": ["PEagleDraftModel"], "speculators_model_type": "peagle", "mask_token_id": MASK_TOKEN}
    config["transformer_layer_config"]["num_hidden_layers"] = LAYERS
    config["speculators_config"]["algorithm"] = "peagle"
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = PROPOSALS
    tensors = load_file(eagle3 / "model.safetensors")
    hidden = tensors["norm.weight"].shape[0]
    for name, value in [*tensors.items()]:
        if name.startswith("layers.0.") and "hidden_norm" not in name:
            width = hidden if value.ndim == 2 and value.shape[1] == 2 * hidden else value.shape[-1]
            fresh = torch.randn(*value.shape[:-1], width) * 0.5 / width**0.5 if value.ndim == 2 else torch.ones(hidden)
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            tensors[name.replace("layers.0.", "layers.1.")] = torch.zeros_like(fresh) if adds else fresh
    tensors[MASK] = torch.randn(1, 1, len(TAPS) * hidden)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_tensors(folder, tensors)


class WholeSequences(nn.Module):
    """Attention within a batch of sequences [B, R] without a cache. ``EagerAttention`` runs one sequence at a time."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, rows: Tensor, scale: float, *_: None) -> Tensor:
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        seen = rows.to(query.dtype)
        return F.scaled_dot_product_attention(query, key, value, seen, scale=scale, enable_gqa=True).transpose(1, 2)


class Trained(nn.Module):
    """The head, and its mask feature as a trainable parameter; the head itself has it as a constant."""

    def __init__(self, head: DraftHead, mask_hidden: Tensor):
        super().__init__()
        self.head, self.mask_hidden = head, nn.Parameter(mask_hidden)


def mask(anchors: Tensor, length: int) -> Tensor:
    """Return the attention mask of ``length`` slots and the mask rows after the slots ``anchors`` [A]: float [R, R]."""
    owner = torch.cat((torch.arange(length), anchors.repeat_interleave(PROPOSALS - 1)))
    depth = torch.cat((torch.zeros(length, dtype=torch.long), torch.arange(1, PROPOSALS).repeat(len(anchors))))
    slots = (depth == 0)[None] & (owner[None] <= owner[:, None])
    own = (depth > 0)[None] & (owner[None] == owner[:, None]) & (depth[None] <= depth[:, None])
    return torch.zeros(slots.shape).masked_fill(~(slots | own), float("-inf"))


def all_rows(head: DraftHead, mask_feature: Tensor, tokens: Tensor, feature: Tensor, anchors: Tensor) -> Tensor:
    """Return the states [B, T + A * (PROPOSALS - 1), H] of all slots, then of the mask rows after the slots ``anchors``
    (int64 [A], ascending), slot by slot. ``mask_feature`` is [1, 1, H], ``tokens`` [B, T], ``feature`` [B, T, H]."""
    batch, length = tokens.shape
    masked = places(anchors)
    tokens = torch.cat((tokens, torch.full((batch, len(masked)), head.mask_token)), 1)
    state = torch.cat((feature, mask_feature.expand(batch, len(masked), -1)), 1)
    positions = torch.cat((torch.arange(length), masked))
    embedded, rotary = head.embed_tokens(tokens), head.rotary_emb(state, positions[None])
    limits = mask(anchors, length)
    for layer in head.layers:
        state = layer(embedded, state, None, position_embeddings=rotary, attention_mask=limits)
    return state


def places(anchors: Tensor) -> Tensor:
    """Return the positions of the mask rows after the slots ``anchors`` [A]: int64 [A * (PROPOSALS - 1)]."""
    return (anchors[:, None] + torch.arange(1, PROPOSALS)).flatten()


def parallel_loss(trained: Trained, target: Gemma4ForCausalLM, piece: Tensor) -> Tensor:
    """Return the cross entropy against the target's own distribution on the draft vocabulary, weighted by 0.8^row."""
    head = trained.head
    states, wanted = taught(target, piece)
    wanted = wanted[..., torch.arange(head.d2t.numel()) + head.d2t]  # not renormalized: other tokens count as zero
    length = piece.shape[1] - PROPOSALS
    anchors = torch.randperm(length)[:ANCHORS].sort().values
    feature = head.fuse(tuple(states[tap][:, :length] for tap in TAPS))
    mask_feature = head.fuse(tuple(trained.mask_hidden.chunk(len(TAPS), -1)))
    state = all_rows(head, mask_feature, piece[:, 1 : 1 + length], feature, anchors)
    logits = head.lm_head(head.norm(state)).float().log_softmax(-1)
    positions = torch.cat((torch.arange(length), places(anchors)))
    by_row = -(wanted[:, positions + 1] * logits).sum(-1)
    depths = by_row[:, length:].unflatten(1, (-1, PROPOSALS - 1)).mean((0, 1))
    weights = STEP_WEIGHT ** torch.arange(PROPOSALS)
    return (torch.cat((by_row[:, :length].mean()[None], depths)) * weights).sum() / weights.sum()


def train_peagle(folder: Path, target_folder: Path, pieces: Pieces, steps: int, seed: int, log: Callable) -> dict:
    """Train the head, starting from the EAGLE-3 head beside ``folder``, and write a speculators folder at intervals."""
    target = frozen(target_folder)
    initial_checkpoint(folder, folder.parent / "draft", seed)
    draft = read_draft(folder)
    shared = SimpleNamespace(embed_tokens=target.model.embed_tokens, lm_head=target.lm_head)
    head = load_draft(draft, 1024, torch.float32, lambda _: WholeSequences(), shared).requires_grad_(True)
    tensors = load_file(folder / "model.safetensors")
    trained = Trained(head, tensors[MASK].float())

    def save() -> None:
        save_tensors(folder, {**stored(draft, head), MASK: trained.mask_hidden, "t2d": tensors["t2d"]})

    assert head.d2t.numel() == DRAFT_VOCABULARY
    return train("peagle", trained, lambda piece: parallel_loss(trained, target, piece), pieces, steps, save, log)
