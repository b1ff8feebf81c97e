"""Attention on the CPU for a layer that attends to the whole context.

For a verify window, XNNPACK computes two products and a softmax for each key-value head, over the used slots
(``used_slots.py``). These products read each key once for all rows and all query heads that share it: the keys are the
left operand, which XNNPACK takes without packing. The number of slots is rounded up to a multiple of ``STEP`` and the
additional slots are masked, because XNNPACK plans its memory again for each new number of slots and allocates new pages
for a larger one.

ExecuTorch's ``llama::custom_sdpa`` packs keys again for each query head, and its softmax is not vectorized. It is used
for single rows, where it is as fast; for longer chunks, since its memory does not grow with rows times slots; and for
small caches. It has no softcap: in a layer with one, products compute single rows too, and a chunk is computed over all
slots.

``llama::update_cache`` writes in place. Except where a chunk is computed over all slots, the time of a step does not
depend on ``max_seq_len``. Masked slots must hold finite numbers. They do, since ExecuTorch's runners begin with caches
of zeros.

This file also chooses the attention of every layer on the CPU.
"""

from typing import Any, NamedTuple

import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401  (registers torch.ops.llama)
import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from eagle3.export.lowering.xnnpack.llm_ops_attention import (
    LlmOpsAttention,
    additive_mask,
    first_slot,
    heads_together,
    repeated_rows,
)
from eagle3.export.lowering.xnnpack.used_slots import used_slots
from eagle3.targets.attention import Block, KVCacheShape, attend, causal_mask
from eagle3.targets.sinks import softcapped

FEW_ROWS = 16
"""Windows of up to this many rows are computed by products."""
MOST_HEADS = 16
"""Layers with up to this many key-value heads are computed by products."""
LEAST_BYTES = 2 * 2**20
"""The smallest size of a layer's keys and values, in bytes, for which products are used. Smaller ones stay in the
processor's caches, and products add a fixed cost of 20 to 60 microseconds to a layer."""
STEP = 64
"""The number of used slots is rounded up to a multiple of this. The first call with a new multiple takes some
milliseconds more."""


class Rows(NamedTuple):
    """The positions of a forward's rows. ``start`` is the slot of the first row. ``last`` [T] has the last slot that
    each row attends to. ``single`` is True if there is one row. ``alike`` is True if all rows attend up to the last
    row's slot. ``additive`` [T, used slots] is the mask of rows that may be computed by products; None for other
    rows."""

    start: Any
    last: Tensor
    single: bool
    alike: bool
    additive: Tensor | None


class FullAttention(nn.Module):
    """The attention of a layer that attends to the whole context, with the interface of ``EagerAttention``. The caches
    have the layout [kv_heads, slots, 1, head_dim], so that ExecuTorch's ops treat the heads as a batch."""

    k_cache: Tensor
    v_cache: Tensor

    def __init__(self, shape: KVCacheShape):
        super().__init__()
        self.shape = shape
        self.large = shape.bytes >= LEAST_BYTES and shape.kv_heads <= MOST_HEADS
        slots = whole_steps(shape.slots) if self.large else shape.slots
        for name in ("k_cache", "v_cache"):
            empty = torch.zeros(shape.kv_heads, slots, 1, shape.head_dim, dtype=shape.dtype)
            self.register_buffer(name, empty, persistent=False)

    def rows(self, input_pos: Tensor, block: Block | None = None) -> Rows:
        assert block is None or block.before is None, "a layer without a ring attends from position 0 on"
        start, length = first_slot(input_pos, self.shape.slots), input_pos.shape[0]
        single = statically_known_true(length == 1)
        alike = single or (block is not None and not block.causal)
        last = input_pos[-1:].expand_as(input_pos) if alike else input_pos
        additive = None
        if self.large and statically_known_true(length <= FEW_ROWS):
            additive = additive_mask(causal_mask(last, whole_steps(start + length))[0, 0])
        return Rows(start, last, single, alike, additive)

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
        assert sinks is None, "a layer with sinks has LlmOpsAttention"
        if key is not None and value is not None:
            self.write(key, value, rows)
        if rows.additive is not None and (softcap is not None or not rows.single):
            return self._by_products(query, rows.additive, scale, softcap)
        if softcap is None:
            return self._by_custom_sdpa(query, rows, scale)
        keys, values = (cache.permute(2, 0, 1, 3) for cache in (self.k_cache, self.v_cache))
        mask = causal_mask(rows.last, self.k_cache.shape[1])
        return attend(query.transpose(1, 2), keys, values, mask, scale, softcap).transpose(1, 2)

    def write(self, key: Tensor, value: Tensor, rows: Rows) -> None:
        for new, cache in ((key, self.k_cache), (value, self.v_cache)):
            torch.ops.llama.update_cache(new.permute(2, 1, 0, 3).contiguous(), cache, rows.start)

    def _by_products(self, query: Tensor, mask: Tensor, scale: float, softcap: float | None) -> Tensor:
        """Compute attention by products and return [1, T, heads, head_dim]. The T rows of the G query heads that share
        keys become T * G rows."""
        kv_heads, used = self.shape.kv_heads, mask.shape[1]
        groups = query.shape[2] // kv_heads
        packed = (query[0] * scale).unflatten(1, (kv_heads, groups)).permute(1, 3, 0, 2).flatten(2)
        mask = repeated_rows(mask, groups)[None]
        results = []
        for head in range(kv_heads):
            keys, values = (used_slots(cache, head, used) for cache in (self.k_cache, self.v_cache))
            scores = torch.bmm(keys, packed[head : head + 1]).transpose(1, 2)  # [1, T * G, used]
            weights = torch.softmax(softcapped(scores, softcap) + mask, dim=-1)
            results.append(torch.bmm(weights, values))
        return torch.cat(results).unflatten(1, (-1, groups)).transpose(0, 1).flatten(1, 2)[None]

    def _by_custom_sdpa(self, query: Tensor, rows: Rows, scale: float) -> Tensor:
        """Compute attention by ``custom_sdpa`` and return [1, T, heads, head_dim]. For a single row, the query heads
        that share keys become rows, since the op packs the keys for each head."""
        heads, kv_heads = query.shape[2], self.shape.kv_heads
        together = heads_together(heads, kv_heads) if rows.single else 1
        batch = query[0].unflatten(1, (kv_heads, -1, together)).permute(1, 0, 3, 2, 4).flatten(1, 2)
        start = rows.start + 1 - together  # the op attends to as many keys as ``start`` plus the number of rows
        given = self.k_cache, self.v_cache, start, None, 0.0, not rows.alike, scale
        out = torch.ops.llama.custom_sdpa(batch, *given)  # [kv_heads, T * together, heads of each, head_dim]
        return out.unflatten(1, (-1, together)).permute(1, 0, 3, 2, 4).flatten(1, 3)[None]


def whole_steps(count: int) -> int:
    """Return ``count`` slots rounded up to a multiple of ``STEP``; ``count`` is a symbol in a trace."""
    return (count + STEP - 1) // STEP * STEP


def cpu_attention(shape: KVCacheShape) -> nn.Module:
    """Return the attention module for a layer with such a cache; this function is an ``AttentionFactory``."""
    return (LlmOpsAttention if shape.window or shape.sinks else FullAttention)(shape)
