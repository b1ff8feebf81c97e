"""What products of many rows with quantized weights have in common (``int4_matmul``, ``int8_matmul``,
``k_quant_matmul``).

Each weight is decoded where it is multiplied and rounded to bfloat16 once, as a matrix that is dequantized first would
be; but no such matrix is written to memory and read again.

A program takes 64 rows and 128 outputs, 64 of K at a time, in two products of 32. Each of its 4 warps has 32 outputs,
so that every weight of a tile is decoded once: by the lane that multiplies it, in registers, as the operand of a matrix
instruction. What a warp loads of weights and rows are whole sectors.

Tiles of rows that read the same weights start together, so that L2 serves all but one. Where the tiles would leave half
of a GPU idle, programs share K; what they add takes the memory of ``SLOTS`` tiles at most, and
the last to arrive adds it in the order of K.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from eagle3.export.lowering.cuda.kernels.small_m import ROWS as SMALL_ROWS
from eagle3.export.lowering.cuda.kernels.sums import arrive

ROWS, TILE, BLOCK_K = 64, 128, 64
"""Of a program: rows (with 128 the sums would leave too few registers), outputs, and K at a time."""
STAGES = 4
"""Blocks of K in flight in shared memory, and one."""
WARPS = 4
PROGRAM = {"BLOCK_M": ROWS, "BLOCK_N": TILE, "BLOCK_K": BLOCK_K, "STAGES": STAGES, "num_warps": WARPS}
"""As kernels are given them."""
FEW = 32
"""Rows up to which a small-M kernel, whose weights are decoded once for 16, takes no longer."""
SLOTS = 264
"""Programs that run at a time, two on each of 132 SMs (H100, H200): fewer tiles are divided along K."""
MOST_PARTS = 8
"""Of K."""


@triton.jit
def never(pointer, at, nowhere, value):
    # The compiler takes loads to the lanes that need them, but not constants that differ by element.
    return tl.load(pointer + at, mask=at < nowhere, other=value)


@triton.jit
def halves(block, ROWS: tl.constexpr, K: tl.constexpr):
    # [ROWS, 2 * K] -> [ROWS, K] of its first and its second half of K
    return tl.split(tl.permute(tl.reshape(block, (ROWS, 2, K)), (0, 2, 1)))


@triton.jit
def finish(OUT, PARTS, ARRIVED, acc, M, m, n, there, N: tl.constexpr, BLOCK_M: tl.constexpr, DIVIDED: tl.constexpr):
    # acc: float32 [128, BLOCK_M], of the outputs n and the rows m of this program's tile, as far as they are there
    parts = tl.num_programs(2)
    if not DIVIDED:  # noqa: SIM114  (of the two conditions one is the compiler's)
        _store(OUT, acc, M, m, n, there, N)
    elif parts == 1:
        _store(OUT, acc, M, m, n, there, N)
    else:
        tiles = tl.num_programs(0) * tl.num_programs(1)
        own = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        sums = PARTS + own * (128 * BLOCK_M) + tl.arange(0, 128)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        tl.store(sums + tl.program_id(2) * tiles * (128 * BLOCK_M), acc)
        if arrive(ARRIVED + own) == parts - 1:
            acc = tl.full((128, BLOCK_M), 0, tl.float32)
            for part in range(parts):
                acc += tl.load(sums + part * tiles * (128 * BLOCK_M), cache_modifier=".cg")
            _store(OUT, acc, M, m, n, there, N)
            tl.store(ARRIVED + own, 0)


@triton.jit
def _store(OUT, acc, M, m, n, there, N: tl.constexpr):
    at = m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(OUT + at, tl.trans(acc).to(OUT.dtype.element_ty), mask=(m[:, None] < M) & there[None, :])


def launch(
    x: Tensor,
    n: int,
    tiles: int,
    blocks: int,
    arrived: Tensor,
    run: Callable[[tuple, Tensor, Tensor, bool], None],
    count: Any = None,
    few: tuple[int, Callable[[tuple, int, Tensor, Tensor], None]] | None = None,
) -> Tensor:
    """bfloat16 [M, N]: what ``run(grid, out, parts, divided)`` writes.

    The grid is tiles of rows, ``tiles`` of outputs and ``count`` programs along K, if not as ``parts_of_k`` says for
    ``blocks``; ``parts`` is float32, room for what they add, or ``arrived`` where one program has all that it needs.
    ``few``: programs along K, and the ``run`` of the small-M kernel (see ``sums.launch``) that takes up to ``FEW`` rows
    in its stead; where the number of rows is known when it runs alone, the other's grid has 0 programs then.
    Raises ValueError for another dtype of ``x``.
    """
    if x.dtype != torch.bfloat16:
        raise ValueError(f"x is {x.dtype}: the kernel takes torch.bfloat16")
    m = x.shape[0]
    row_tiles = (m + ROWS - 1) // ROWS
    count = count or parts_of_k(row_tiles, tiles, blocks)
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    divided = not statically_known_true(count == 1)
    # Of a size that is a number: for one that depends on the rows AOTInductor's code calls what not every runtime has.
    most = next((rows for rows in (1, 2, 4, 8, 16) if statically_known_true(row_tiles <= rows)), SLOTS)
    room = min(SLOTS, most * tiles * MOST_PARTS) * ROWS * TILE if divided else 0
    fits = 0
    if few is not None:
        few_count, run_few = few
        fits = 1 // ((m + FEW - 1) // FEW)
        room = max(room, few_count * FEW * n if few_count > 1 else 0)
    parts = torch.empty(room, dtype=torch.float32, device=x.device) if room else arrived
    if not statically_known_true(fits == 0):
        rows = SMALL_ROWS[-1]
        run_few((fits * ((m + rows - 1) // rows), tiles, few_count), rows, out, parts)
    if not statically_known_true(fits == 1):
        run(((1 - fits) * row_tiles, tiles, count), out, parts, divided)
    return out


def parts_of_k(row_tiles: Any, tiles: int, blocks: int) -> Any:
    """Programs among which ``blocks`` blocks of K are divided, so that all run at a time; ``row_tiles`` may be
    symbolic."""
    if 2 * tiles > SLOTS:
        return 1
    return torch.sym_max(1, torch.sym_min(SLOTS // (row_tiles * tiles), min(blocks, MOST_PARTS)))
