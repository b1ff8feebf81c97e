"""Attention on the CPU for a layer with a sliding window or with sinks, by ExecuTorch's own LLM ops.

Plain PyTorch attention would lower to an ``index_put`` that copies each cache and a dozen portable kernels over all of
its slots. ``llama::update_cache`` writes in place, and ``llama::custom_sdpa`` reads a ring, or only the slots that have
been written. That op has no softcap: with one, XNNPACK computes products and softmax over all slots.
"""

from typing import NamedTuple

import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401  (registers torch.ops.llama)
import torch
from torch import Tensor, nn

from eagle3.export.lowering.xnnpack.head_rows import (
    additive_mask,
    first_slot,
    heads_as_rows,
    heads_together,
    repeated_rows,
    rows_as_heads,
)
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
