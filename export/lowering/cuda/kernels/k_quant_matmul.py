"""Linear layers of many rows over GGUF's K-quants in Triton; each weight is decoded while it is multiplied.

The tiles and sums are those of ``int4_matmul``, the layout is that of ``k_quants``. No bfloat16 matrix is written to
memory and read again. Each weight is decoded to llama.cpp's own float32 value, by the lane that multiplies it, and
rounded to bfloat16 once.

As in ``int4_matmul``, the bits of a code make a float32 without a conversion: where they lie in a word they form a
subnormal number, and a multiplication by a power of 2 scales it. q * s is exact in float32 (a code of 6 bits with its
sign, one of 8 or 6, and a step of 11), so the fused q * s - m is rounded once, exactly as llama.cpp's.

A lane takes 2 codes of a word, at positions of its own: one bitwise selection combines low and high bits, and one
rotation of the word moves them to bits 0 and 16. The main loop takes 7.0 (Q4_K) and 8.2 to 8.6 (Q5_K, Q6_K)
instructions per weight for 64 rows, counted in the machine code for sm_80, sm_86, sm_89 and sm_120; no GPU has timed it
yet. A warp's loads of codes and of x are whole sectors of 32 bytes, those of scales are whole lines.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton
from torch.nn import functional as F

from eagle3.export.lowering.cuda.kernels.k_quants import agreeing_bits, checked_parts, dequantized
from eagle3.export.lowering.cuda.kernels.large_m import PROGRAM, TILE, finish, halves, launch, never


@triton.jit
def _terms(code, step, BITS: tl.constexpr):
    # uint16 [2, 128] of two chunks, a step or two of [128] -> two float32 in the halves of 64 bits, [128, 1] of a chunk
    # each: scales of its two groups, or the scale and minus the minimum; scales by 2^25
    if BITS == 6:
        step = step.to(tl.float16, bitcast=True).to(tl.float32)[None, :] * 33554432.0
        code = code.to(tl.int16, bitcast=True)
        low, high = (code << 8 >> 8).to(tl.float32) * step, (code >> 8).to(tl.float32) * step
    else:
        scale_step = (step & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 33554432.0
        least_step = -(step >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        low = (code & 0xFF).to(tl.float32) * scale_step[None, :]
        high = (code >> 8).to(tl.float32) * least_step[None, :]
    both = (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low.to(tl.uint32, bitcast=True)
    terms0, terms1 = tl.split(tl.trans(both))
    return terms0[:, None], terms1[:, None]


@triton.jit
def _decoded(words, high, terms, turn, mask, power, nibbles, second, BITS: tl.constexpr):
    # uint32 [128, 4] twice, the latter turned to each output's bits, uint64 [128, 1] -> bf16 [128, 32]
    codes = tl.broadcast_to(words[:, None, :], (128, 2, 4))  # c, w
    if BITS > 4:
        codes = high[:, None, :] ^ ((high[:, None, :] ^ codes) & nibbles[None, :, None])
    codes, turn = codes[:, :, :, None], turn[None, :, None, :]  # l
    codes = (codes >> turn) | (codes << ((32 - turn) & 31))
    codes = (codes[:, :, :, :, None] & mask[None, None, None, None, :]).to(tl.float32, bitcast=True)  # h
    power = tl.broadcast_to(power[None, None, None, None, :], (128, 2, 4, 2, 2))
    low, high = terms.to(tl.uint32), (terms >> 32).to(tl.uint32)
    if BITS == 6:
        s = (low ^ ((low ^ high) & second[None, :])).to(tl.float32, bitcast=True)
        s = tl.broadcast_to(s[:, :, None, None, None], (128, 2, 4, 2, 2))
        # (q * 2^-149) * 2^124 - 32 * 2^-25
        w = tl.fma(codes, power, tl.full((128, 2, 4, 2, 2), -9.5367431640625e-07, tl.float32)) * s
    else:
        s = tl.broadcast_to(low.to(tl.float32, bitcast=True)[:, :, None, None, None], (128, 2, 4, 2, 2))
        m = tl.broadcast_to(high.to(tl.float32, bitcast=True)[:, :, None, None, None], (128, 2, 4, 2, 2))
        w = tl.fma(codes * power, s, m)
    return tl.reshape(w.to(tl.bfloat16), (128, 32))


@triton.jit
def _k_quant_matmul_kernel(
    X, Q, HIGH, CODES, STEPS, ARRIVED, PARTS, OUT, M,
    N: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, DIVIDED: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = K // 256
    OF_WORD: tl.constexpr = 2 if BITS == 6 else 4
    parts = tl.num_programs(2)
    first = tl.program_id(2) * BLOCKS // parts * (256 // BLOCK_K)
    last = (tl.program_id(2) + 1) * BLOCKS // parts * (256 // BLOCK_K)
    m0 = tl.program_id(0) * BLOCK_M
    tile = tl.program_id(1)
    n0 = tile * BLOCK_N
    n = tl.arange(0, 128)
    m = tl.arange(0, BLOCK_M)
    # Offsets of 32 bits within the tile, from pointers of 64; rows and outputs past the end read the last one.
    X += m0.to(tl.int64) * K
    WORDS = Q.to(tl.pointer_type(tl.uint32), bitcast=True) + n0.to(tl.int64) * (K // 8)  # 8 codes each
    HIGH = HIGH.to(tl.pointer_type(tl.uint32), bitcast=True) + (n0 // OF_WORD).to(tl.int64) * (K // 8)
    CODES = CODES.to(tl.pointer_type(tl.uint16), bitcast=True) + tile.to(tl.int64) * (BLOCKS * 8 * 128)
    STEPS = STEPS.to(tl.pointer_type(tl.uint16 if BITS == 6 else tl.uint32), bitcast=True)
    STEPS += tile.to(tl.int64) * (BLOCKS * 128)
    x_at = tl.minimum(m, M - 1 - m0)[:, None] * K + tl.arange(0, 32)[None, :]
    words_at = tl.minimum(n, N - 1 - n0)[:, None] * (K // 8) + tl.arange(0, 8)[None, :]
    high_row = tl.minimum(tl.arange(0, 128 // OF_WORD), (N - 1 - n0) // OF_WORD)
    high_at = high_row[:, None] * (K // 8) + tl.arange(0, 8)[None, :]
    codes_at = tl.arange(0, 2)[:, None] * 128 + n[None, :]

    odd = tl.arange(0, 2)
    nowhere = tl.minimum(N - 1 - n0, 0)
    place = never(WORDS, n, nowhere, (n % OF_WORD * (BITS - 4)).to(tl.uint32))
    turn = never(WORDS, odd[:, None] + odd[None, :], nowhere, (4 * odd[:, None] + 8 * odd[None, :]).to(tl.uint32))
    nibbles = never(WORDS, odd, nowhere, 0x0F0F0F0F << (4 * odd).to(tl.uint32))
    second = never(WORDS, odd, nowhere, (-odd).to(tl.uint32))
    mask = never(WORDS, odd, nowhere, (((1 << BITS) - 1) * (1 + 0xFFFF * odd)).to(tl.uint32))
    power = never(WORDS, odd, nowhere, ((127 + 124 - 16 * odd) << 23).to(tl.uint32)).to(tl.float32, bitcast=True)
    acc = tl.full((128, BLOCK_M), 0, tl.float32)
    code, step = tl.load(CODES + first * 256 + codes_at), tl.load(STEPS + first * BLOCK_K // 256 * 128 + n)
    for block in tl.range(first, last, num_stages=STAGES):
        words = tl.load(WORDS + block * (BLOCK_K // 8) + words_at)
        high = words
        if BITS > 4:
            high = tl.load(HIGH + block * (BLOCK_K // 8) + high_at)
        x0, x1 = tl.load(X + block * BLOCK_K + x_at), tl.load(X + block * BLOCK_K + 32 + x_at)
        after = tl.minimum(block + 1, K // BLOCK_K - 1)
        code_after, step_after = (
            tl.load(CODES + after * 256 + codes_at),
            tl.load(STEPS + after * BLOCK_K // 256 * 128 + n),
        )
        words0, words1 = halves(words, 128, 4)
        high0, high1 = words0, words1
        if BITS > 4:
            high = tl.broadcast_to(high[:, None, :], (128 // OF_WORD, OF_WORD, 8))
            high0, high1 = halves(tl.reshape(high, (128, 8)) >> place[:, None], 128, 4)
        terms0, terms1 = _terms(code, step, BITS)
        w0 = _decoded(words0, high0, terms0, turn, mask, power, nibbles, second, BITS)
        acc = tl.dot(w0, tl.trans(x0), acc)
        w1 = _decoded(words1, high1, terms1, turn, mask, power, nibbles, second, BITS)
        acc = tl.dot(w1, tl.trans(x1), acc)
        code, step = code_after, step_after
    finish(OUT, PARTS, ARRIVED, acc, M, m0 + m, n0 + n, n0 + n < N, N, BLOCK_M, DIVIDED)


def _launch_k_quant_matmul(
    kernel: Any, x: Tensor, qdata: Tensor, high: Tensor | None, codes: Tensor, steps: Tensor, arrived: Tensor,
    count: Any = None,
) -> Tensor:  # fmt: skip
    """Launch the kernel. ``count`` is the number of programs along K; None means ``parts_of_k``."""
    bits, weight = checked_parts(x, qdata, high, codes, steps)
    n, k = qdata.shape[0], x.shape[1]
    x = x.contiguous()

    def run(programs: tuple, out: Tensor, parts: Tensor, divided: bool) -> None:
        kernel[programs](
            x, *weight, arrived, parts, out, x.shape[0], N=n, K=k, BITS=bits, DIVIDED=divided, **PROGRAM
        )  # fmt: skip

    return launch(x, n, triton.cdiv(n, TILE), k // 256, arrived, run, count)


@triton_op("eagle3::k_quant_matmul", mutates_args={})
def k_quant_matmul(
    x: Tensor, qdata: Tensor, high: Tensor | None, codes: Tensor, steps: Tensor, arrived: Tensor
) -> Tensor:
    """Compute ``x @ w.T`` with ``w = q * scale - minimum`` in float32, rounded to bfloat16.

    On CUDA this is the kernel of this module; on the host it multiplies the dequantized weights. It is one node of an
    exported program and one launch. The arguments are those of ``k_quant_small_m``. There are two differences: weights
    are rounded, and a row's bits depend on the number of rows, which decides how K is divided.

    Raises:
        ValueError: shapes that do not agree; on CUDA, another dtype of ``x``, or weights that are not contiguous
    """
    return _launch_k_quant_matmul(wrap_triton(_k_quant_matmul_kernel), x, qdata, high, codes, steps, arrived)


@k_quant_matmul.register_kernel("cpu")
def matmul_reference(
    x: Tensor, qdata: Tensor, high: Tensor | None, codes: Tensor, steps: Tensor, arrived: Tensor | None = None
) -> Tensor:
    """``k_quant_matmul`` in plain PyTorch, any floating dtype of ``x``."""
    agreeing_bits(x, qdata, high, codes, steps)
    return F.linear(x, dequantized(qdata, high, codes, steps).bfloat16().to(x.dtype))
