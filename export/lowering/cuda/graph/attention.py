"""Attention on CUDA: one operator for every kind of layer and every length. It reads only the positions that its rows
attend to."""

import torch
from torch import Tensor

from eagle3.export.lowering.cuda.kernels.attention import attention
from eagle3.export.lowering.cuda.kernels.attention_sums import FEW
from eagle3.export.lowering.cuda.kernels.product import shared_counters
from eagle3.export.lowering.cuda.weights.traced_rows import from_one_row, most_rows
from eagle3.targets.attention import Block, EagerAttention, KVCacheShape


class CudaAttention(EagerAttention):
    """Attention by the CUDA kernel, with the caches of ``EagerAttention``."""

    def __init__(self, shape: KVCacheShape):
        super().__init__(shape)
        self.longest = shape.window or shape.slots

    def rows(self, input_pos: Tensor, block: Block | None = None) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """Return for each row its position, and the first and the last position that it attends to, [T] each."""
        window = self.shape.window
        if block is not None:
            first, last = block.bounds(input_pos)
            return input_pos, first.contiguous(), last.contiguous()  # the kernel reads an entry for each row
        if not window:
            return input_pos, torch.zeros_like(input_pos), input_pos
        if self.shape.chunked:
            return input_pos, input_pos - input_pos % window, input_pos
        return input_pos, (input_pos - window + 1).clamp_min(0), input_pos

    def write(self, key: Tensor, value: Tensor, rows: tuple[Tensor, Tensor, Tensor]) -> None:  # type: ignore[override]
        self.written(rows[0], key, value)

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        rows: tuple[Tensor, Tensor, Tensor],
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        input_pos, first, last = rows
        keys, values, *scales = self.written(input_pos, key, value)
        length = query.shape[1]
        most = most_rows(length)
        few = min(most, FEW) if from_one_row(length) or most <= FEW else 0
        arrived = shared_counters(query)
        given = query, keys, values, first, last, arrived, scale, self.longest, few, softcap or 0.0, sinks
        return attention(*given, *scales)
