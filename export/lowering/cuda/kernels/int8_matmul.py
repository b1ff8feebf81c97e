"""Linear layers of many rows over INT8 weights in Triton; each weight is decoded while it is multiplied.

The weights are torchao's ``IntxUnpackedToInt8Tensor``. With one scale per row, the operand is q - z, which bfloat16
holds exactly, and the sum is multiplied by the scale. With groups, the operand is (q - z) * s in float32, rounded to
bfloat16 once. A code's bits with the sign bit flipped become a float32 without a conversion instruction, as in
``int4_matmul``; the upper code of a pair is 2^8 times its value. For 64 rows the kernel takes 5.2 to 5.4 instructions
per weight with one scale per row and 7.2 to 7.5 with groups of 32, counted in the machine code for sm_80 to sm_120.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton
from torch.nn import functional as F

from eagle3.export.lowering.cuda.kernels.large_m import PROGRAM, TILE, finish, halves, launch, never
from eagle3.export.lowering.cuda.kernels.small_m import checked_int8_group, int8_dequantized, int8_group


@triton.jit
def _terms(scale, zero):
    # bf16, int8 [128, R] -> -(128 + z) by 2^-25 and s by 2^25 as bf16, which holds both, in the halves of uint32
    s = (scale.to(tl.float32) * 33554432.0).to(tl.uint32, bitcast=True)
    z = ((zero.to(tl.float32) + 128.0) * (-1.0 / 33554432.0)).to(tl.uint32, bitcast=True)
    return s | (z >> 16)


@triton.jit
def _on_pairs(terms, R: tl.constexpr):
    # [128, R] -> [128, 16, 2]
    terms = tl.reshape(tl.broadcast_to(terms[:, :, None], (128, R, 16 // R)), (128, 16))
    return tl.broadcast_to(terms[:, :, None], (128, 16, 2))


@triton.jit
def _decoded(pairs, z, mask, sign, power):
    # uint16 [128, 16], float32 [128, 16, 2] -> float32 [128, 16, 2]: (q + 128) * 2^-149 to q - z by 2^-25
    codes = (pairs.to(tl.uint32)[:, :, None] & mask[None, None, :]) ^ sign[None, None, :]
    return tl.fma(codes.to(tl.float32, bitcast=True), tl.broadcast_to(power[None, None, :], (128, 16, 2)), z)


@triton.jit
def _scaled(pairs, terms, mask, sign, power, R: tl.constexpr):
    # uint16 [128, 16], uint32 [128, R] -> bf16 [128, 32]
    z = _on_pairs((terms << 16).to(tl.float32, bitcast=True), R)
    s = _on_pairs((terms & 0xFFFF0000).to(tl.float32, bitcast=True), R)
    return tl.reshape((_decoded(pairs, z, mask, sign, power) * s).to(tl.bfloat16), (128, 32))


@triton.jit
def _int8_matmul_kernel(
    X, Q, SCALE, ZERO, ARRIVED, PARTS, OUT, M,
    N: tl.constexpr, K: tl.constexpr, G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, DIVIDED: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    GROUPS: tl.constexpr = K // G
    RUNS: tl.constexpr = 2 if G % 32 == 0 else 4  # of a block, each in one group
    parts = tl.num_programs(2)
    first = tl.program_id(2) * BLOCKS // parts
    last = (tl.program_id(2) + 1) * BLOCKS // parts
    m0, n0 = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    n = tl.arange(0, 128)
    m = tl.arange(0, BLOCK_M)
    pair, k = tl.arange(0, 32), tl.arange(0, 32)
    # Offsets of 32 bits within the tile, from pointers of 64; rows and outputs past the end read the last one.
    X += m0.to(tl.int64) * K
    PAIRS = Q.to(tl.pointer_type(tl.uint16), bitcast=True) + n0.to(tl.int64) * (K // 2)
    row = tl.minimum(n, N - 1 - n0)
    x_at = tl.minimum(m, M - 1 - m0)[:, None] * K + k[None, :]
    pairs_at = row[:, None] * (K // 2) + pair[None, :]
    SCALE += n0.to(tl.int64) * GROUPS
    ZERO += n0.to(tl.int64) * GROUPS

    # Of the two codes of a pair; such that the compiler cannot see them: as immediates they would take instructions of
    # their own.
    odd, nowhere = tl.arange(0, 2), n0 - N
    WORDS = Q.to(tl.pointer_type(tl.uint32), bitcast=True)
    mask = never(WORDS, odd, nowhere, (0xFF + 0xFE01 * odd).to(tl.uint32))
    sign = never(WORDS, odd, nowhere, (0x80 + 0x7F80 * odd).to(tl.uint32))
    power = never(WORDS, odd, nowhere, ((127 + 124 - 8 * odd) << 23).to(tl.uint32)).to(tl.float32, bitcast=True)
    acc = tl.full((128, BLOCK_M), 0, tl.float32)
    if GROUPS == 1:
        # Read in a branch: of an operand that comes straight from 8 bits the compiler would choose a layout in which
        # rows of x have to be moved between registers.
        z = tl.full((128,), 0, tl.float32)
        if first < last:
            z = (tl.load(ZERO + row).to(tl.float32) + 128.0) * (-1.0 / 33554432.0)
        z = tl.broadcast_to(z[:, None, None], (128, 16, 2))
    else:
        run = (64 // RUNS * tl.arange(0, RUNS))[None, :]
        row = row[:, None] * GROUPS
        group = tl.minimum((first * BLOCK_K + run) // G, GROUPS - 1)
        scale, zero = tl.load(SCALE + row + group), tl.load(ZERO + row + group)
    for block in tl.range(first, last, num_stages=STAGES):
        at = block * BLOCK_K
        if K % BLOCK_K == 0:
            pairs = tl.load(PAIRS + at // 2 + pairs_at)
            x0, x1 = tl.load(X + at + x_at), tl.load(X + at + 32 + x_at)
        else:
            pairs = tl.load(PAIRS + at // 2 + pairs_at, mask=(at // 2 + pair < K // 2)[None, :], other=0)
            x0 = tl.load(X + at + x_at, mask=(at + k < K)[None, :], other=0)
            x1 = tl.load(X + at + 32 + x_at, mask=(at + 32 + k < K)[None, :], other=0)
        pairs0, pairs1 = halves(pairs, 128, 16)
        if GROUPS == 1:
            w0 = tl.reshape(_decoded(pairs0, z, mask, sign, power).to(tl.bfloat16), (128, 32))
            w1 = tl.reshape(_decoded(pairs1, z, mask, sign, power).to(tl.bfloat16), (128, 32))
            acc = tl.dot(w0, tl.trans(x0), acc)
            acc = tl.dot(w1, tl.trans(x1), acc)
        else:
            group = tl.minimum((at + BLOCK_K + run) // G, GROUPS - 1)
            scale_after, zero_after = tl.load(SCALE + row + group), tl.load(ZERO + row + group)
            terms0, terms1 = halves(_terms(scale, zero), 128, RUNS // 2)
            acc = tl.dot(_scaled(pairs0, terms0, mask, sign, power, RUNS // 2), tl.trans(x0), acc)
            acc = tl.dot(_scaled(pairs1, terms1, mask, sign, power, RUNS // 2), tl.trans(x1), acc)
            scale, zero = scale_after, zero_after
    if GROUPS == 1:
        acc *= (tl.load(SCALE + row).to(tl.float32) * 33554432.0)[:, None]
    finish(OUT, PARTS, ARRIVED, acc, M, m0 + m, n0 + n, n0 + n < N, N, BLOCK_M, DIVIDED)


def _launch_matmul(
    kernel: Any, x: Tensor, qdata: Tensor, scale: Tensor, zero: Tensor, arrived: Tensor, count: Any = None
) -> Tensor:
    """Launch the kernel. ``count`` is the number of programs along K; None means ``parts_of_k``."""
    group, (n, k) = checked_int8_group(x, qdata, scale, zero), qdata.shape
    x = x.contiguous()

    def run(programs: tuple, out: Tensor, parts: Tensor, divided: bool) -> None:
        kernel[programs](
            x, qdata, scale, zero, arrived, parts, out, x.shape[0], N=n, K=k, G=group, DIVIDED=divided, **PROGRAM
        )  # fmt: skip

    return launch(x, n, triton.cdiv(n, TILE), triton.cdiv(k, 256), arrived, run, count)


@triton_op("eagle3::int8_matmul", mutates_args={})
def int8_matmul(x: Tensor, qdata: Tensor, scale: Tensor, zero: Tensor, arrived: Tensor) -> Tensor:
    """Compute ``x @ w.T`` with ``w = (q - zero) * scale`` in float32, rounded to bfloat16 (on CUDA not rounded if a row
    has one scale).

    On CUDA this is the kernel of this module; on the host it multiplies the dequantized weights. It is one node of an
    exported program and one launch. The arguments are those of ``int8_small_m``. There are two differences: weights are
    rounded, and a row's bits depend on the number of rows, which decides how K is divided.

    Raises:
        ValueError: shapes that do not agree; on CUDA, another dtype of ``x``, a group that is no multiple of 16, or
            weights that are not contiguous
    """
    return _launch_matmul(wrap_triton(_int8_matmul_kernel), x, qdata, scale, zero, arrived)


@int8_matmul.register_kernel("cpu")
def matmul_reference(x: Tensor, qdata: Tensor, scale: Tensor, zero: Tensor, arrived: Tensor | None = None) -> Tensor:
    """``int8_matmul`` in plain PyTorch, any floating dtype of ``x``, any group."""
    int8_group(x, qdata, scale, zero)
    return F.linear(x, int8_dequantized(qdata, scale, zero).bfloat16().to(x.dtype))
