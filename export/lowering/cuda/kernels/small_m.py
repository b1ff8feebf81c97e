"""Linear layers of few rows over INT8 weights in Triton; each weight byte is read once for 16 rows. The kernels of INT4
(``int4/``) and of GGUF's K-quants (``k_quants.py``) share parts of this module.

The weights are torchao's ``IntxUnpackedToInt8Tensor``. Arithmetic, for a row x and a group g of K (``q``: codes; ``s``,
``z``: the group's scale and zero point)::

    y = sum over g of s * (sum over k of (16 * 128 + 128 + 128 + q) x  -  (16 * 128 + 128 + 128 + z) * sum over k of x)
    in which q + 128 = 16 h + l, and so the first sum is of (128 + h) 16 x + (128 + l) x

The sums over k run on tensor cores, bf16 to float32, all else is float32: weights are never rounded. 128 + h comes from
the bits of h without a conversion, 0x4300 | h is bf16(128 + h), and 128 + l likewise. The main loop takes about 4.1
instructions a weight for up to 8 rows and 5.2 for up to 16, counted in the machine code for sm_80 to sm_120.

A program takes some outputs and a run of blocks of 8 chunks of 32, one chunk to a warp: the chunks are the batch
dimension of a 3D ``tl.dot``. At the end the 8 sums are added in pairs. Programs that divide K add their sums as
``sums`` says. No order depends on the number of rows, so a row has the same bits in every call.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from eagle3.export.lowering.cuda.kernels.sums import Division, division, launch, place, run_of_blocks, store

ROWS = (8, 16)
"""The possible numbers of rows of a tile. A tile of 8 rows takes half the multiplications and additions of a tile of
16, and gives the same bits."""


@dataclass(frozen=True)
class Blocks:
    """The block sizes for one kind of weight. A program has 8 warps, one for each group of a block."""

    n: int
    """The number of outputs of a program. For up to 8 rows of one weight, or of two weights of whole tiles, they fit in
    128 registers per thread on sm_80 to sm_90, so that two programs fit on an SM."""
    stages: int
    """One more than the number of blocks in flight in shared memory. With them, two programs fit on an SM of sm_80 and
    sm_90, and one on sm_86."""
    parts: int | None = None
    """The number of programs among which K of each tile is divided; None means ``division``."""

    def division(self, outputs: int, blocks: int, whole: bool = True) -> Division:
        return Division(0, self.parts) if self.parts else division(outputs, blocks, self.n, whole)


INT8 = Blocks(n=64, stages=4)
WARPS = 8


@triton.jit
def operand(low, high, ROWS: tl.constexpr, WORDS: tl.constexpr):
    # uint32 [8, ROWS, WORDS] of two bf16 each -> bf16 [8, ROWS, 4 * WORDS] ordered word, (low, high), half
    low = tl.join((low & 0xFFFF).to(tl.uint16), (low >> 16).to(tl.uint16))
    high = tl.join((high & 0xFFFF).to(tl.uint16), (high >> 16).to(tl.uint16))
    both = tl.permute(tl.join(low, high), (0, 1, 2, 4, 3))
    return tl.reshape(both, (8, ROWS, 4 * WORDS)).to(tl.bfloat16, bitcast=True)


@triton.jit
def ones_operand(WORDS: tl.constexpr):
    # made as weights are, so that the compiler lays x out once for both products
    one = tl.full((8, 16, WORDS), 0x3F803F80, tl.uint32)
    return operand(one, one, 16, WORDS)


@triton.jit
def on_all_rows(sums, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    # [8, 16, BLOCK_M], 16 equal rows -> [8, BLOCK_N, BLOCK_M]
    sums = tl.broadcast_to(tl.reshape(sums, (8, 1, 16, BLOCK_M)), (8, BLOCK_N // 16, 16, BLOCK_M))
    return tl.reshape(sums, (8, BLOCK_N, BLOCK_M))


@triton.jit
def add_groups(acc, part, sum_x, s, z, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    # s, z: [8, BLOCK_N] in the order of N, to the order of the tile's rows; fma, so that nothing is left to fuse or not
    both = tl.permute(tl.reshape(tl.join(-z, s), (8, 8, BLOCK_N // 8, 2)), (0, 2, 1, 3))
    z, s = tl.split(tl.reshape(both, (8, BLOCK_N, 1, 2)))
    z = tl.broadcast_to(z, (8, BLOCK_N, BLOCK_M))
    s = tl.broadcast_to(s, (8, BLOCK_N, BLOCK_M))
    return tl.fma(tl.fma(z, sum_x, part), s, acc)


@triton.jit
def tile_rows(row, BLOCK_N: tl.constexpr):
    # the output of each row of the tile: a lane's rows (8 apart) are neighbours in N, one vector load of s and z
    return (row % 8) * (BLOCK_N // 8) + row // 8


@triton.jit
def sum_of_groups(acc, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    # [8, BLOCK_N, BLOCK_M]: the groups added in a fixed order, which tl.sum does not promise
    acc = tl.permute(acc, (1, 2, 0))
    a, b = tl.split(tl.reshape(acc, (BLOCK_N, BLOCK_M, 4, 2)))
    a, b = tl.split(tl.reshape(a + b, (BLOCK_N, BLOCK_M, 2, 2)))
    a, b = tl.split(a + b)
    return a + b


@triton.jit
def add_int8_block(
    acc, words, x, scale, zero, magic, magic_high, ones, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    # uint32 [BLOCK_N, 2 * CHUNK], bf16 [BLOCK_M, 8 * CHUNK]; scale and zero [8, BLOCK_N] in the order of N
    N_WORDS: tl.constexpr = CHUNK // 4
    # A word's codes are k = 0..3, of two nibbles each; the XOR with 8 in the high ones adds 128 to the code.
    words = tl.permute(tl.reshape(words, (BLOCK_N, 8, N_WORDS)), (1, 0, 2))
    low = operand((words & 0x000F000F) ^ magic, ((words >> 8) & 0x000F000F) ^ magic, BLOCK_N, N_WORDS)
    high = operand(
        ((words >> 4) & 0x000F000F) ^ magic_high, ((words >> 12) & 0x000F000F) ^ magic_high, BLOCK_N, N_WORDS
    )
    x = tl.permute(tl.reshape(x, (BLOCK_M, 8, N_WORDS, 2, 2)), (1, 2, 4, 3, 0))  # chunk, word, odd, half, m
    x = tl.reshape(x, (8, CHUNK, BLOCK_M))
    x16 = (x.to(tl.float32) * 16).to(tl.bfloat16)
    part = tl.dot(high, x16, tl.dot(low, x))
    sum_x = on_all_rows(tl.dot(ones, x), BLOCK_N, BLOCK_M)
    return add_groups(acc, part, sum_x, scale.to(tl.float32), zero.to(tl.float32) + 2304.0, BLOCK_N, BLOCK_M)


@triton.jit
def _int8_small_m_kernel(
    X, Q, SCALE, ZERO, ARRIVED, PARTS, OUT, M,
    N: tl.constexpr, K: tl.constexpr, G: tl.constexpr, WHOLE: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    CHUNK: tl.constexpr = BLOCK_K // 8
    N_WORDS: tl.constexpr = CHUNK // 4
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    tile, part, _ = place(WHOLE, SPLITS)
    first, last = run_of_blocks(tile, part, BLOCKS, WHOLE, SPLITS)
    m0 = tl.program_id(0) * BLOCK_M
    n0 = tile * BLOCK_N
    row = tl.arange(0, BLOCK_N)
    tile_row = tile_rows(row, BLOCK_N)
    m = m0 + tl.arange(0, BLOCK_M)
    word = tl.arange(0, 8 * N_WORDS)
    k = tl.arange(0, BLOCK_K)
    chunk = tl.arange(0, 8)
    WORDS = Q.to(tl.pointer_type(tl.uint32), bitcast=True) + n0.to(tl.int64) * (K // 4)  # 4 codes each
    words_at = tl.minimum(tile_row, N - 1 - n0)[:, None] * (K // 4) + word[None, :]
    X += m0.to(tl.int64) * K
    x_at = tl.arange(0, BLOCK_M)[:, None] * K + k[None, :]
    SCALE += n0.to(tl.int64) * (K // G)
    ZERO += n0.to(tl.int64) * (K // G)
    row = (tl.minimum(row, N - 1 - n0) * (K // G))[None, :]

    nowhere = tl.full((1, 1, 1), 0, tl.int32)
    never = nowhere + n0 >= N
    magic = tl.load(WORDS + nowhere, mask=never, other=0x43004300)
    magic_high = tl.load(WORDS + nowhere, mask=never, other=0x43084308)
    ones = ones_operand(N_WORDS)
    acc = tl.full((8, BLOCK_N, BLOCK_M), 0, tl.float32)
    group = tl.minimum((first * 8 + chunk) * CHUNK // G, K // G - 1)[:, None]
    scale, zero = tl.load(SCALE + row + group), tl.load(ZERO + row + group)
    for block in tl.range(first, last, num_stages=STAGES):
        if K % BLOCK_K == 0:
            words = tl.load(WORDS + block * (8 * N_WORDS) + words_at)
            x = tl.load(X + block * BLOCK_K + x_at, mask=m[:, None] < M, other=0)
        else:
            here = (block * (8 * N_WORDS) + word < K // 4)[None, :]
            words = tl.load(WORDS + block * (8 * N_WORDS) + words_at, mask=here, other=0)
            here = (block * BLOCK_K + k < K)[None, :]
            x = tl.load(X + block * BLOCK_K + x_at, mask=(m[:, None] < M) & here, other=0)
        group = tl.minimum(((block + 1) * 8 + chunk) * CHUNK // G, K // G - 1)[:, None]
        scale_after, zero_after = tl.load(SCALE + row + group), tl.load(ZERO + row + group)

        acc = add_int8_block(acc, words, x, scale, zero, magic, magic_high, ones, BLOCK_N, BLOCK_M, CHUNK)
        scale, zero = scale_after, zero_after
    n = n0 + tile_row
    store(OUT, PARTS, ARRIVED, sum_of_groups(acc, BLOCK_N, BLOCK_M), M, m, n, n < N, N, WHOLE, SPLITS)


def int8_group(x: Tensor, qdata: Tensor, scale: Tensor, zero: Tensor) -> int:
    """Return the group size. Raises ValueError if the shapes are not those of an INT8 weight that fits ``x``."""
    n, k = qdata.shape
    if x.shape[1] != k:
        raise ValueError(f"x has K = {x.shape[1]}, qdata {k}: they must agree")
    if scale.shape != zero.shape or scale.shape[0] != n or k % scale.shape[1]:
        raise ValueError(
            f"scale is {tuple(scale.shape)} and zero {tuple(zero.shape)}: "
            f"a weight of {n} x {k} has {n} of each, times a divisor of {k}"
        )
    return k // scale.shape[1]


def check_contiguous(*weight: Tensor) -> None:
    for tensor in weight:
        if not tensor.is_contiguous():
            raise ValueError(
                f"a weight's tensor of {tuple(tensor.shape)} has strides {tensor.stride()}: not contiguous"
            )


def checked_int8_group(x: Tensor, qdata: Tensor, scale: Tensor, zero: Tensor) -> int:
    """Return ``int8_group``. Also raises ValueError for a weight that the kernels do not take."""
    group = int8_group(x, qdata, scale, zero)
    check_contiguous(qdata, scale, zero)
    if group % 16:
        raise ValueError(f"the group size is {group}: the kernel takes multiples of 16")
    return group


def _launch_int8(
    kernel: Any, x: Tensor, qdata: Tensor, scale: Tensor, zero: Tensor, arrived: Tensor, choice: Blocks = INT8
) -> Tensor:
    group, (n, k) = checked_int8_group(x, qdata, scale, zero), qdata.shape
    chunk = 16 if group % 32 else 32  # the part of K that a warp computes
    divided = choice.division(n, triton.cdiv(k, 8 * chunk))
    x = x.contiguous()

    def run(programs: tuple, rows: int, out: Tensor, parts: Tensor) -> None:
        kernel[programs](
            x, qdata, scale, zero, arrived, parts, out, x.shape[0], N=n, K=k, G=group, WHOLE=divided.whole,
            SPLITS=divided.parts, BLOCK_N=choice.n, BLOCK_K=8 * chunk, BLOCK_M=rows, STAGES=choice.stages,
            num_warps=WARPS,
        )  # fmt: skip

    return launch(x, n, choice.n, triton.cdiv(n, choice.n), divided, ROWS, arrived, run)


@triton_op("eagle3::int8_small_m", mutates_args={})
def int8_small_m(x: Tensor, qdata: Tensor, scale: Tensor, zero: Tensor, arrived: Tensor) -> Tensor:
    """Compute ``x @ w.T`` with ``w = (q - zero) * scale``; the weights are torchao's ``IntxUnpackedToInt8Tensor``.

    On CUDA this is the kernel of this module, on the host ``int8_reference``. It is one node of an exported program.

    Args:
        x: bfloat16 [M, K]; M may be dynamic
        qdata: int8 [N, K]
        scale: bfloat16 [N, K / G], G a multiple of 16 up to K
        zero: int8 [N, K / G]
        arrived: ``sums.counters()``, zero again when it returns

    Returns:
        bfloat16 [M, N]; a row's bits do not depend on the other rows or their number

    Raises:
        ValueError: shapes that do not agree; on CUDA, another dtype of ``x``, a G that is no multiple of 16, weights
            that are not contiguous, or more rows than there are counters for
    """
    return _launch_int8(wrap_triton(_int8_small_m_kernel), x, qdata, scale, zero, arrived)


@int8_small_m.register_kernel("cpu")
def int8_reference(x: Tensor, qdata: Tensor, scale: Tensor, zero: Tensor, arrived: Tensor | None = None) -> Tensor:
    """``int8_small_m`` in plain PyTorch: float32 on the dequantized weights, any floating dtype of ``x``, any G."""
    int8_group(x, qdata, scale, zero)
    return (x.float() @ int8_dequantized(qdata, scale, zero).T).to(x.dtype)


def int8_dequantized(qdata: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Return the dense weight as float32 [N, K]."""
    group = qdata.shape[1] // scale.shape[1]
    return (qdata.float() - zero.float().repeat_interleave(group, 1)) * scale.float().repeat_interleave(group, 1)
