"""Linear layers of many rows over INT4 weights in Triton; each weight is decoded while it is multiplied.

The weights have the layout of ``int4``. Each weight is decoded to (q - z) * s in float32 and then rounded to bfloat16,
as in a matrix that is dequantized first. But no such matrix is written to memory and read again, which for a linear of
5376 x 21504 (Gemma 4 31B's ``down_proj``) would be 231 MB each way, beside 66.8 MB of codes, scales and zero points.

The bits of a code become a float32 without a conversion instruction: in place in a word they are a denormal number, and
the multiplication that scales it also subtracts the zero point. Scales and zero points of a block reach the lanes that
need them through shared memory together. The kernel takes 6.9 to 7.1 instructions per weight for 64 rows, counted in
the machine code for sm_80 to sm_120, and 6.5 for 128 rows with ``wgmma``.

Up to 32 rows use the small-M kernel in tiles of 16, which takes 3.9 to 4.0 instructions per weight. By its issue slots,
that takes for 9 to 16 rows about half the time of a tile of 64 rows, and for 17 to 32 rows the same time. On a 4090 or
a 5090 the shares are three quarters and one half, since there the tensor cores limit a tile of 64 rows. These estimates
were not checked by timing.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton
from torch.nn import functional as F

from eagle3.export.lowering.cuda.kernels.int4.tiles.kernel import (
    BLOCK,
    as_most,
    dequantized,
    int4_group,
    int4_small_m_kernel,
    place_of_tile,
    small_m_run,
)
from eagle3.export.lowering.cuda.kernels.large_m import (
    PROGRAM,
    finish,
    halves,
    launch,
    never,
    plain_rows,
    rows_of_program,
)
from eagle3.export.lowering.cuda.kernels.small_m import check_contiguous


@triton.jit
def terms_of(code, step):
    # uint16 [128, 2], uint32 [128] -> -z and s as float32 in the halves of 64 bits [128, 1], by 2^-25 and 2^25, twice
    scale_step = (step & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    zero_step = (step >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    s = (code & 0xFF).to(tl.float32) * (scale_step * 33554432.0)
    z = (code >> 8).to(tl.float32) * (zero_step * (-1.0 / 33554432.0))
    both = (z.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | s.to(tl.uint32, bitcast=True)
    return tl.split(tl.reshape(both, (128, 1, 2)))


@triton.jit
def decoded(words, terms, shift, mask, power):
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
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, DIVIDED: tl.constexpr, ROWS: tl.constexpr,
    PLAIN_ROWS: tl.constexpr,
):  # fmt: skip
    m0 = tl.program_id(0) * BLOCK_M
    if BLOCK_M == ROWS:
        _tile_of_rows(
            X, Q0, Q1, Q2, CODES, STEPS, ARRIVED, PARTS, OUT, M, m0, 0, 1, N0, N1, N2, K, G, ROWS, BLOCK_N, BLOCK_K,
            STAGES, DIVIDED,
        )  # fmt: skip
    else:
        for own in tl.range((tl.minimum(BLOCK_M, M - m0) + ROWS - 1) // ROWS, num_stages=1):
            _tile_of_rows(
                X, Q0, Q1, Q2, CODES, STEPS, ARRIVED, PARTS, OUT, M, m0 + own * ROWS, own, BLOCK_M // ROWS, N0, N1, N2,
                K, G, ROWS, BLOCK_N, BLOCK_K, STAGES, DIVIDED,
            )  # fmt: skip


@triton.jit
def _tile_of_rows(
    X, Q0, Q1, Q2, CODES, STEPS, ARRIVED, PARTS, OUT, M, m0, own, OF: tl.constexpr,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, K: tl.constexpr, G: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, DIVIDED: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = K // 256
    GROUPS: tl.constexpr = 256 // G
    parts = tl.num_programs(2)
    first = tl.program_id(2) * BLOCKS // parts * (256 // BLOCK_K)
    last = (tl.program_id(2) + 1) * BLOCKS // parts * (256 // BLOCK_K)
    if BLOCK_M == 128:  # ptxas would wait for each wgmma if a path led past the loop
        tl.assume(first < last)
    tile = tl.program_id(1)
    CODES = CODES.to(tl.pointer_type(tl.uint16), bitcast=True) + tile.to(tl.int64) * (BLOCKS * GROUPS * 128)
    STEPS = STEPS.to(tl.pointer_type(tl.uint32), bitcast=True) + tile.to(tl.int64) * (BLOCKS * 128)
    which, n0, outputs, before = place_of_tile(tile, N0, N1, N2, BLOCK_N)
    Q = tl.where(which == 2, Q2, tl.where(which == 1, Q1, Q0))
    n = tl.arange(0, 128)
    m = tl.arange(0, BLOCK_M)
    # Offsets of 32 bits within the tile, from pointers of 64; rows and outputs past the end read the last one.
    X += m0.to(tl.int64) * K
    WORDS = Q.to(tl.pointer_type(tl.uint32), bitcast=True) + n0.to(tl.int64) * (K // 8)  # 8 codes each
    x_at = tl.minimum(m, M - 1 - m0)[:, None] * K + tl.arange(0, 32)[None, :]
    words_at = tl.minimum(n, outputs - 1 - n0)[:, None] * (K // 8) + tl.arange(0, 8)[None, :]

    byte, odd = tl.arange(0, 4), tl.arange(0, 2)
    nowhere = tl.minimum(outputs - 1 - n0, 0)
    shift = never(WORDS, byte, nowhere, (8 * byte).to(tl.uint32))
    mask = never(WORDS, odd, nowhere, (0xF + 0xE1 * odd).to(tl.uint32))
    power = never(WORDS, odd, nowhere, ((127 + 124 - 4 * odd) << 23).to(tl.uint32)).to(tl.float32, bitcast=True)
    acc = tl.full((128, BLOCK_M), 0, tl.float32)
    # Of both halves of a block in the same lanes, steps twice: what they make goes through shared memory at once.
    half = (32 * tl.arange(0, 2))[None, :]
    code = tl.load(CODES + (first * BLOCK_K + half) // G * 128 + n[:, None])
    step = tl.load(STEPS + first * BLOCK_K // 256 * 128 + 0 * half + n[:, None])
    for block in tl.range(first, last, num_stages=STAGES):
        k = block * BLOCK_K
        words = tl.load(WORDS + k // 8 + words_at)
        x0, x1 = tl.load(X + k + x_at), tl.load(X + k + 32 + x_at)
        after = tl.minimum(k + BLOCK_K, K - BLOCK_K)
        code_after = tl.load(CODES + (after + half) // G * 128 + n[:, None])
        step_after = tl.load(STEPS + after // 256 * 128 + 0 * half + n[:, None])
        terms0, terms1 = terms_of(code, step)
        words0, words1 = halves(words, 128, 4)
        acc = tl.dot(decoded(words0, terms0, shift, mask, power), tl.trans(x0), acc)
        acc = tl.dot(decoded(words1, terms1, shift, mask, power), tl.trans(x1), acc)
        code, step = code_after, step_after

    there, n = n0 + n < outputs, before + n0 + n
    finish(OUT, PARTS, ARRIVED, acc, M, m0 + m, n, there, N0 + N1 + N2, BLOCK_M, DIVIDED, own, OF)


def _launch_matmul(
    kernel: Any, few: Any, x: Tensor, qdata: Sequence[Tensor], codes: Tensor, steps: Tensor, arrived: Tensor,
    count: Any = None,
) -> Tensor:  # fmt: skip
    """Launch the kernel, or ``few``, the small-M kernel, for up to 32 rows. ``count`` is the number of programs along
    K; None means ``parts_of_k``."""
    group = int4_group(x, qdata, codes, steps)
    check_contiguous(*qdata, codes, steps)
    k = x.shape[1]
    weights, (n0, n1, n2) = as_most(qdata)
    # Inductor would give each of the two kernels a copy of x. A strided view stays one tensor. With unchanged sizes,
    # Inductor would call a function for it that some runtimes lack.
    x = x.contiguous().as_strided((*x.shape, 1), (k, 1, 1))

    rows = rows_of_program()

    def run(programs: tuple, out: Tensor, parts: Tensor, divided: bool) -> None:
        kernel[programs](
            x, *weights, codes, steps, arrived, parts, out, x.shape[0], N0=n0, N1=n1, N2=n2, K=k, G=group,
            DIVIDED=divided, ROWS=rows, PLAIN_ROWS=plain_rows(), **PROGRAM | {"BLOCK_M": rows},
        )  # fmt: skip

    short = small_m_run(few, x, qdata, codes, steps, arrived, group)
    return launch(x, n0 + n1 + n2, codes.shape[0], k // BLOCK, arrived, run, count, short, rows)


@triton_op("eagle3::int4_matmul", mutates_args={})
def int4_matmul(x: Tensor, qdata: Sequence[Tensor], codes: Tensor, steps: Tensor, arrived: Tensor) -> Tensor:
    """Compute ``x @ w.T`` with ``w = (q - zero) * scale`` in float32, rounded to bfloat16. The results of several
    weights lie side by side in the last dimension.

    On CUDA this is the kernel of this module, or that of ``int4_small_m`` for up to 32 rows; on the host it multiplies
    the dequantized weights. It is one node of an exported program and one launch. The arguments are those of
    ``int4_small_m``. There are two differences beyond 32 rows: weights are rounded, and a row's bits depend on the
    number of rows, which decides how K is divided.

    Raises:
        ValueError: shapes that do not agree; on CUDA, another dtype of ``x``, or weights that are not contiguous
    """
    return _launch_matmul(
        wrap_triton(_int4_matmul_kernel), wrap_triton(int4_small_m_kernel), x, qdata, codes, steps, arrived
    )


@int4_matmul.register_kernel("cpu")
def matmul_reference(
    x: Tensor, qdata: Sequence[Tensor], codes: Tensor, steps: Tensor, arrived: Tensor | None = None
) -> Tensor:
    """``int4_matmul`` in plain PyTorch, any floating dtype of ``x``."""
    int4_group(x, qdata, codes, steps)
    weights = [w.bfloat16().to(x.dtype) for w in dequantized(qdata, codes, steps)]
    return torch.cat([F.linear(x, w) for w in weights], 1)
