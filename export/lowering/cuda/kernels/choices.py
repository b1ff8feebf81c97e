"""The common part of the kernels of experts (``int4_experts.py``, ``int8_experts.py``): it assigns rows to programs.

A program computes outputs of one expert for all rows of a window at once: the tensor cores multiply 8 or 16 rows in any
case, and the products of rows that did not choose the expert are not stored. There is a program for each choice of each
row; it ends at once if an earlier choice is of the same expert. So each chosen expert's weights are read once.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from eagle3.export.lowering.cuda.kernels.small_m import ROWS
from eagle3.export.lowering.cuda.kernels.sums import row_tiles


@triton.jit
def choices_of(expert, chosen, at, here, CHOICES):
    # experts [BLOCK_M, BLOCK_T] and their numbers among all choices: the first of ``expert``, and each row's, or -1.
    # What is loaded comes from the caller: PyTorch's analysis would take a pointer given here for written.
    own = here & (chosen == expert)
    return tl.min(tl.where(own, at, CHOICES)), tl.max(tl.where(own, at, -1), 1)


def launch(x: Tensor, chosen: Tensor, outputs: int, run: Callable[[Any, dict[str, Any], Tensor], None]) -> Tensor:
    """Return bfloat16 [M * k, outputs] with a row for each choice in ``chosen`` [M, k]. ``run(tiles of rows, constants,
    out)`` writes it, and is called once for each size of row tiles that is needed.

    ``x`` has a row for each row of ``chosen``, or one for each choice. Raises ValueError for any other shape or dtype
    of ``x``, and for more rows than a tile has.
    """
    m, top_k = chosen.shape
    if x.shape[0] not in (m, m * top_k):
        raise ValueError(f"x has {x.shape[0]} rows; expected {m} (one a token) or {m * top_k} (one a chosen expert)")
    if x.dtype != torch.bfloat16:
        raise ValueError(f"x is {x.dtype}: the kernel takes torch.bfloat16")
    if not statically_known_true(m <= ROWS[-1]):
        raise ValueError(f"{m} rows of choices: the kernel takes {ROWS[-1]}")
    each = 1 if statically_known_true(x.shape[0] == m * top_k) else top_k
    out = x.new_empty(m * top_k, outputs)
    for rows, count in row_tiles(m, ROWS):
        constants = {"TOP_K": top_k, "EACH": each, "BLOCK_M": rows, "BLOCK_T": triton.next_power_of_2(top_k)}
        run(count, constants, out)
    return out
