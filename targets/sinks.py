"""Attention sinks for kernels that have none: one more slot at the beginning of the cache.

The slot's key is zero except in an additional column, in which the query has the sink's logit. Its value is zero. The
slot therefore takes the sink's share of the softmax and adds nothing to the output.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def query_with_sinks(query: Tensor, sinks: Tensor, scale: float, width: int) -> Tensor:
    """Append the sinks' logits to the query: [1, T, heads, head_dim] and [heads] -> [1, T, heads, width]."""
    column = (sinks / scale).to(query.dtype)[None, None, :, None].expand(*query.shape[:3], 1)
    return F.pad(torch.cat((query, column), dim=-1), (0, width - query.shape[-1] - 1))


def after_the_sink(new: Tensor, sink: Tensor) -> Tensor:
    """Put the first slot before new keys or values, so that all are written together.

    Maps new [1, T, kv_heads, head_dim] and sink [1, 1, kv_heads, width] to [1, 1 + T, kv_heads, width].
    """
    return torch.cat((sink, F.pad(new, (0, sink.shape[-1] - new.shape[-1]))), dim=1)


def sink_slots(kv_heads: int, head_dim: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the key and the value of the first slot, each [1, 1, kv_heads, width]."""
    key = torch.zeros(1, 1, kv_heads, width, dtype=dtype)
    key[..., head_dim] = 1
    return key, torch.zeros_like(key)


def slots_after_the_sink(positions: Tensor) -> Tensor:
    """Map slots [T] of a cache without a sink to slots [1 + T] of a cache with one, the sink's slot first."""
    return F.pad(positions + 1, (1, 0))


def mask_with_sink(mask: Tensor) -> Tensor:
    """Extend a mask so that every row attends to the sink: bool [1, 1, T, slots] -> [1, 1, T, 1 + slots]."""
    return torch.cat((torch.ones_like(mask[..., :1]), mask), dim=-1)


def softcapped(scores: Tensor, cap: float | None) -> Tensor:
    """Return cap * tanh(scores / cap) for scores of any shape, in their dtype; without a cap, the scores themselves."""
    return scores if cap is None else torch.tanh(scores / cap) * cap
