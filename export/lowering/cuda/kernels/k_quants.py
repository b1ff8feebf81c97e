"""Linear layers of 1 to 16 rows over GGUF's K-quants (Q4_K, Q5_K, Q6_K) in Triton; each weight byte is read once.

The tiles, the sums and the division of K are those of ``int4``. The weight's values are exactly llama.cpp's.
ExecuTorch's layouts for these files would round scales to bfloat16, encode them again, and turn the minima into zero
points, so that a group with scale 0 would be lost completely.

Arithmetic, for a row x and a group g of K (``q``: codes; ``s``: its scale; ``m``: its minimum)::

    Q4_K, Q5_K  groups of 32, q from 0:    y = sum over g of s * (sum over k of q x)  -  m * sum over k of x
    Q6_K        groups of 16, q from -32:  y = sum over g of s * (sum over k of q x)
    in which    sum over k of q x  =  sum over k of -128 x  +  sum over k of (128 + q) x

s and m are each a code of 8 bits times a step, an fp16 per 256 weights. 128 + q comes from the bits of q as in
``int4``. The first of the two sums is the same for all outputs, so it is the initial value of the matmul that computes
the second. The main loop takes 2.4 to 2.7 (Q4_K), 3.4 to 3.7 (Q5_K) and 3.4 to 3.6 (Q6_K) instructions a weight for up
to 8 rows and 2.9 to 3.5, 4.0 to 4.5 and 4.2 to 4.4 for up to 16, counted in the machine code for sm_80 to sm_120 (timed
on an H200: measured.md of lowering/cuda).

Layout, per chunk of 32 weights, k = 16 c + 4 w + 2 l + h (c, l, h of 0 and 1, w of 0 to 3), b = l + 2 h: the low 4 bits
of a code are bits 4 c + 8 b of word w of 4 words. Its high bits are in word w of 4 words that 4 neighbouring outputs
(Q5_K) or 2 (Q6_K) share. The second output's bits follow the first's, from bit 4 + 8 b if c is 0, and from bit 8 (b +
1) mod 32 if c is 1. So one bitwise selection brings the low and high bits of all codes with the same c together in
bytes, and an AND extracts two codes 16 bits apart, a pair of bf16 in the order of x. Half a chunk is a ``tl.dot`` and,
in Q6_K, a group. Scales and minima (in Q6_K, scales of two groups) are stored in pairs by tile, as in ``int4``: a warp
loads whole lines of 128 bytes.

Bytes a weight: 4, 5 or 6 bits, codes of 8 bits (two per 32), an fp16 step or two per 256: 0.578 (Q4_K), 0.703 (Q5_K),
0.820 (Q6_K). A linear of 5376 x 21504 (Gemma 4 31B's ``down_proj``) in Q6_K is 94.8 MB: 20 us at 4.8 TB/s, whatever the
kernel; x, the output and partial sums as in ``int4``.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from eagle3.export.lowering.cuda.kernels.int4.tiles.kernel import BLOCK, TILE, in_rows
from eagle3.export.lowering.cuda.kernels.small_m import (
    ROWS,
    WARPS,
    Blocks,
    check_contiguous,
    on_all_rows,
    operand,
    sum_of_groups,
)
from eagle3.export.lowering.cuda.kernels.sums import launch, place, run_of_blocks, store

OF_WORD = {5: 4, 6: 2}
"""The number of outputs whose high bits share a word, by the bits of a code."""
CHOICES = {4: Blocks(n=128, stages=4), 5: Blocks(n=64, stages=5), 6: Blocks(n=64, stages=5)}
"""The block sizes by the bits of a code. ``n`` is a whole tile of outputs, or half a tile where two programs would need
too many registers."""


@triton.jit
def _terms(codes, steps, BITS: tl.constexpr, BLOCK_N: tl.constexpr):
    # uint16 [8, BLOCK_N], a step or two of [BLOCK_N] -> two float32 in the halves of 64 bits [8, BLOCK_N]: scales of
    # the two groups of a chunk, or the scale and a 128th of the minimum
    if BITS == 6:
        step = steps.to(tl.float16, bitcast=True).to(tl.float32)[None, :]
        codes = codes.to(tl.int16, bitcast=True)
        low, high = (codes << 8 >> 8).to(tl.float32) * step, (codes >> 8).to(tl.float32) * step
    else:
        scale_step = (steps & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        least_step = (steps >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 0.0078125
        low, high = (
            (codes & 0xFF).to(tl.float32) * scale_step[None, :],
            (codes >> 8).to(tl.float32) * least_step[None, :],
        )
    return (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low.to(tl.uint32, bitcast=True)


@triton.jit
def _spread(high, BITS: tl.constexpr):
    # uint32 [64 / outputs of a word, 32] -> [8, 64, 4], each output's bits where its codes are
    if BITS == 5:
        high = tl.permute(tl.reshape(high, (2, 8, 8, 4)), (2, 0, 1, 3))
        high = tl.join(tl.join(high, high >> 2), tl.join(high >> 1, high >> 3))
        high = tl.permute(tl.reshape(high, (8, 2, 8, 4, 4)), (0, 1, 4, 2, 3))
    else:
        high = tl.permute(tl.reshape(high, (4, 8, 8, 4)), (2, 0, 1, 3))
        high = tl.permute(tl.join(high, high >> 2), (0, 1, 4, 2, 3))
    return tl.reshape(high, (8, 64, 4))


@triton.jit
def _decoded(words, high, magic, nibbles, BITS: tl.constexpr):
    # uint32 [64, 32] -> bf16 [8, 64, 16] of 128 + q, twice: of c = 0 and of c = 1
    words = tl.permute(tl.reshape(words, (64, 8, 4)), (1, 0, 2))
    if BITS == 4:
        w0 = operand((words & 0x000F000F) | magic, ((words >> 8) & 0x000F000F) | magic, 64, 4)
        w1 = operand(((words >> 4) & 0x000F000F) | magic, ((words >> 12) & 0x000F000F) | magic, 64, 4)
    else:
        MASK: tl.constexpr = 0x001F001F if BITS == 5 else 0x003F003F
        high = _spread(high, BITS)
        found = ((words ^ high) & nibbles) ^ high  # low nibbles of the one, high nibbles of the other
        w0 = operand((found & MASK) | magic, ((found >> 8) & MASK) | magic, 64, 4)
        found = ((words ^ high) & nibbles) ^ words
        w1 = operand(((found >> 4) & MASK) | magic, ((found >> 12 | found << 20) & MASK) | magic, 64, 4)
    return w0, w1


@triton.jit
def _add(
    acc, words, high, terms, x0, x1, minus0, minus1, magic, nibbles, BITS: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    # What 64 outputs of a block come to; fma, so that nothing is left to fuse or not.
    w0, w1 = _decoded(words, high, magic, nibbles, BITS)
    low = tl.broadcast_to(terms.to(tl.uint32).to(tl.float32, bitcast=True), (8, 64, BLOCK_M))
    high = tl.broadcast_to((terms >> 32).to(tl.uint32).to(tl.float32, bitcast=True), (8, 64, BLOCK_M))
    if BITS == 6:
        return tl.fma(tl.dot(w1, x1, minus1), high, tl.fma(tl.dot(w0, x0, minus0), low, acc))
    part = tl.dot(w1, x1, tl.dot(w0, x0, minus1))
    return tl.fma(minus1, high, tl.fma(part, low, acc))


@triton.jit
def _k_quant_small_m_kernel(
    X, Q, HIGH, CODES, STEPS, ARRIVED, PARTS, OUT, M,
    N: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, WHOLE: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = K // BLOCK_K
    tile, part, _ = place(WHOLE, SPLITS)
    first, last = run_of_blocks(tile, part, BLOCKS, WHOLE, SPLITS)
    m0 = tl.program_id(0) * BLOCK_M
    n0 = tile * BLOCK_N
    m = m0 + tl.arange(0, BLOCK_M)
    # A lane's rows of the tile (8 apart) are neighbours in N: its scales and minima lie side by side.
    n = tl.arange(0, BLOCK_N)
    row = tl.arange(0, 64)
    row = (row % 8) * (BLOCK_N // 8) + row // 8  # and 8 more in a second half
    # Offsets of 32 bits within the tile, from pointers of 64.
    X += m0.to(tl.int64) * K
    WORDS = Q.to(tl.pointer_type(tl.uint32), bitcast=True) + n0.to(tl.int64) * (K // 8)  # 8 codes each
    PROGRAMS: tl.constexpr = 128 // BLOCK_N  # of a tile
    begin = tile % PROGRAMS * BLOCK_N
    tile = (tile // PROGRAMS).to(tl.int64)
    CODES = CODES.to(tl.pointer_type(tl.uint16), bitcast=True) + (tile * (BLOCKS * 8 * 128) + begin)
    STEPS = STEPS.to(tl.pointer_type(tl.uint16 if BITS == 6 else tl.uint32), bitcast=True)
    STEPS += tile * (BLOCKS * 128) + begin
    x_at = tl.arange(0, BLOCK_M)[:, None] * K + tl.arange(0, BLOCK_K)[None, :]
    word = tl.arange(0, 32)[None, :]
    OF_WORD: tl.constexpr = 2 if BITS == 6 else 4  # outputs whose high bits share a word
    HIGH = HIGH.to(tl.pointer_type(tl.uint32), bitcast=True) + (n0 // OF_WORD).to(tl.int64) * (K // 8)
    high_row = tl.arange(0, 64 // OF_WORD)
    high_row = (high_row % 8) * (8 // OF_WORD) + high_row // 8
    if N % BLOCK_N == 0:
        words0_at = row[:, None] * (K // 8) + word
        words1_at = words0_at + K
        high_at = high_row[:, None] * (K // 8) + word
    else:  # outputs past the end read the last one
        words0_at = tl.minimum(row, N - 1 - n0)[:, None] * (K // 8) + word
        words1_at = tl.minimum(row + 8, N - 1 - n0)[:, None] * (K // 8) + word
        high_at = tl.minimum(high_row, (N - 1 - n0) // OF_WORD)[:, None] * (K // 8) + word
    codes_at = tl.arange(0, 8)[:, None] * 128 + n[None, :]

    # Constants that the compiler cannot see, by loads never made: as immediates they would take their own instructions.
    nowhere = tl.full((1, 1, 1), 0, tl.int32)
    magic = tl.load(WORDS + nowhere, mask=nowhere + n0 >= N, other=0x43004300)
    nibbles = tl.load(WORDS + nowhere, mask=nowhere + n0 >= N, other=0x0F0F0F0F)
    # What each code is too large by: 128 and, in Q6_K, 32.
    minus = tl.full((8, 16, 4), 0xC320C320 if BITS == 6 else 0xC300C300, tl.uint32)
    minus = operand(minus, minus, 16, 4)
    acc0 = tl.full((8, 64, BLOCK_M), 0, tl.float32)
    acc1 = tl.full((8, 64, BLOCK_M), 0, tl.float32)
    # Too narrow for the compiler's pipeline of asynchronous copies: codes and steps are fetched a block ahead here.
    codes, steps = tl.load(CODES + first * 1024 + codes_at), tl.load(STEPS + first * 128 + n)
    for block in tl.range(first, last, num_stages=STAGES):
        words0 = tl.load(WORDS + block * 32 + words0_at)
        if BLOCK_N == 128:
            words1 = tl.load(WORDS + block * 32 + words1_at)
        x = tl.load(X + block * BLOCK_K + x_at, mask=m[:, None] < M, other=0)
        high = words0
        if BITS > 4:
            high = tl.load(HIGH + block * 32 + high_at)
        after = tl.minimum(block + 1, BLOCKS - 1)
        codes_after, steps_after = tl.load(CODES + after * 1024 + codes_at), tl.load(STEPS + after * 128 + n)

        x0, x1 = tl.split(tl.permute(tl.reshape(x, (BLOCK_M, 8, 2, 16)), (1, 3, 0, 2)))  # [8, 16, BLOCK_M]
        if BITS == 6:
            minus0 = on_all_rows(tl.dot(minus, x0), 64, BLOCK_M)
            minus1 = on_all_rows(tl.dot(minus, x1), 64, BLOCK_M)
        else:
            minus1 = on_all_rows(tl.dot(minus, x1, tl.dot(minus, x0)), 64, BLOCK_M)
            minus0 = minus1
        terms = _terms(codes, steps, BITS, BLOCK_N)
        if BLOCK_N == 128:
            terms = tl.permute(tl.reshape(terms, (8, 8, 2, 8)), (0, 3, 1, 2))
            terms, terms1 = tl.split(tl.reshape(terms, (8, 64, 1, 2)))
        else:
            terms = tl.reshape(tl.permute(tl.reshape(terms, (8, 8, 8)), (0, 2, 1)), (8, 64, 1))
        acc0 = _add(acc0, words0, high, terms, x0, x1, minus0, minus1, magic, nibbles, BITS, BLOCK_M)
        if BLOCK_N == 128:
            acc1 = _add(acc1, words1, high, terms1, x0, x1, minus0, minus1, magic, nibbles, BITS, BLOCK_M)
        codes, steps = codes_after, steps_after
    total = sum_of_groups(acc0, 64, BLOCK_M)
    if BLOCK_N == 128:
        total = tl.join(total, sum_of_groups(acc1, 64, BLOCK_M))
        total = tl.reshape(tl.permute(total, (2, 0, 1)), (BLOCK_N, BLOCK_M))
    n = n0 + (n % 8) * (BLOCK_N // 8) + n // 8
    store(OUT, PARTS, ARRIVED, total, M, m, n, n < N, N, WHOLE, SPLITS)


def code_bits(qdata: Tensor, high: Tensor | None, codes: Tensor, steps: Tensor) -> int:
    """Return the bits of a code: 4, 5 or 6. Raises ValueError if the shapes are not those of one of the three kinds."""
    n, k = qdata.shape[0], 2 * qdata.shape[1]
    bits = 4 if high is None else 6 if steps.shape[-1] == 1 else 5
    tiles, blocks = triton.cdiv(n, TILE), k // BLOCK
    expected = {"codes": (tiles, blocks, 8, TILE, 2), "steps": (tiles, blocks, TILE, 1 if bits == 6 else 2)}
    if high is not None:
        expected["high"] = (triton.cdiv(n, OF_WORD[bits]), k // 2)
    given = {"codes": codes, "steps": steps, "high": high}
    found = {name: tuple(tensor.shape) for name, tensor in given.items() if tensor is not None}
    if k % BLOCK or found != expected:
        raise ValueError(f"qdata is {tuple(qdata.shape)} beside {found}: a weight of {bits} bits has {expected}")
    return bits


def _launch_k_quant(
    kernel: Any, x: Tensor, qdata: Tensor, high: Tensor | None, codes: Tensor, steps: Tensor, arrived: Tensor,
    choice: Blocks | None = None,
) -> Tensor:  # fmt: skip
    bits, weight = checked_parts(x, qdata, high, codes, steps)
    n, k = qdata.shape[0], x.shape[1]
    choice = choice or CHOICES[bits]
    divided = choice.division(n, k // BLOCK)
    x = x.contiguous()

    def run(programs: tuple, rows: int, out: Tensor, parts: Tensor) -> None:
        kernel[programs](
            x, *weight, arrived, parts, out, x.shape[0], N=n, K=k, BITS=bits, WHOLE=divided.whole,
            SPLITS=divided.parts, BLOCK_N=choice.n, BLOCK_K=BLOCK, BLOCK_M=rows, STAGES=choice.stages, num_warps=WARPS,
        )  # fmt: skip

    return launch(x, n, choice.n, triton.cdiv(n, choice.n), divided, ROWS, arrived, run)


def checked_parts(
    x: Tensor, qdata: Tensor, high: Tensor | None, codes: Tensor, steps: Tensor
) -> tuple[int, tuple[Tensor, ...]]:
    """Return the bits of a code, and the weight's tensors for a kernel. Missing high bits are replaced by a tensor that
    the kernel does not read. Raises ValueError for a weight that the kernels do not take."""
    bits = agreeing_bits(x, qdata, high, codes, steps)
    weight = qdata, qdata if high is None else high, codes, steps
    check_contiguous(*weight)
    return bits, weight


def agreeing_bits(x: Tensor, qdata: Tensor, *parts: Tensor | None) -> int:
    bits = code_bits(qdata, *parts)
    if x.shape[1] != 2 * qdata.shape[1]:
        raise ValueError(f"x has K = {x.shape[1]}, qdata {2 * qdata.shape[1]}: they must agree")
    return bits


@triton_op("eagle3::k_quant_small_m", mutates_args={})
def k_quant_small_m(
    x: Tensor, qdata: Tensor, high: Tensor | None, codes: Tensor, steps: Tensor, arrived: Tensor
) -> Tensor:
    """Compute ``x @ w.T`` with ``w = q * scale - minimum``; scale and minimum are a code times a step. The module's
    docstring has the layout.

    On CUDA this is the kernel of this module, on the host ``k_quant_reference``. It is one node of an exported program.

    Args:
        x: bfloat16 [M, K], K a multiple of 256; M may be dynamic
        qdata: uint8 [N, K / 2], the low 4 bits of the codes
        high: the high bits of 4 (Q5_K) or 2 (Q6_K) outputs a row, uint8 [N / 4 or N / 2, K / 2]; None for Q4_K
        codes: of scale and minimum, uint8 [tiles, K / 256, 8, 128, 2]; a tile is 128 outputs, the last one is padded.
            For Q6_K, whose q begins at -32, int8 codes of the scales of the two groups in 32 weights
        steps: float16 [tiles, K / 256, 128, 2] of scale and minimum; for Q6_K [tiles, K / 256, 128, 1]
        arrived: ``sums.counters()``, zero again when it returns

    Returns:
        bfloat16 [M, N]; a row's bits do not depend on the other rows or their number

    Raises:
        ValueError: shapes that do not agree; on CUDA, another dtype of ``x``, weights that are not contiguous, or more
            rows than there are counters for
    """
    return _launch_k_quant(wrap_triton(_k_quant_small_m_kernel), x, qdata, high, codes, steps, arrived)


@k_quant_small_m.register_kernel("cpu")
def k_quant_reference(
    x: Tensor, qdata: Tensor, high: Tensor | None, codes: Tensor, steps: Tensor, arrived: Tensor | None = None
) -> Tensor:
    """``k_quant_small_m`` in plain PyTorch: float32 on the dequantized weights, any floating dtype of ``x``."""
    agreeing_bits(x, qdata, high, codes, steps)
    return (x.float() @ dequantized(qdata, high, codes, steps).T).to(x.dtype)


def dequantized(qdata: Tensor, high: Tensor | None, codes: Tensor, steps: Tensor) -> Tensor:
    """Return all weights as float32 [N, K], with llama.cpp's values."""
    return _values(*by_row(qdata, high, codes, steps))


def dequantized_rows(rows: Tensor, qdata: Tensor, high: Tensor | None, codes: Tensor, steps: Tensor) -> Tensor:
    """Return only the given rows of the weights as float32 [R, K]; ``rows`` is int64 [R]."""
    bits, tile, output = code_bits(qdata, high, codes, steps), rows // TILE, rows % TILE
    q = unpacked(qdata[rows], None if high is None else high[rows // OF_WORD[bits]], rows, bits)
    return _values(q, codes[tile, :, :, output], steps[tile, :, output])


def _values(q: Tensor, pairs: Tensor, steps: Tensor) -> Tensor:
    """Return the values, float32 [R, K], for a result of ``by_row``."""
    q, terms = q.float(), pairs.float() * steps.float()[:, :, None]
    if steps.shape[-1] == 1:
        return ((q - 32).view(*terms.shape, 16) * terms[..., None]).flatten(1)
    return (q.view(*terms.shape[:-1], 32) * terms[..., :1] - terms[..., 1:]).flatten(1)


def by_row(qdata: Tensor, high: Tensor | None, codes: Tensor, steps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes uint8 [N, K], the pairs of scale codes [N, K / 256, 8, 2], and one or two steps
    [N, K / 256, c]."""
    n, bits = qdata.shape[0], code_bits(qdata, high, codes, steps)
    if high is not None:
        high = high.repeat_interleave(OF_WORD[bits], 0)[:n]
    q = unpacked(qdata, high, torch.arange(n, device=qdata.device), bits)
    return q, in_rows(codes, n), in_rows(steps.unsqueeze(2), n).squeeze(2)


def packed(q: Tensor, bits: int) -> tuple[Tensor, Tensor | None]:
    """Pack codes uint8 [N, K] into ``qdata`` and ``high``."""
    n, k = q.shape
    q = q.view(n, k // 32, 2, 4, 2, 2).permute(0, 1, 3, 5, 4, 2).reshape(n, k // 2, 2)  # c, w, l, h to w, h, l, c
    low = q & 15
    qdata = low[..., 0] | low[..., 1] << 4
    if bits == 4:
        return qdata, None
    of_word = OF_WORD[bits]
    fields = torch.nn.functional.pad(q >> 4, (0, 0, 0, 0, 0, -n % of_word)).unflatten(0, (-1, of_word))
    high = torch.zeros_like(fields[:, 0, :, 0])
    for output in range(of_word):
        first, second = fields[:, output].unbind(-1)
        high |= (first << 4 | _turned(second, 1)) << output * (bits - 4)
    return qdata, high


def unpacked(qdata: Tensor, high: Tensor | None, rows: Tensor, bits: int) -> Tensor:
    """Invert ``packed`` for ``rows``, int64 [R]: return codes uint8 [R, K]. Here ``high`` has one row for each of
    ``rows``."""
    q = torch.stack([qdata & 15, qdata >> 4], dim=-1)
    if high is not None:
        mask = (1 << bits - 4) - 1
        fields = high >> (rows % OF_WORD[bits] * (bits - 4)).to(torch.uint8)[:, None]
        q = q | torch.stack([fields >> 4 & mask, _turned(fields, -1) & mask], dim=-1) << 4
    return q.unflatten(1, (-1, 4, 2, 2)).permute(0, 1, 5, 2, 4, 3).flatten(1)  # w, h, l, c to c, w, l, h


def _turned(words: Tensor, by: int) -> Tensor:
    """Rotate the 4 bytes of each word by ``by``: uint8 [rows, K / 2]."""
    words = words.unflatten(1, (-1, 4))
    return torch.cat([words[..., -by:], words[..., :-by]], dim=-1).flatten(1)
