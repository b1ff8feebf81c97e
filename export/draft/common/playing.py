"""Compares a head with a KV cache to a computation without a cache, for the twin checks of several kinds."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from eagle3.export.twin.comparison import Comparison

CHUNK, CHAIN = 7, 3  # rows


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
