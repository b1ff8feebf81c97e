"""Attention on CUDA: ExecuTorch's ``triton::sdpa`` over the slots written so far, split between blocks for few rows."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle3.export.plan import WINDOW_ROWS
from eagle3.targets.attention import EagerAttention

SPLIT_ROWS = 4  # ExecuTorch's split-K attention takes up to 4 rows of queries


class BoundedAttention(EagerAttention):
    """See ``EagerAttention``. ExecuTorch's ``triton::sdpa`` reads the slots written so far and no others.

    A few rows against a long cache fill a GPU only when the cache is split between thread blocks, which the op does for
    1 to 4 rows, a number that must be static: a verify window is padded to a multiple of 4 and goes in tiles of 4.
    """

    def rows(self, input_pos: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Positions [T], mask [1, 1, T or padded, slots], slots written after this forward (a scalar on the device)."""
        return input_pos, F.pad(mask, (0, 0, 0, padding(input_pos.shape[0]))), input_pos[-1] + 1

    def forward(self, query: Tensor, key: Tensor, value: Tensor, rows: Any, scale: float) -> Tensor:
        input_pos, mask, written = rows
        keys, values = self.kv_cache.update(input_pos, key.transpose(1, 2), value.transpose(1, 2))
        length = query.shape[1]
        # Padded and cut along the rows where they are the first dimension: elsewhere the shape of memory would depend
        # on the length, and the trace would be of one length.
        query = F.pad(query, (0, 0, 0, 0, 0, padding(length))).transpose(1, 2)  # [1, heads, T or padded, head_dim]

        def attend(query: Tensor, mask: Tensor) -> Tensor:
            return torch.ops.triton.sdpa(query, keys, values, mask, 0.0, False, scale, True, written)

        if bounds(length)[1] > WINDOW_ROWS:
            return attend(query, mask).transpose(1, 2)[:, :length]
        tiles = zip(query.split(SPLIT_ROWS, dim=2), mask.split(SPLIT_ROWS, dim=2), strict=True)
        return torch.cat([attend(*tile).transpose(1, 2) for tile in tiles], dim=1)[:, :length]


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
