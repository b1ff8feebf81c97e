"""Attention on the CPU, by ExecuTorch's own LLM ops.

Plain PyTorch attention would lower to an ``index_put`` that copies each cache and a dozen portable kernels over all of
its slots. ``llama::update_cache`` writes in place and ``llama::custom_sdpa`` reads only what has been written, so a
step costs the same whatever ``max_seq_len`` is. It knows no softcap: with one, products and softmax are XNNPACK's, over
all slots.

Query heads that share keys become rows below each other where that helps: the op packs the keys anew for each head.
Four rows of 32 heads over 4,000 positions take half the time as 16 rows of 8 (scripts/bench_cpu_kernels.py). Rows need
a mask, or to see all keys alike, as a single row's heads do: the op's own causal mask goes by the row. A mask has all
slots of the cache, so a layer that attends fully keeps the mask of a short window in its keys (``window_slots.py``).
"""

from typing import Any, NamedTuple

import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401  (registers torch.ops.llama)
import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F

from eagle3.export.lowering.xnnpack.window_slots import COLUMNS, WINDOW_SLOTS, masking_keys, seeing_queries
from eagle3.targets.attention import Block, KVCacheShape, attend, attention_mask
from eagle3.targets.sinks import (
    after_the_sink,
    mask_with_sink,
    query_with_sinks,
    sink_slots,
    slots_after_the_sink,
)

SINK_COLUMNS = 8  # beside a head's own, of which the sink takes one: what follows stays aligned
LEAST_HEADS = 4
"""The fewest heads that stay: the op's threads take a head each."""


class Rows(NamedTuple):
    """``start``: the first slot of a layer that attends fully, 0 of others. ``slots`` [1, T] and ``additive``
    [T, slots] where the op needs them, with the sink's; ``mask``: bool [1, 1, T, slots] without. ``alike``: every row
    attends to all slots up to the last row's. ``windowed``: the rows' keys are in window slots too, and each row
    attends to those and to the slots before ``start``."""

    start: int
    slots: Tensor | None
    additive: Tensor | None
    mask: Tensor
    alike: bool = False
    windowed: bool = False


class LlmOpsAttention(nn.Module):
    """See ``EagerAttention``. The caches are laid out [1, slots, kv_heads, head_dim], as the ops want them."""

    k_cache: Tensor
    v_cache: Tensor
    sink_key: Tensor
    sink_value: Tensor
    masking_keys: Tensor
    seeing_queries: Tensor

    def __init__(self, shape: KVCacheShape):
        super().__init__()
        self.shape = shape
        shared = heads_together(shape.heads, shape.kv_heads) > 1
        self.window_slots = WINDOW_SLOTS if shared and not shape.window and not shape.sinks else 0
        self.first_slot = int(shape.sinks) or self.window_slots  # of position 0
        self.columns = SINK_COLUMNS if shape.sinks else COLUMNS if self.window_slots else 0
        width = shape.head_dim + self.columns
        for name in ("k_cache", "v_cache"):
            empty = torch.zeros(1, self.first_slot + shape.slots, shape.kv_heads, width, dtype=shape.dtype)
            self.register_buffer(name, empty, persistent=False)
        if self.window_slots:
            self.register_buffer("masking_keys", masking_keys(shape.head_dim, shape.dtype), persistent=False)
            self.register_buffer("seeing_queries", seeing_queries(shape.head_dim, shape.dtype), persistent=False)
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
            additive = torch.zeros_like(seen[0, 0], dtype=torch.float32).masked_fill(~seen[0, 0], float("-inf"))
            return Rows(0, slots[None], additive, mask)
        start: Any = input_pos[0].item()  # in a trace a symbol
        torch._check(start >= 0)
        torch._check(start + input_pos.shape[0] <= self.shape.slots)
        start = self.first_slot + start
        if self.shape.sinks:
            return Rows(start, slots_after_the_sink(input_pos)[None], None, mask)
        assert block is None or block.before is None, "a layer without a ring attends from position 0 on"
        alike, length = block is not None and not block.causal, input_pos.shape[0]
        several = not alike and not statically_known_true(length == 1)
        return Rows(start, None, None, mask, alike, several and statically_known_true(length <= self.window_slots))

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
        elif self.window_slots:
            seen = self.seeing_queries[:, : query.shape[1]] if rows.windowed else self.seeing_queries[:, -1:]
            query = F.pad(query, (0, self.columns)) + seen
        out = self._attended(query, rows, scale)
        return out[..., : self.shape.head_dim] if self.columns else out

    def write(self, key: Tensor, value: Tensor, rows: Rows) -> None:
        if self.shape.sinks:
            key, value = after_the_sink(key, self.sink_key), after_the_sink(value, self.sink_value)
        elif self.columns:
            key, value = F.pad(key, (0, self.columns)), F.pad(value, (0, self.columns))
        for new, cache in ((key, self.k_cache), (value, self.v_cache)):
            if rows.slots is None:
                torch.ops.llama.update_cache(new, cache, rows.start)
            else:
                torch.ops.llama.update_cache_with_indices(new, cache, 0, rows.slots)
        if self.window_slots:
            empty = self.masking_keys.expand(-1, -1, self.shape.kv_heads, -1)
            torch.ops.llama.update_cache(empty, self.k_cache, 0)
        if rows.windowed:
            torch.ops.llama.update_cache(key + self.masking_keys[:, : key.shape[1]], self.k_cache, 0)
            torch.ops.llama.update_cache(value, self.v_cache, 0)

    def _attended(self, query: Tensor, rows: Rows, scale: float) -> Tensor:
        """``query`` and what it gives: [1, T, heads, width of the caches]."""
        caches = self.k_cache, self.v_cache
        together = heads_together(query.shape[2], self.shape.kv_heads)
        length = query.shape[1]
        alike = rows.alike or (isinstance(length, int) and length == 1)
        if not rows.windowed and (together == 1 or (rows.additive is None and not alike)):
            causal = rows.additive is None and not rows.alike
            return torch.ops.llama.custom_sdpa(query, *caches, rows.start, rows.additive, 0.0, causal, scale)
        if rows.additive is None:  # no mask: each row attends to as many keys as ``start`` and all rows are
            keys = rows.start if rows.windowed else rows.start + length
            start, mask = keys - length * together, None
        else:
            start, mask = 0, repeated_rows(rows.additive, together)
        stacked = heads_as_rows(query, together)
        return rows_as_heads(torch.ops.llama.custom_sdpa(stacked, *caches, start, mask, 0.0, False, scale), together)


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
