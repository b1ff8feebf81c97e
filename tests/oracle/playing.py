"""Has what the oracles of several kinds share: the comparison of a head with a KV cache to a computation without one,
and the sizes of a small copy."""

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from eagle3.export.twin.comparison import Comparison

CHUNK, CHAIN = 7, 3  # rows
FULL = "full_attention"
Shapes = dict[str, tuple[int, ...]]


def stand_in(vocabulary: int, size: int, generator: torch.Generator) -> Any:  # noqa: ANN401 - part of a target
    """Return a stand-in for the target, with the two modules that a draft head may share: embedding and lm_head."""
    embedding, lm_head = nn.Embedding(vocabulary, size), nn.Linear(size, vocabulary, bias=False)
    for module in (embedding, lm_head):
        module.weight.copy_(torch.randn(module.weight.shape, generator=generator))
    return SimpleNamespace(embed_tokens=embedding, lm_head=lm_head)


def play(drafter: Any, head: Any, tokens: Tensor, taps: list[Tensor]) -> Comparison:  # noqa: ANN401 - of several kinds
    """Seed the head chunk by chunk and compare each output. After each chunk, draft a few tokens, whose rows the next
    chunk overwrites.

    ``drafter`` has the methods of the ``Drafter`` of EAGLE heads, ``head`` is a ``CachedHead``."""
    length = tokens.shape[1]
    compared = Comparison(length)
    features = head.fuse(tuple(taps))
    fused = drafter.fuse([tap[0] for tap in taps])[None]
    compared.add("tap 0", 0, features, fused, fused)  # all taps, fused
    masks = head.proposals - 1
    chunk = min(CHUNK, (head.window or CHUNK + masks) - masks)
    for start in range(0, length - CHAIN, chunk):
        end = min(start + chunk, length - CHAIN)
        ids, rows = tokens[:, :end], fused[:, :end]
        given = tokens[:, start:end], fused[:, start:end], torch.arange(start, end)
        if masks:
            token, feature = drafter.mask_rows(len(taps))
            ids = torch.cat([ids, token.expand(1, masks)], dim=1)
            rows = torch.cat([rows, feature[None].expand(1, masks, -1)], dim=1)
        for step in range(1 if masks else CHAIN + 1):
            expected_logits, expected_next = drafter(ids[0], rows[0])
            logits, recurrent = head(*given)
            for what, value, wanted in (("logits", logits, expected_logits), ("tap 1", recurrent, expected_next)):
                compared.add(what, start, value, wanted[None, -value.shape[1] :], wanted)
            if step < CHAIN:
                token = head.target_ids(expected_logits[None, -1:])
                state = expected_next[None, -1:]
                given = token, state, torch.tensor([end + step])
                ids, rows = torch.cat([ids, token], dim=1), torch.cat([rows, state], dim=1)
    return compared


def layer_shapes(layer, at: str, inputs: int, norms: Iterable[str]) -> tuple[Shapes, Shapes]:
    """Return the shapes of the linears and of the norms that a decoder layer may have, by name without ``.weight``.

    Args:
        at: the layer's name
        inputs: the input width of its projections of queries, keys and values
        norms: the names of its norms of the hidden size, except those that only Gemma 4 has
    """
    size, inner, head_dim = layer.hidden_size, layer.intermediate_size, layer.head_dim
    queries, keys = layer.num_attention_heads * head_dim, layer.num_key_value_heads * head_dim
    linears: Shapes = {
        f"{at}.self_attn.q_proj": (queries, inputs),
        f"{at}.self_attn.k_proj": (keys, inputs),
        f"{at}.self_attn.v_proj": (keys, inputs),
        f"{at}.self_attn.o_proj": (size, queries),
        f"{at}.mlp.gate_proj": (inner, size),
        f"{at}.mlp.up_proj": (inner, size),
        f"{at}.mlp.down_proj": (size, inner),
    }
    every = (*norms, "pre_feedforward_layernorm", "post_feedforward_layernorm")  # only Gemma 4 has the last two
    widths: Shapes = {f"{at}.{name}": (size,) for name in every}
    return linears, widths | {f"{at}.self_attn.{name}_norm": (head_dim,) for name in "qk"}


def with_sizes_of(cut: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys with which layers of full attention get the sizes and the RoPE of ``cut``, a configuration with
    the usual keys."""
    heads = {"global_head_dim": cut["head_dim"], "num_global_key_value_heads": cut["num_key_value_heads"]}
    return heads | {"rope_parameters": {FULL: cut["rope_parameters"]}}
