"""Attention on CUDA: ExecuTorch's ``triton::sdpa`` over the slots written so far, split between blocks for few rows.

The op knows no softcap: with one, attention is written out, over all slots.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eagle3.export.plan import WINDOW_ROWS
from eagle3.targets.attention import EagerAttention, KVCacheShape, attend
from eagle3.targets.sinks import (
    after_the_sink,
    mask_with_sink,
    query_with_sinks,
    sink_slots,
    slots_after_the_sink,
)

SPLIT_ROWS = 4  # ExecuTorch's split-K attention takes up to 4 rows of queries


class BoundedAttention(EagerAttention):
    """See ``EagerAttention``. ExecuTorch's ``triton::sdpa`` reads the slots written so far and no others.

    A few rows against a long cache fill a GPU only when the cache is split between thread blocks, which the op does for
    1 to 4 rows, a number that must be static: a verify window is padded to a multiple of 4 and goes in tiles of 4.
    """

    def __init__(self, shape: KVCacheShape):
        if not shape.sinks:
            super().__init__(shape)
            return
        nn.Module.__init__(self)
        self.kv_cache = SinkCache(shape)

    def rows(self, input_pos: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Positions [T], mask [1, 1, T or padded, slots], slots written after this forward (a scalar on the device)."""
        written = input_pos[-1] + 1
        if isinstance(self.kv_cache, SinkCache):
            mask, written = mask_with_sink(mask), written + 1
        return input_pos, F.pad(mask, (0, 0, 0, padding(input_pos.shape[0]))), written

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rows: Any,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        input_pos, mask, written = rows
        keys, values = self.kv_cache.update(input_pos, key.transpose(1, 2), value.transpose(1, 2))
        length, head_dim = query.shape[1], query.shape[-1]
        if softcap is not None:
            first = 0 if sinks is None else 1
            keys, values = (cache[:, :, first:, :head_dim] for cache in (keys, values))
            seen = mask[:, :, :length, first:]
            return attend(query.transpose(1, 2), keys, values, seen, scale, softcap, sinks).transpose(1, 2)
        if sinks is not None:
            query = query_with_sinks(query, sinks, scale, keys.shape[-1])
        # Padded and cut along the rows where they are the first dimension: elsewhere the shape of memory would depend
        # on the length, and the trace would be of one length.
        query = F.pad(query, (0, 0, 0, 0, 0, padding(length))).transpose(1, 2)  # [1, heads, T or padded, head_dim]

        def tile(query: Tensor, mask: Tensor) -> Tensor:
            return torch.ops.triton.sdpa(query, keys, values, mask, 0.0, False, scale, True, written)

        if bounds(length)[1] > WINDOW_ROWS:
            return tile(query, mask).transpose(1, 2)[:, :length, :, :head_dim]
        tiles = zip(query.split(SPLIT_ROWS, dim=2), mask.split(SPLIT_ROWS, dim=2), strict=True)
        out = torch.cat([tile(*each).transpose(1, 2) for each in tiles], dim=1)
        return out[:, :length, :, :head_dim]


class SinkCache(nn.Module):
    """A cache whose first slot is the sink's.

    Its heads are as wide as the next power of two, for which alone the op splits the slots between blocks.
    """

    def __init__(self, shape: KVCacheShape):
        super().__init__()
        self.slots, width = shape.slots, 1 << shape.head_dim.bit_length()
        for name in ("k_cache", "v_cache"):
            empty = torch.zeros(1, shape.kv_heads, shape.slots + 1, width, dtype=shape.dtype)
            self.register_buffer(name, empty, persistent=False)
        key, value = sink_slots(shape.kv_heads, shape.head_dim, width, shape.dtype)
        self.register_buffer("sink_key", key, persistent=False)
        self.register_buffer("sink_value", value, persistent=False)

    def update(self, input_pos: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """key, value [1, kv_heads, T, head_dim] -> both caches, [1, kv_heads, 1 + slots, width]."""
        slots = slots_after_the_sink(input_pos % self.slots)
        for new, sink, cache in ((key, self.sink_key, self.k_cache), (value, self.sink_value, self.v_cache)):
            cache.index_copy_(2, slots, after_the_sink(new.transpose(1, 2), sink).transpose(1, 2))
        return self.k_cache, self.v_cache


def bounds(length: int | torch.SymInt) -> tuple[int, int]:
    """The least and the greatest that a dimension of a traced tensor may be."""
    if isinstance(length, int):
        return length, length
    span = length.node.shape_env.bound_sympy(length.node.expr)
    return int(span.lower), int(span.upper)


def padding(length: int | torch.SymInt) -> int | torch.SymInt:
    """Rows that bring a verify window to a multiple of ``SPLIT_ROWS`` not less than the longest one.

    The op asks whether there are more than ``SPLIT_ROWS`` rows. Where some lengths are and some are not it would be
    compiled for the one that is traced, so that those get ``SPLIT_ROWS`` rows more, which attend to nothing.
    """
    least, longest = bounds(length)
    if longest == 1:
        return 0
    if longest <= WINDOW_ROWS:
        return -(-longest // SPLIT_ROWS) * SPLIT_ROWS - length
    return SPLIT_ROWS if least <= SPLIT_ROWS else 0
