"""Attention on the CPU for a layer with a sliding window or with sinks, by ExecuTorch's own LLM ops.

Plain PyTorch attention would lower to an ``index_put`` that copies each cache and a dozen portable kernels over all of
its slots. ``llama::update_cache`` writes in place, and ``llama::custom_sdpa`` reads a ring, or only the slots that have
been written. That op has no softcap: with one, XNNPACK computes products and softmax over all slots.

The arguments of ``custom_sdpa`` are made here: the first slot, a mask, and queries [1, T, heads, head_dim] in
which heads that share keys become rows.

The op packs the keys for each head: four rows of 32 heads over 4,000 positions take half the time if they become 16
rows of 8 heads (scripts/bench/bench_cpu_kernels.py). Such rows need a mask, since the op's own causal mask counts rows.
Only if all attend to the same keys, as the heads of a single row do, no mask is needed.
"""

from typing import Any, NamedTuple

import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401  (registers torch.ops.llama)
import torch
from torch import Tensor, nn

from eagle3.targets.attention import Block, KVCacheShape, attend, attention_mask
from eagle3.targets.sinks import (
    after_the_sink,
    mask_with_sink,
    query_with_sinks,
    sink_slots,
    slots_after_the_sink,
)

SINK_COLUMNS = 8  # columns added to each head; the sink needs one, and eight keep heads aligned


class Rows(NamedTuple):
    """The positions of a forward's rows. ``start`` is the first row's slot in a layer with full attention, and 0 in
    others. ``slots`` [1, T] and, for a ring, ``additive`` [T, slots] count the sink's slot too; ``mask``, bool [1, 1,
    T, slots], does not. ``alike`` is True if every row attends to all slots up to the last row's."""

    start: int
    slots: Tensor
    additive: Tensor | None
    mask: Tensor
    alike: bool = False


class LlmOpsAttention(nn.Module):
    """The attention of a layer with a sliding window or sinks, with the interface of ``EagerAttention``. The caches
    have the layout [1, slots, kv_heads, head_dim], which the ops need."""

    k_cache: Tensor
    v_cache: Tensor
    sink_key: Tensor
    sink_value: Tensor

    def __init__(self, shape: KVCacheShape):
        super().__init__()
        self.shape = shape
        self.first_slot = int(shape.sinks)  # the slot after the sink's, for position 0
        self.columns = SINK_COLUMNS if shape.sinks else 0
        width = shape.head_dim + self.columns
        for name in ("k_cache", "v_cache"):
            empty = torch.zeros(1, self.first_slot + shape.slots, shape.kv_heads, width, dtype=shape.dtype)
            self.register_buffer(name, empty, persistent=False)
        if shape.sinks:
            key, value = sink_slots(shape.kv_heads, shape.head_dim, width, shape.dtype)
            self.register_buffer("sink_key", key, persistent=False)
            self.register_buffer("sink_value", value, persistent=False)

    def rows(self, input_pos: Tensor, block: Block | None = None) -> Rows:
        mask = attention_mask(input_pos, self.shape, block)
        if self.shape.window:
            slots, seen = input_pos % self.shape.slots, mask
            if self.shape.sinks:
                slots, seen = slots_after_the_sink(slots), mask_with_sink(mask)
            return Rows(0, slots[None], additive_mask(seen[0, 0]), mask)
        start = self.first_slot + first_slot(input_pos, self.shape.slots)
        alike = block is not None and not block.causal
        return Rows(start, slots_after_the_sink(input_pos)[None], None, mask, alike)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        rows: Rows,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if key is not None and value is not None:
            self.write(key, value, rows)
        if softcap is not None:
            keys, values = (
                cache[:, self.first_slot :, :, : self.shape.head_dim] for cache in (self.k_cache, self.v_cache)
            )
            query, keys, values = (x.transpose(1, 2) for x in (query, keys, values))
            return attend(query, keys, values, rows.mask, scale, softcap, sinks).transpose(1, 2)
        if sinks is not None:
            query = query_with_sinks(query, sinks, scale, self.k_cache.shape[-1])
        out = self._attended(query, rows, scale)
        return out[..., : self.shape.head_dim] if self.columns else out

    def write(self, key: Tensor, value: Tensor, rows: Rows) -> None:
        if self.shape.sinks:
            key, value = after_the_sink(key, self.sink_key), after_the_sink(value, self.sink_value)
        for new, cache in ((key, self.k_cache), (value, self.v_cache)):
            torch.ops.llama.update_cache_with_indices(new, cache, 0, rows.slots)

    def _attended(self, query: Tensor, rows: Rows, scale: float) -> Tensor:
        """Return the attention's output. The output and ``query`` are [1, T, heads, width of the caches]."""
        caches = self.k_cache, self.v_cache
        together = heads_together(query.shape[2], self.shape.kv_heads)
        length = query.shape[1]
        alike = rows.alike or (isinstance(length, int) and length == 1)
        if together == 1 or (rows.additive is None and not alike):
            causal = rows.additive is None and not rows.alike
            return torch.ops.llama.custom_sdpa(query, *caches, rows.start, rows.additive, 0.0, causal, scale)
        # without a mask, each row attends to as many keys as ``start`` plus the number of rows
        if rows.additive is None:
            start, mask = rows.start + length - length * together, None
        else:
            start, mask = 0, repeated_rows(rows.additive, together)
        stacked = heads_as_rows(query, together)
        return rows_as_heads(torch.ops.llama.custom_sdpa(stacked, *caches, start, mask, 0.0, False, scale), together)


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
