"""Linear layers of 1 to 16 rows over GGUF's K-quants (Q4_K, Q5_K, Q6_K) that read each weight byte once, in Triton.

As ``small_m`` does for INT4 and INT8, whose tiles, sums and division of K these are; what differs is the weight. Its
values are llama.cpp's own, to the bit. ExecuTorch's layouts for these files would round scales to bfloat16, encode them
anew and make zero points of the minima, which loses a group of scale 0 altogether.

Arithmetic, for a row x and a group g of K (``q``: codes; ``s``: its scale; ``m``: its minimum)::

    Q4_K, Q5_K  groups of 32, q from 0:    y = sum over g of s * (sum over k of q x)  -  m * sum over k of x
    Q6_K        groups of 16, q from -32:  y = sum over g of s * (sum over k of q x)
    in which    sum over k of q x  =  sum over k of (128 + q) x  -  128 * sum over k of x

s and m are a code of 8 bits by a step, an fp16 per 256 weights. 128 + q comes from the bits of q as in ``int4``. The
main loop takes about 3.4 (Q4_K), 5.0 (Q5_K) and 5.3 (Q6_K) instructions a weight for up to 8 rows and 4.5, 5.9 and 6.4
for up to 16, counted in the machine code for sm_80 and sm_90; no GPU has timed it yet (scripts/bench_small_m.py).

Layout, per chunk of 32 weights, k = 16 c + 4 w + 2 l + h (c, l, h of 0 and 1, w of 0 to 3): the low 4 bits of a code
are bits 4 c + 8 l + 16 h of word w of 4 words; its high bit is bit 4 c + 2 h + l of byte w of 4 bytes, its two are bits
2 c + 4 h + 8 l of halfword w of 4 halfwords. They meet with the codes of one c in bytes; then an AND gives two codes 16
bits apart, a pair of bf16, in the order of x. Half a chunk is a ``tl.dot`` and, in Q6_K, a group.

Bytes a weight: 4, 5 or 6 bits, codes of 8 bits (two per 32, or one per 16), an fp16 step or two per 256: 0.578 (Q4_K),
0.703 (Q5_K), 0.820 (Q6_K). A linear of 5376 x 21504 (Gemma 4 31B's ``down_proj``) in Q6_K is 94.8 MB: 20 us at
4.8 TB/s, whatever the kernel; x, the output and partial sums as in ``small_m``.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from eagle3.export.lowering.cuda.kernels.small_m import (
    ROWS,
    WARPS,
    Blocks,
    _check_contiguous,
    _on_all_rows,
    _ones,
    _operand,
    _sum_of_groups,
    _tile_rows,
)
from eagle3.export.lowering.cuda.kernels.sums import launch, splits, store

CHOICES = dict.fromkeys((4, 5, 6), Blocks(n=64, stages=5))
"""By the bits of a code."""


@triton.jit
def _to_tile(a, b, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    # [8, BLOCK_N] in the order of N -> [8, BLOCK_N, BLOCK_M] in the order of the tile's rows
    both = tl.permute(tl.reshape(tl.join(a, b), (8, 8, BLOCK_N // 8, 2)), (0, 2, 1, 3))
    a, b = tl.split(tl.reshape(both, (8, BLOCK_N, 1, 2)))
    return tl.broadcast_to(a, (8, BLOCK_N, BLOCK_M)), tl.broadcast_to(b, (8, BLOCK_N, BLOCK_M))


@triton.jit
def _half_chunk(words, high, magic, C: tl.constexpr, BITS: tl.constexpr, BLOCK_N: tl.constexpr):
    # uint32 [8, BLOCK_N, 4] -> bf16 [8, BLOCK_N, 16] of 128 + q: the codes of one c, in bytes and then 16 bits apart
    found = (words >> (4 * C)) & 0x0F0F0F0F
    if BITS == 5:  # 4 bits of a byte to 4 bytes
        found |= (((high >> (4 * C)) & 15) * 0x02040810) & 0x10101010
    if BITS == 6:
        found |= ((high << (4 - 2 * C)) & 0x00003030) | ((high << (16 - 2 * C)) & 0x30300000)
    return _operand((found & 0x00FF00FF) | magic, ((found >> 8) & 0x00FF00FF) | magic, BLOCK_N, 4)


@triton.jit
def _k_quant_small_m_kernel(
    X, Q, HIGH, SCALE, SCALE_STEP, MIN, MIN_STEP, ARRIVED, PARTS, OUT, M,
    N: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(2) * (K // BLOCK_K) // SPLITS
    last = (tl.program_id(2) + 1) * (K // BLOCK_K) // SPLITS
    m0 = tl.program_id(0) * BLOCK_M
    n0 = tl.program_id(1) * BLOCK_N
    row = tl.arange(0, BLOCK_N)
    tile_row = _tile_rows(row, BLOCK_N)
    m = m0 + tl.arange(0, BLOCK_M)
    # Offsets of 32 bits within the tile, from pointers of 64; rows past the end read the last one.
    there = tl.minimum(tile_row, N - 1 - n0)[:, None]
    WORDS = Q.to(tl.pointer_type(tl.uint32), bitcast=True) + n0.to(tl.int64) * (K // 8)
    words_at = there * (K // 8) + tl.arange(0, 32)[None, :]
    HIGHS = HIGH.to(tl.pointer_type(tl.uint16), bitcast=True) if BITS == 6 else HIGH
    HIGHS += n0.to(tl.int64) * (K // 8)
    X += m0.to(tl.int64) * K
    x_at = tl.arange(0, BLOCK_M)[:, None] * K + tl.arange(0, BLOCK_K)[None, :]
    # Q6_K's two codes a chunk are read as one of 16 bits.
    CODES = SCALE.to(tl.pointer_type(tl.int16), bitcast=True) if BITS == 6 else SCALE
    CODES += n0.to(tl.int64) * (K // 32)
    MIN += n0.to(tl.int64) * (K // 32)
    SCALE_STEP += n0.to(tl.int64) * (K // BLOCK_K)
    MIN_STEP += n0.to(tl.int64) * (K // BLOCK_K)
    row = tl.minimum(row, N - 1 - n0)
    code_at = row[None, :] * (K // 32) + tl.arange(0, 8)[:, None]
    step_at = row * (K // BLOCK_K)

    # A constant that the compiler cannot see, by a load never made: as an immediate it would take its own instruction.
    nowhere = tl.full((1, 1, 1), 0, tl.int32)
    magic = tl.load(WORDS + nowhere, mask=nowhere + n0 >= N, other=0x43004300)
    ones = _ones(4)
    acc = tl.full((8, BLOCK_N, BLOCK_M), 0, tl.float32)
    # Too narrow for the compiler's pipeline of asynchronous copies: codes and steps are fetched a block ahead here.
    scale, scale_step = tl.load(CODES + first * 8 + code_at), tl.load(SCALE_STEP + first + step_at)
    if BITS < 6:
        least, least_step = tl.load(MIN + first * 8 + code_at), tl.load(MIN_STEP + first + step_at)
    for block in tl.range(first, last, num_stages=STAGES):
        words = tl.load(WORDS + block * 32 + words_at)
        x = tl.load(X + block * BLOCK_K + x_at, mask=m[:, None] < M, other=0)
        words = tl.permute(tl.reshape(words, (BLOCK_N, 8, 4)), (1, 0, 2))
        high = words
        if BITS > 4:
            high = tl.load(HIGHS + block * 32 + words_at)
            high = tl.permute(tl.reshape(high, (BLOCK_N, 8, 4)), (1, 0, 2)).to(tl.uint32)
        after = tl.minimum(block + 1, K // BLOCK_K - 1)
        scale_after, scale_step_after = tl.load(CODES + after * 8 + code_at), tl.load(SCALE_STEP + after + step_at)
        if BITS < 6:
            least_after, least_step_after = tl.load(MIN + after * 8 + code_at), tl.load(MIN_STEP + after + step_at)

        w0 = _half_chunk(words, high, magic, 0, BITS, BLOCK_N)
        w1 = _half_chunk(words, high, magic, 1, BITS, BLOCK_N)
        x0, x1 = tl.split(tl.permute(tl.reshape(x, (BLOCK_M, 8, 2, 16)), (1, 3, 0, 2)))  # [8, 16, BLOCK_M]
        step = tl.broadcast_to(scale_step.to(tl.float32)[None, :], (8, BLOCK_N))
        # fma, so that nothing is left to fuse or not
        if BITS == 6:
            minus = tl.full((8, BLOCK_N, BLOCK_M), -160.0, tl.float32)
            wide = scale.to(tl.int32)
            s0, s1 = _to_tile(
                (wide << 24 >> 24).to(tl.float32) * step, (wide >> 8).to(tl.float32) * step, BLOCK_N, BLOCK_M
            )  # fmt: skip
            sum_x = _on_all_rows(tl.dot(ones, x0), BLOCK_N, BLOCK_M)
            acc = tl.fma(tl.fma(minus, sum_x, tl.dot(w0, x0)), s0, acc)
            sum_x = _on_all_rows(tl.dot(ones, x1), BLOCK_N, BLOCK_M)
            acc = tl.fma(tl.fma(minus, sum_x, tl.dot(w1, x1)), s1, acc)
        else:
            minus = tl.full((8, BLOCK_N, BLOCK_M), -128.0, tl.float32)
            least_step = tl.broadcast_to(least_step.to(tl.float32)[None, :], (8, BLOCK_N))
            s, below = _to_tile(scale.to(tl.float32) * step, -least.to(tl.float32) * least_step, BLOCK_N, BLOCK_M)
            part = tl.dot(w1, x1, tl.dot(w0, x0))
            sum_x = _on_all_rows(tl.dot(ones, x1, tl.dot(ones, x0)), BLOCK_N, BLOCK_M)
            acc = tl.fma(below, sum_x, tl.fma(tl.fma(minus, sum_x, part), s, acc))
            least, least_step = least_after, least_step_after
        scale, scale_step = scale_after, scale_step_after
    n = n0 + tile_row
    store(OUT, PARTS, ARRIVED, _sum_of_groups(acc, BLOCK_N, BLOCK_M), M, m, n, n < N, N, SPLITS)


def code_bits(
    qdata: Tensor, scale: Tensor, scale_step: Tensor, high: Tensor | None, minima: Tensor | None,
    minima_step: Tensor | None,
) -> int:  # fmt: skip
    """4, 5 or 6. Raises ValueError where the shapes make none of the three kinds."""
    n, k = qdata.shape[0], 2 * qdata.shape[1]
    bits = 4 if high is None else 4 + 8 * high.shape[1] // k
    group = 16 if bits == 6 else 32
    expected = {"scale": (n, k // group), "scale_step": (n, k // 256)}
    if bits > 4:
        expected["high"] = (n, k * (bits - 4) // 8)
    if bits < 6:
        expected |= {"minima": (n, k // 32), "minima_step": (n, k // 256)}
    given = {"scale": scale, "scale_step": scale_step, "high": high, "minima": minima, "minima_step": minima_step}
    found = {name: tuple(tensor.shape) for name, tensor in given.items() if tensor is not None}
    if bits not in CHOICES or k % 256 or found != expected:
        raise ValueError(f"qdata is {tuple(qdata.shape)} beside {found}: a weight of {bits} bits has {expected}")
    return bits


def _launch_k_quant(
    kernel: Any, x: Tensor, qdata: Tensor, scale: Tensor, scale_step: Tensor, high: Tensor | None,
    minima: Tensor | None, minima_step: Tensor | None, arrived: Tensor, choice: Blocks | None = None,
) -> Tensor:  # fmt: skip
    bits = _agreeing_bits(x, qdata, scale, scale_step, high, minima, minima_step)
    _check_contiguous(*(part for part in (qdata, scale, scale_step, high, minima, minima_step) if part is not None))
    n, k = qdata.shape[0], x.shape[1]
    choice = choice or CHOICES[bits]
    count = choice.parts or splits(n, k // 256, choice.n)
    x = x.contiguous()
    # A kernel takes tensors alone: what a kind has not is a pointer that it does not follow.
    high = qdata if high is None else high
    minima, minima_step = scale if minima is None else minima, scale_step if minima_step is None else minima_step

    def run(programs: tuple, rows: int, out: Tensor, parts: Tensor) -> None:
        kernel[programs](
            x, qdata, high, scale, scale_step, minima, minima_step, arrived, parts, out, x.shape[0], N=n, K=k,
            BITS=bits, SPLITS=count, BLOCK_N=choice.n, BLOCK_K=256, BLOCK_M=rows, STAGES=choice.stages, num_warps=WARPS,
        )  # fmt: skip

    return launch(x, n, choice.n, triton.cdiv(n, choice.n), count, ROWS, arrived, run)


def _agreeing_bits(x: Tensor, qdata: Tensor, *parts: Tensor | None) -> int:
    bits = code_bits(qdata, *parts)
    if x.shape[1] != 2 * qdata.shape[1]:
        raise ValueError(f"x has K = {x.shape[1]}, qdata {2 * qdata.shape[1]}: they must agree")
    return bits


@triton_op("eagle3::k_quant_small_m", mutates_args={})
def k_quant_small_m(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    scale_step: Tensor,
    high: Tensor | None,
    minima: Tensor | None,
    minima_step: Tensor | None,
    arrived: Tensor,
) -> Tensor:
    """``x @ w.T`` with ``w = q * (scale * scale_step) - minima * minima_step``; the layout is this module's.

    On CUDA the kernel of this module, on the host ``k_quant_reference``. One node of an exported program.

    Args:
        x: bfloat16 [M, K], K a multiple of 256; M may be dynamic
        qdata: uint8 [N, K / 2], the low 4 bits of the codes
        scale: codes, uint8 [N, K / 32]; of Q6_K int8 [N, K / 16]
        scale_step, minima_step: float16 [N, K / 256]
        high: uint8 [N, K / 8] (Q5_K) or [N, K / 4] (Q6_K), the high bits; None for Q4_K
        minima: codes, uint8 [N, K / 32]; None for Q6_K, whose q begins at -32
        arrived: ``sums.counters()``, as they were when it returns

    Returns:
        bfloat16 [M, N]; a row's bits do not depend on the other rows or their number

    Raises:
        ValueError: shapes that do not agree; on CUDA, another dtype of ``x``, weights that are not contiguous, or more
            rows than there are counters for
    """
    kernel = wrap_triton(_k_quant_small_m_kernel)
    return _launch_k_quant(kernel, x, qdata, scale, scale_step, high, minima, minima_step, arrived)


@k_quant_small_m.register_kernel("cpu")
def k_quant_reference(
    x: Tensor,
    qdata: Tensor,
    scale: Tensor,
    scale_step: Tensor,
    high: Tensor | None,
    minima: Tensor | None,
    minima_step: Tensor | None,
    arrived: Tensor | None = None,
) -> Tensor:
    """``k_quant_small_m`` in plain PyTorch: float32 on the dequantized weights, any floating dtype of ``x``."""
    _agreeing_bits(x, qdata, scale, scale_step, high, minima, minima_step)
    w = dequantized_rows(qdata, scale, scale_step, high, minima, minima_step)
    return (x.float() @ w.T).to(x.dtype)


def dequantized_rows(
    qdata: Tensor, scale: Tensor, scale_step: Tensor, high: Tensor | None, minima: Tensor | None,
    minima_step: Tensor | None,
) -> Tensor:  # fmt: skip
    """The weights of a matrix, or of some of its rows: float32 [N, K], as llama.cpp has them."""
    q = unpacked(qdata, high).float()
    n, k = q.shape
    steps = scale_step.float()[..., None]  # [N, K / 256, 1]
    s = scale.float().view(n, k // 256, -1) * steps
    groups = (q - 32 if minima is None else q).view(n, *s.shape[1:], -1)
    w = groups * s[..., None]
    if minima is not None:
        least = minima.float().view(n, k // 256, -1) * minima_step.float()[..., None]
        w = w - least[..., None]
    return w.view(n, k)


def packed(codes: Tensor, bits: int) -> tuple[Tensor, Tensor | None]:
    """``qdata`` and ``high`` of codes: uint8 [N, K] -> uint8 [N, K / 2], and [N, K / 8] or [N, K / 4] beyond 4 bits."""
    n, k = codes.shape
    codes = codes.view(n, k // 32, 2, 4, 2, 2)  # c, w, l, h
    low = (codes & 15).permute(0, 1, 3, 5, 4, 2)  # w, h, l, c
    qdata = (low[..., 0] | low[..., 1] << 4).reshape(n, k // 2)
    if bits == 4:
        return qdata, None
    width = bits - 4
    order = (0, 1, 3, 2, 5, 4) if width == 1 else (0, 1, 3, 4, 5, 2)  # w; c, h, l or w, l; h, c
    fields = (codes >> 4).permute(order).reshape(n, k * width // 8, 8 // width)
    high = torch.zeros_like(fields[..., 0])
    for place in range(8 // width):
        high |= fields[..., place] << (place * width)
    return qdata, high


def unpacked(qdata: Tensor, high: Tensor | None) -> Tensor:
    """Codes, uint8 [N, K]: what ``packed`` was given."""
    n, k = qdata.shape[0], 2 * qdata.shape[1]
    codes = torch.stack([qdata & 15, qdata >> 4], dim=-1).view(n, k // 32, 4, 2, 2, 2)  # w, h, l, c
    codes = codes.permute(0, 1, 5, 2, 4, 3).reshape(n, k)
    if high is None:
        return codes
    width = 8 * high.shape[1] // k
    fields = torch.stack([high >> place & (1 << width) - 1 for place in range(0, 8, width)], dim=-1)
    fields = fields.view(n, k // 32, 4, 2, 2, 2)
    order = (0, 1, 3, 2, 5, 4) if width == 1 else (0, 1, 5, 2, 3, 4)
    return codes | fields.permute(order).reshape(n, k) << 4
