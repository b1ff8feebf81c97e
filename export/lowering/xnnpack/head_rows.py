"""Makes the arguments of ExecuTorch's ``custom_sdpa``: the first slot, a mask, and queries [1, T, heads, head_dim] in
which heads that share keys become rows.

The op packs the keys for each head: four rows of 32 heads over 4,000 positions take half the time if they become 16
rows of 8 heads (scripts/bench/bench_cpu_kernels.py). Such rows need a mask, since the op's own causal mask counts rows.
Only if all attend to the same keys, as the heads of a single row do, no mask is needed.
"""

from typing import Any

import torch
from torch import Tensor

LEAST_HEADS = 4
"""The fewest heads that may remain, since each thread of the op takes one head."""


def first_slot(input_pos: Tensor, slots: int) -> Any:  # noqa: ANN401 - a symbol in a trace, otherwise a number
    """Return the position of the first row, and tell a trace that it lies within the ``slots`` of a cache."""
    start: Any = input_pos[0].item()
    torch._check(start >= 0)
    torch._check(start + input_pos.shape[0] <= slots)
    return start


def additive_mask(seen: Tensor) -> Tensor:
    """Return the mask that is added to scores, in the shape of the bool mask ``seen``."""
    return torch.zeros_like(seen, dtype=torch.float32).masked_fill(~seen, float("-inf"))


def heads_together(heads: int, kv_heads: int) -> int:
    """Return how many query heads with the same keys become rows of one head; 1 if none do."""
    shared = heads // kv_heads
    fitting = (count for count in range(shared, 1, -1) if shared % count == 0 and heads // count >= LEAST_HEADS)
    return next(fitting, 1)


def heads_as_rows(query: Tensor, together: int) -> Tensor:
    """Map [1, T, heads, head_dim] to [1, T * together, heads / together, head_dim]."""
    return query.unflatten(2, (-1, together)).transpose(2, 3).flatten(1, 2)


def rows_as_heads(out: Tensor, together: int) -> Tensor:
    """Return the inverse of ``heads_as_rows``."""
    return out.unflatten(1, (-1, together)).transpose(2, 3).flatten(2, 3)


def repeated_rows(mask: Tensor, together: int) -> Tensor:
    """Map [T, slots] to [T * together, slots]."""
    return mask[:, None].expand(-1, together, -1).flatten(0, 1)
