"""Linear layers of many rows over INT4 weights that are decoded where they are multiplied, in Triton.

The weights are ``int4``'s, in its layout. Each is decoded to (q - z) * s in float32 and rounded to bfloat16 once, as a
matrix that is dequantized first would be; but no such matrix is written to memory and read again, which for a linear of
5376 x 21504 (Gemma 4 31B's ``down_proj``) would be 231 MB each way, beside 66.8 MB of codes, scales and zero points.

A program takes 64 rows and 128 outputs, 32 of K at a time. Each of its 4 warps has 32 outputs, so that every weight of
a tile is decoded once: by the lane that multiplies it, in registers, as the operand of a matrix instruction. The bits
of a code make a float32 without a conversion: where they lie in a word they are a number too small to be normal, and
the multiplication that brings it to size also subtracts the zero point.

Tiles of rows that read the same weights start together, so that L2 serves all but one. Where the tiles would leave half
of a GPU idle, programs share K; what they add takes the memory of ``SLOTS`` tiles at most, and
the last to arrive adds it in the order of K.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.library import triton_op, wrap_triton
from torch.nn import functional as F

from eagle3.export.lowering.cuda.kernels.int4 import BLOCK, TILE, _as_most, _group, _place, dequantized
from eagle3.export.lowering.cuda.kernels.small_m import _check_contiguous
from eagle3.export.lowering.cuda.kernels.sums import arrive

ROWS, BLOCK_K = 64, 64
"""Of a tile of x: with 128 rows the sums would leave too few registers."""
STAGES = 4
"""Blocks of K in flight in shared memory, and one."""
WARPS = 4
SLOTS = 264
"""Programs that run at a time, two on each of 132 SMs (H100, H200): fewer tiles are divided along K."""
MOST_PARTS = 8
"""Of K."""


@triton.jit
def _never(pointer, at, nowhere, value):
    # The compiler takes loads to the lanes that need them, but not constants that differ by element.
    return tl.load(pointer + at, mask=at < nowhere, other=value)


@triton.jit
def _terms(code, step):
    # uint16 [128], uint32 [128] -> -z and s as float32 in the halves of 64 bits [128, 1], by 2^-25 and 2^25
    scale_step = (step & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    zero_step = (step >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    s = (code & 0xFF).to(tl.float32) * (scale_step * 33554432.0)
    z = (code >> 8).to(tl.float32) * (zero_step * (-1.0 / 33554432.0))
    return ((z.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | s.to(tl.uint32, bitcast=True))[:, None]


@triton.jit
def _decoded(words, terms, shift, mask, power):
    # uint32 [128, 4], uint64 [128, 1] -> bf16 [128, 32]
    codes = (words[:, :, None] >> shift[None, None, :])[:, :, :, None] & mask[None, None, None, :]
    z = tl.broadcast_to((terms >> 32).to(tl.uint32).to(tl.float32, bitcast=True)[:, :, None, None], (128, 4, 4, 2))
    s = tl.broadcast_to(terms.to(tl.uint32).to(tl.float32, bitcast=True)[:, :, None, None], (128, 4, 4, 2))
    power = tl.broadcast_to(power[None, None, None, :], (128, 4, 4, 2))
    # (q * 2^-149) * 2^124 - z * 2^-25, rounded as q - z is; of the upper code of a byte 2^4 less
    w = tl.fma(codes.to(tl.float32, bitcast=True), power, z) * s
    return tl.reshape(w.to(tl.bfloat16), (128, 32))


@triton.jit
def _int4_matmul_kernel(
    X, Q0, Q1, Q2, CODES, STEPS, ARRIVED, PARTS, OUT, M,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, K: tl.constexpr, G: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, DIVIDED: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = K // 256
    GROUPS: tl.constexpr = 256 // G
    parts = tl.num_programs(2)
    first = tl.program_id(2) * BLOCKS // parts * (256 // BLOCK_K)
    last = (tl.program_id(2) + 1) * BLOCKS // parts * (256 // BLOCK_K)
    m0 = tl.program_id(0) * BLOCK_M
    tile = tl.program_id(1)
    CODES = CODES.to(tl.pointer_type(tl.uint16), bitcast=True) + tile.to(tl.int64) * (BLOCKS * GROUPS * 128)
    STEPS = STEPS.to(tl.pointer_type(tl.uint32), bitcast=True) + tile.to(tl.int64) * (BLOCKS * 128)
    which, n0, outputs, before = _place(tile, N0, N1, N2, BLOCK_N)
    Q = tl.where(which == 2, Q2, tl.where(which == 1, Q1, Q0))
    n = tl.arange(0, 128)
    m = tl.arange(0, BLOCK_M)
    # Offsets of 32 bits within the tile, from pointers of 64; rows and outputs past the end read the last one.
    X += m0.to(tl.int64) * K
    WORDS = Q.to(tl.pointer_type(tl.uint32), bitcast=True) + n0.to(tl.int64) * (K // 8)  # 8 codes each
    x_at = tl.minimum(m, M - 1 - m0)[:, None] * K + tl.arange(0, 32)[None, :]
    words_at = tl.minimum(n, outputs - 1 - n0)[:, None] * (K // 8) + tl.arange(0, 4)[None, :]

    byte, odd = tl.arange(0, 4), tl.arange(0, 2)
    nowhere = tl.minimum(outputs - 1 - n0, 0)
    shift = _never(WORDS, byte, nowhere, (8 * byte).to(tl.uint32))
    mask = _never(WORDS, odd, nowhere, (0xF + 0xE1 * odd).to(tl.uint32))
    power = _never(WORDS, odd, nowhere, ((127 + 124 - 4 * odd) << 23).to(tl.uint32)).to(tl.float32, bitcast=True)
    acc = tl.full((128, BLOCK_M), 0, tl.float32)
    code0 = tl.load(CODES + first * BLOCK_K // G * 128 + n)
    code1 = tl.load(CODES + (first * BLOCK_K + 32) // G * 128 + n)
    step = tl.load(STEPS + first * BLOCK_K // 256 * 128 + n)
    for block in tl.range(first, last, num_stages=STAGES):
        k = block * BLOCK_K
        words0, words1 = tl.load(WORDS + k // 8 + words_at), tl.load(WORDS + k // 8 + 4 + words_at)
        x0, x1 = tl.load(X + k + x_at), tl.load(X + k + 32 + x_at)
        after = tl.minimum(k + BLOCK_K, K - BLOCK_K)
        code0_after, code1_after = tl.load(CODES + after // G * 128 + n), tl.load(CODES + (after + 32) // G * 128 + n)
        step_after = tl.load(STEPS + after // 256 * 128 + n)
        acc = tl.dot(_decoded(words0, _terms(code0, step), shift, mask, power), tl.trans(x0), acc)
        acc = tl.dot(_decoded(words1, _terms(code1, step), shift, mask, power), tl.trans(x1), acc)
        code0, code1, step = code0_after, code1_after, step_after

    _finish(OUT, PARTS, ARRIVED, acc, M, m0, before + n0 + n, n0 + n < outputs, N0 + N1 + N2, BLOCK_M, DIVIDED)


@triton.jit
def _finish(
    OUT, PARTS, ARRIVED, acc, M, m0, at, there, N: tl.constexpr, BLOCK_M: tl.constexpr, DIVIDED: tl.constexpr
):  # fmt: skip
    # acc: float32 [128, BLOCK_M] of the outputs ``at``, as far as they are there
    n, m = tl.arange(0, 128), tl.arange(0, BLOCK_M)
    parts = tl.num_programs(2)
    if not DIVIDED:  # noqa: SIM114  (of the two conditions one is the compiler's)
        _store(OUT, acc, M, m0 + m, at, there, N)
    elif parts == 1:
        _store(OUT, acc, M, m0 + m, at, there, N)
    else:
        tiles = tl.num_programs(0) * tl.num_programs(1)
        own = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        sums = PARTS + own * (128 * BLOCK_M) + n[:, None] * BLOCK_M + m[None, :]
        tl.store(sums + tl.program_id(2) * tiles * (128 * BLOCK_M), acc)
        if arrive(ARRIVED + own) == parts - 1:
            acc = tl.full((128, BLOCK_M), 0, tl.float32)
            for part in range(parts):
                acc += tl.load(sums + part * tiles * (128 * BLOCK_M), cache_modifier=".cg")
            _store(OUT, acc, M, m0 + m, at, there, N)
            tl.store(ARRIVED + own, 0)


@triton.jit
def _store(OUT, acc, M, m, n, there, N: tl.constexpr):
    at = m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(OUT + at, tl.trans(acc).to(OUT.dtype.element_ty), mask=(m[:, None] < M) & there[None, :])


def _launch_matmul(
    kernel: Any, x: Tensor, qdata: Sequence[Tensor], codes: Tensor, steps: Tensor, arrived: Tensor,
    count: Any = None,
) -> Tensor:  # fmt: skip
    """``count``: programs along K, if not as ``parts_of_k`` says."""
    group = _group(x, qdata, codes, steps)
    _check_contiguous(*qdata, codes, steps)
    k = x.shape[1]
    weights, (n0, n1, n2) = _as_most(qdata)

    def run(programs: tuple, x: Tensor, out: Tensor, parts: Tensor, divided: bool) -> None:
        kernel[programs](
            x, *weights, codes, steps, arrived, parts, out, x.shape[0], N0=n0, N1=n1, N2=n2, K=k, G=group, BLOCK_M=ROWS,
            BLOCK_N=TILE, BLOCK_K=BLOCK_K, STAGES=STAGES, DIVIDED=divided, num_warps=WARPS,
        )  # fmt: skip

    return launch_tiles(x, n0 + n1 + n2, codes.shape[0], arrived, run, count)


def launch_tiles(
    x: Tensor, n: int, tiles: int, arrived: Tensor, run: Callable[[tuple, Tensor, Tensor, Tensor, bool], None],
    count: Any = None,
) -> Tensor:  # fmt: skip
    """bfloat16 [M, n]: what ``run(grid, x, out, parts, divided)`` writes, over tiles of ``ROWS`` rows, ``tiles`` of
    outputs and ``count`` programs along K, if not as ``parts_of_k`` says. Raises ValueError for another dtype of ``x``.
    """
    if x.dtype != torch.bfloat16:
        raise ValueError(f"x is {x.dtype}: the kernel takes torch.bfloat16")
    m, k = x.shape
    row_tiles = (m + ROWS - 1) // ROWS
    count = count or parts_of_k(row_tiles, tiles, k // BLOCK)
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    divided = not statically_known_true(count == 1)
    # Of a size that is a number: for one that depends on the rows AOTInductor's code calls what not every runtime has.
    most = next((rows for rows in (1, 2, 4, 8, 16) if statically_known_true(row_tiles <= rows)), SLOTS)
    sums = min(SLOTS, most * tiles * MOST_PARTS) * ROWS * TILE
    parts = torch.empty(sums, dtype=torch.float32, device=x.device) if divided else arrived
    run((row_tiles, tiles, count), x.contiguous(), out, parts, divided)
    return out


def parts_of_k(row_tiles: Any, tiles: int, blocks: int) -> Any:
    """Programs among which ``blocks`` blocks of K are divided, so that all run at a time; ``row_tiles`` may be
    symbolic."""
    if 2 * tiles > SLOTS:
        return 1
    return torch.sym_max(1, torch.sym_min(SLOTS // (row_tiles * tiles), min(blocks, MOST_PARTS)))


@triton_op("eagle3::int4_matmul", mutates_args={})
def int4_matmul(x: Tensor, qdata: Sequence[Tensor], codes: Tensor, steps: Tensor, arrived: Tensor) -> Tensor:
    """``x @ w.T`` with ``w = (q - zero) * scale`` in float32, rounded to bfloat16; of several w side by side.

    On CUDA the kernel of this module, on the host the dequantized weights. One node of an exported program, one launch.
    The arguments are those of ``int4_small_m``, which it equals in all but two things: weights are rounded, and a row's
    bits depend on the number of rows, by which K is divided.

    Raises:
        ValueError: shapes that do not agree; on CUDA, another dtype of ``x``, or weights that are not contiguous
    """
    return _launch_matmul(wrap_triton(_int4_matmul_kernel), x, qdata, codes, steps, arrived)


@int4_matmul.register_kernel("cpu")
def matmul_reference(
    x: Tensor, qdata: Sequence[Tensor], codes: Tensor, steps: Tensor, arrived: Tensor | None = None
) -> Tensor:
    """``int4_matmul`` in plain PyTorch, any floating dtype of ``x``."""
    _group(x, qdata, codes, steps)
    weights = [w.bfloat16().to(x.dtype) for w in dequantized(qdata, codes, steps)]
    return torch.cat([F.linear(x, w) for w in weights], 1)
