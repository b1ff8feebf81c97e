"""The common parts of the kernels for many rows and quantized weights (``int4_matmul``, ``int8_matmul``,
``k_quant_matmul``).

Each weight is decoded while it is multiplied and rounded to bfloat16 once, as in a matrix that is dequantized first.
But no such matrix is written to memory and read again.

A program takes 64 rows and 128 outputs, 64 of K at a time, in two matmuls of 32. Each of its 4 warps has 32 outputs, so
every weight of a tile is decoded once: by the lane that multiplies it, in registers, as the operand of a matrix
instruction. A warp loads whole sectors of weights and rows.

On sm_90 a program of ``int4_matmul`` takes 128 rows: ``wgmma`` reads the rows from shared memory, which leaves the
registers for 128 rows of accumulators, and a decoded weight serves all of them. Code without ``wgmma`` has the same
grid there; it takes these rows 64 at a time, one after the other.

Tiles of rows that read the same weights start together, so L2 serves all but one. If the tiles would leave half of a
GPU idle, several programs divide K. Their partial sums take the memory of at most ``SLOTS`` tiles, and the last program
to arrive adds them in the order of K.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from eagle3.export.lowering.cuda.kernels.small_m import ROWS as SMALL_ROWS
from eagle3.export.lowering.cuda.kernels.sums import Division, arrive, has_wgmma

ROWS, TILE, BLOCK_K = 64, 128, 64
"""The number of rows of a program, of its outputs, and of values of K that it takes at a time. With 128 rows the
accumulators would leave too few registers, unless the matrix instruction is ``wgmma``."""
WGMMA_ROWS = 128
"""The number of rows of a program whose matrix instruction is ``wgmma``."""
STAGES = 4
"""One more than the number of blocks of K in flight in shared memory."""
WARPS = 4
PROGRAM = {"BLOCK_M": ROWS, "BLOCK_N": TILE, "BLOCK_K": BLOCK_K, "STAGES": STAGES, "num_warps": WARPS}
"""These values as arguments of a kernel."""
FEW = 32
"""The most rows for which a small-M kernel, which decodes its weights once for 16 rows, is no slower."""
SLOTS = 264
"""The number of programs that run at a time, two on each of 132 SMs (H100, H200). With fewer tiles, K is divided."""
MOST_PARTS = 8
"""The most programs that K is divided among."""


def rows_of_program() -> int:
    """Return the number of rows of a program on the GPU that ``sums.made_for`` names."""
    return WGMMA_ROWS if has_wgmma() else ROWS


def plain_rows() -> int:
    """Return the number of those rows that code without ``wgmma`` takes at a time, or 0 if no code has ``wgmma``."""
    return ROWS if has_wgmma() else 0


@triton.jit
def never(pointer, at, nowhere, value):
    # The compiler takes loads to the lanes that need them, but not constants that differ by element.
    return tl.load(pointer + at, mask=at < nowhere, other=value)


@triton.jit
def halves(block, ROWS: tl.constexpr, K: tl.constexpr):
    # [ROWS, 2 * K] -> [ROWS, K] of its first and its second half of K
    return tl.split(tl.permute(tl.reshape(block, (ROWS, 2, K)), (0, 2, 1)))


@triton.jit
def finish(
    OUT, PARTS, ARRIVED, acc, M, m, n, there, N: tl.constexpr, BLOCK_M: tl.constexpr, DIVIDED: tl.constexpr,
    own=0, OF: tl.constexpr = 1,
):  # fmt: skip
    # acc: float32 [128, BLOCK_M], of the outputs n and the rows m of this program's tile, as far as they are there. It
    # is the tile ``own`` of the OF tiles of rows that the program takes one after the other.
    parts = tl.num_programs(2)
    if not DIVIDED:  # noqa: SIM114  (of the two conditions one is the compiler's)
        _store(OUT, acc, M, m, n, there, N)
    elif parts == 1:
        _store(OUT, acc, M, m, n, there, N)
    else:
        tiles = tl.num_programs(0) * OF * tl.num_programs(1)
        at = tl.program_id(1) * (tl.num_programs(0) * OF) + tl.program_id(0) * OF + own
        sums = PARTS + at * (128 * BLOCK_M) + tl.arange(0, 128)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        tl.store(sums + tl.program_id(2) * tiles * (128 * BLOCK_M), acc)
        if arrive(ARRIVED + at) == parts - 1:
            acc = tl.full((128, BLOCK_M), 0, tl.float32)
            for part in range(parts):
                acc += tl.load(sums + part * tiles * (128 * BLOCK_M), cache_modifier=".cg")
            _store(OUT, acc, M, m, n, there, N)
            tl.store(ARRIVED + at, 0)


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
    few: tuple[Division, Callable[[tuple, int, Tensor, Tensor], None]] | None = None,
    rows: int = ROWS,
) -> Tensor:
    """Return bfloat16 [M, N], which ``run(grid, out, parts, divided)`` writes.

    The grid is tiles of ``rows`` rows, ``tiles`` of outputs, and ``count`` programs along K (None: ``parts_of_k`` for
    ``blocks``). ``parts`` is float32 memory for the partial sums, or ``arrived`` if K is not divided. ``few`` is the
    division and the ``run`` of the small-M kernel (see ``sums.launch``), which takes up to ``FEW`` rows instead. If the
    number of rows is known only at run time, the grid of the other kernel then has 0 programs. Raises ValueError for
    another dtype of ``x``.
    """
    if x.dtype != torch.bfloat16:
        raise ValueError(f"x is {x.dtype}: the kernel takes torch.bfloat16")
    m = x.shape[0]
    row_tiles = (m + rows - 1) // rows
    count = count or parts_of_k(row_tiles, tiles, blocks)
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    divided = not statically_known_true(count == 1)
    # The size is constant: for a size that depends on the rows, AOTInductor's code calls a function that some runtimes
    # lack.
    most = next((count for count in (1, 2, 4, 8, 16) if statically_known_true(row_tiles <= count)), SLOTS)
    room = min(SLOTS, most * tiles * MOST_PARTS) * rows * TILE if divided else 0
    fits = 0
    if few is not None:
        division, run_few = few
        fits = 1 // ((m + FEW - 1) // FEW)
        room = max(room, division.parts * FEW * n if division.parts > 1 else 0)
    parts = torch.empty(room, dtype=torch.float32, device=x.device) if room else arrived
    if not statically_known_true(fits == 0):
        small = SMALL_ROWS[-1]
        run_few((fits * ((m + small - 1) // small), *division.programs(tiles)), small, out, parts)
    if not statically_known_true(fits == 1):
        run(((1 - fits) * row_tiles, tiles, count), out, parts, divided)
    return out


def parts_of_k(row_tiles: Any, tiles: int, blocks: int) -> Any:
    """Return the number of programs that divide ``blocks`` blocks of K, so that all run at the same time. ``row_tiles``
    may be symbolic."""
    if 2 * tiles > SLOTS:
        return 1
    return torch.sym_max(1, torch.sym_min(SLOTS // (row_tiles * tiles), min(blocks, MOST_PARTS)))
