"""Attention sinks for kernels that know none: one more slot, the first.

Its key is zero but for a column of its own, in which the query has the sink's logit; its value is zero. So the slot
takes the share of the softmax that the sink takes, and gives nothing.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def query_with_sinks(query: Tensor, sinks: Tensor, scale: float, width: int) -> Tensor:
    """query [1, T, heads, head_dim], sinks [heads] -> [1, T, heads, width]."""
    column = (sinks / scale).to(query.dtype)[None, None, :, None].expand(*query.shape[:3], 1)
    return F.pad(torch.cat((query, column), dim=-1), (0, width - query.shape[-1] - 1))


def after_the_sink(new: Tensor, sink: Tensor) -> Tensor:
    """Keys or values [1, T, kv_heads, head_dim] and what the first slot has, [1, 1, kv_heads, width], which is written
    with them: [1, 1 + T, kv_heads, width]."""
    return torch.cat((sink, F.pad(new, (0, sink.shape[-1] - new.shape[-1]))), dim=1)


def sink_slots(kv_heads: int, head_dim: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Key and value of the first slot, [1, 1, kv_heads, width] each."""
    key = torch.zeros(1, 1, kv_heads, width, dtype=dtype)
    key[..., head_dim] = 1
    return key, torch.zeros_like(key)


def slots_after_the_sink(positions: Tensor) -> Tensor:
    """Slots [T] of a cache without a sink -> [1 + T] of the cache with one."""
    return F.pad(positions + 1, (1, 0))


def mask_with_sink(mask: Tensor) -> Tensor:
    """bool [1, 1, T, slots] -> [1, 1, T, 1 + slots]: every row attends to the sink."""
    return torch.cat((torch.ones_like(mask[..., :1]), mask), dim=-1)
