"""Trains gemma4-tiny's DFlash head: blocks after random positions, each computed in one forward.

Row r of a block that begins at token a holds the anchor (r = 0) or the mask token, has position a + r, and learns the
target's own distribution of token a + r. All layers attend to the target's features at the positions before a within
the window, and to all rows of the same block. Earlier rows weigh more: exp(-(r - 1) / 4), as in the paper (DFlash,
arXiv 2602.06036). The folder is written as speculators writes its own.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from tiny_training import Pieces, frozen, initial_matrices, save_speculator, save_tensors, stored, taught, train
from torch import Tensor
from transformers import Gemma4ForCausalLM

from eagle3.export.draft.kinds.dflash.head import Head
from eagle3.export.draft.kinds.dflash.layers import DraftLayer, Place, rotated
from eagle3.export.draft.loading import load_draft
from eagle3.export.draft.reading import read_draft
from eagle3.targets.attention import EagerAttention

TAPS, MASK_TOKEN, ROWS, WINDOW, ANCHORS, DECAY = (1, 3, 5), 3, 8, 128, 32, 4.0
"""The mask token is <unk>, which no text has. ``ROWS``: the rows of a block. ``ANCHORS``: the blocks of a piece in a
step."""
LAYERS = 3
LINEARS = {"model_type": "qwen3", "intermediate_size": 512, "num_hidden_layers": LAYERS, "sliding_window": WINDOW}
LINEARS |= {"layer_types": ["sliding_attention"] * LAYERS, "use_sliding_window": True}


def initial_checkpoint(folder: Path, vocabulary: int, seed: int) -> None:
    """Write a speculators folder with an untrained head, which has the target's embedding and lm_head."""
    torch.manual_seed(seed)
    hidden, inner, heads, keys = 256, 512, 4 * 64, 2 * 64
    shapes = {"fc": (hidden, len(TAPS) * hidden)}
    norms = {"norm": hidden, "hidden_norm": hidden}
    for at in (f"layers.{index}" for index in range(LAYERS)):
        shapes |= {f"{at}.self_attn.q_proj": (heads, hidden), f"{at}.self_attn.o_proj": (hidden, heads)}
        shapes |= {f"{at}.self_attn.{name}_proj": (keys, hidden) for name in "kv"}
        shapes |= {f"{at}.mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj": (hidden, inner)}
        norms |= {f"{at}.{name}": hidden for name in ("input_layernorm", "post_attention_layernorm")}
        norms |= {f"{at}.self_attn.{name}_norm": 64 for name in "qk"}
    tensors = initial_matrices(shapes) | {name: torch.ones(size) for name, size in norms.items()}
    tensors["norm"] *= 0.1  # the rows of Gemma's embedding have large norms
    fields = {"draft_vocab_size": vocabulary, "aux_hidden_state_layer_ids": list(TAPS), "block_size": ROWS}
    fields |= {"mask_token_id": MASK_TOKEN, "sample_from_anchor": False, "sliding_window_non_causal": True}
    layer = LINEARS | {"vocab_size": vocabulary}
    tensors = {f"{name}.weight": value for name, value in tensors.items()}
    save_speculator(folder, "dflash", "DFlashDraftModel", ROWS - 1, layer, fields, tensors)


def mask(anchors: Tensor, length: int) -> Tensor:
    """Return the attention mask of the rows of the blocks after ``anchors`` [A]: float [A * ROWS, length + A * ROWS],
    with columns for the context's features, then for all rows."""
    distance = anchors[:, None] - torch.arange(length)[None]
    context = ((distance > 0) & (distance <= WINDOW)).repeat_interleave(ROWS, dim=0)
    own = torch.eye(len(anchors), dtype=torch.bool).repeat_interleave(ROWS, 0).repeat_interleave(ROWS, 1)
    seen = torch.cat((context, own), dim=1)
    return torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))


def attention(layer: DraftLayer, feature: Tensor, x: Tensor, context: Place, blocks: Place, seen: Tensor) -> Tensor:
    """Return the attention of rows ``x`` [B, R, H] with ``feature`` [B, T, H]: [B, R, H]. ``EagerAttention`` cannot be
    used, since it runs one sequence at a time."""
    attn = layer.self_attn
    query = rotated(attn.q_norm(attn.q_proj(x).unflatten(-1, attn.shape)), blocks)
    keys, values = [], []
    for rows, place in ((feature, context), (x, blocks)):
        key, value = attn.kept(rows)
        keys.append(rotated(attn.k_norm(key), place))
        values.append(value)
    out = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        torch.cat(keys, dim=1).transpose(1, 2),
        torch.cat(values, dim=1).transpose(1, 2),
        attn_mask=seen.to(query.dtype),
        enable_gqa=True,
    )
    return attn.o_proj(out.transpose(1, 2).flatten(2))


def block_loss(head: Head, target: Gemma4ForCausalLM, piece: Tensor) -> Tensor:
    """Return the cross entropy of ``ANCHORS`` blocks of each sequence [B, T] against the target's own distribution."""
    states, wanted = taught(target, piece)
    length, batch = piece.shape[1], len(piece)
    anchors = torch.randperm(length - ROWS)[:ANCHORS].sort().values + 1
    places = (anchors[:, None] + torch.arange(ROWS)).flatten()
    feature = head.fuse(tuple(states[tap] for tap in TAPS))
    tokens = torch.full((batch, ANCHORS, ROWS), MASK_TOKEN)
    tokens[:, :, 0] = piece[:, anchors]
    x = torch.nn.functional.embedding(tokens.flatten(1), target.model.embed_tokens.weight)
    context, blocks = (
        Place(None, *head.rotary_emb(feature, positions[None])) for positions in (torch.arange(length), places)
    )
    limits = mask(anchors, length)
    for layer in head.layers:
        x = x + attention(layer, feature, layer.input_layernorm(x), context, blocks, limits)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    state = head.norm(x).unflatten(1, (ANCHORS, ROWS))[:, :, 1:]
    logits = torch.nn.functional.linear(state, target.model.embed_tokens.weight).float().log_softmax(-1)
    aim = wanted[:, places - 1].unflatten(1, (ANCHORS, ROWS))[:, :, 1:]
    weights = torch.exp(-torch.arange(ROWS - 1) / DECAY)
    by_row = -(aim * logits).sum(-1).mean((0, 1))
    return (by_row * weights).sum() / weights.sum()


def train_dflash(folder: Path, target_folder: Path, pieces: Pieces, steps: int, seed: int, log: Callable) -> dict:
    """Train the head, and write a speculators folder at intervals."""
    torch.manual_seed(seed)
    target = frozen(target_folder)
    initial_checkpoint(folder, target.config.vocab_size, seed)
    draft = read_draft(folder)
    shared = SimpleNamespace(embed_tokens=torch.nn.Identity(), lm_head=torch.nn.Identity())  # the target's are fixed
    head = load_draft(draft, 1024, torch.float32, EagerAttention, shared).requires_grad_(True)

    def save() -> None:
        save_tensors(folder, stored(draft, head))

    return train("dflash", head, lambda piece: block_loss(head, target, piece), pieces, steps, save, log)
