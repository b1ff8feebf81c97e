"""Arguments of ExecuTorch's ``custom_sdpa``: the first slot, a mask, and query heads that share keys as rows below each
other, [1, T, heads, head_dim].

The op packs the keys anew for each head: four rows of 32 heads over 4,000 positions take half the time as 16 rows of 8
(scripts/bench/bench_cpu_kernels.py). Rows need a mask, or to see all keys alike, as a single row's heads do: the op's
own causal mask goes by the row.
"""

from typing import Any

import torch
from torch import Tensor

LEAST_HEADS = 4
"""The fewest heads that stay: the op's threads take a head each."""


def first_slot(input_pos: Tensor, slots: int) -> Any:  # noqa: ANN401 - in a trace a symbol, else a number
    """Return the first of the rows' positions, of which a trace then knows that the ``slots`` of a cache hold them."""
    start: Any = input_pos[0].item()
    torch._check(start >= 0)
    torch._check(start + input_pos.shape[0] <= slots)
    return start


def additive_mask(seen: Tensor) -> Tensor:
    """Return what is added to the scores for a mask of bool, of the same shape."""
    return torch.zeros_like(seen, dtype=torch.float32).masked_fill(~seen, float("-inf"))


def heads_together(heads: int, kv_heads: int) -> int:
    """Return how many query heads of the same keys become rows of one; 1: none."""
    shared = heads // kv_heads
    fitting = (count for count in range(shared, 1, -1) if shared % count == 0 and heads // count >= LEAST_HEADS)
    return next(fitting, 1)


def heads_as_rows(query: Tensor, together: int) -> Tensor:
    """[1, T, heads, head_dim] -> [1, T * together, heads / together, head_dim]"""
    return query.unflatten(2, (-1, together)).transpose(2, 3).flatten(1, 2)


def rows_as_heads(out: Tensor, together: int) -> Tensor:
    """Return the inverse of ``heads_as_rows``."""
    return out.unflatten(1, (-1, together)).transpose(2, 3).flatten(2, 3)


def repeated_rows(mask: Tensor, together: int) -> Tensor:
    """[T, slots] -> [T * together, slots]"""
    return mask[:, None].expand(-1, together, -1).flatten(0, 1)
