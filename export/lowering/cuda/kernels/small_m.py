"""Linear layers of 1 to 16 rows over INT4 and INT8 weights that read each weight byte once, in Triton.

The rows are bf16 activations, the weights ExecuTorch's ``CudaCoalescedInt4Tensor`` (INT4) and torchao's
``IntxUnpackedToInt8Tensor`` (INT8). A verify forward of speculative decoding has 2 to 16 rows; ExecuTorch's own
kernels serve up to 4, for a time that grows with each (pytorch/executorch PR 21456). More than 16 rows go in tiles of
16, one reading of the weights each.

Bytes: an INT4 weight is 4 bits, two codes of 8 bits per group of 32 and two fp16 steps per 256: 0.578 bytes. A linear
of 5376 x 21504 (N x K, Gemma 4 31B's ``down_proj``) is 66.8 MB: 14 us at 4.8 TB/s, whatever the kernel. 8 rows add
0.34 MB of activations (read once for every 64 outputs, 29 MB, from L2), 0.09 MB of output and 1.0 MB of partial sums,
written and read.

Arithmetic, for a row x and a group g of K (``q``: codes; ``s``, ``z``: the group's scale and zero point)::

    INT4  y = sum over g of s * (sum over k of (128 + q) x  -  (128 + z) * sum over k of x)
    INT8  the same with q + 128 = 16 h + l: (128 + h) 16 x + (128 + l) x, and 16 * 128 + 128 + 128 for the 128 of z

The sums over k run on tensor cores, bf16 to float32, all else is float32: weights are never rounded. 128 + q comes from
the bits of q without a conversion, 0x4300 | q is bf16(128 + q) (Kim et al., "Who Says Elephants Can't Run", 2022,
do so in fp16). The main loop takes about 3.2 instructions a weight for up to 8 rows and 4 for up to 16 (INT4), 5 and
6.4 (INT8), counted in the machine code for sm_80 to sm_120; no GPU has timed it yet (scripts/bench_small_m.py).

A program takes some outputs and a run of blocks of 8 groups, one group to a warp: the groups are the batch dimension
of a 3D ``tl.dot``. At the end the 8 sums are added in pairs, and a second kernel adds the programs' sums in the order
of K. No order depends on the number of rows, so a row has the same bits in every call.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

ROWS = 16
"""Rows of a tile: what one reading of the weights serves."""


@dataclass(frozen=True)
class Blocks:
    """The choices for one kind of weight. A program has 8 warps, one for each group of a block."""

    n: int
    """Outputs of a program: what fits in 128 registers a thread, for two programs on an SM."""
    stages: int
    """Blocks in flight in shared memory, and one: two programs fit on an SM of sm_80 and sm_90, one on sm_86."""
    parts: int | None = None
    """Programs among which K is divided; None: as ``splits`` says."""


INT4 = Blocks(n=64, stages=5)
INT8 = Blocks(n=32, stages=5)
_WARPS = 8
_SUM_BLOCK = 256


def splits(n: int, blocks: int, block_n: int) -> int:
    """Programs among which ``blocks`` blocks of K are divided: of the weight's shape alone, for sums of one order.

    The least time when two programs run on an SM and starting one costs three blocks, summed over GPUs of 108 (A100),
    132 (H100, H200) and 148 SMs (B200), whichever it runs on.
    """
    tiles = triton.cdiv(n, block_n)

    def cost(count: int) -> int:
        steps = triton.cdiv(blocks, count) + 3
        return sum(slots * triton.cdiv(tiles * count, slots) * steps for slots in (216, 264, 296))

    return min(range(1, min(blocks, 8) + 1), key=cost)


def grid(m: Any, n: int, blocks: int, choice: Blocks) -> tuple[int, Any, int]:
    """Programs along N, along the rows (one for up to ``ROWS``: the weights are read once) and along K."""
    return triton.cdiv(n, choice.n), (m + ROWS - 1) // ROWS, choice.parts or splits(n, blocks, choice.n)


@triton.jit
def _operand(low, high, ROWS: tl.constexpr, WORDS: tl.constexpr):
    # uint32 [8, ROWS, WORDS] of two bf16 each -> bf16 [8, ROWS, 4 * WORDS] ordered word, (low, high), half
    low = tl.join((low & 0xFFFF).to(tl.uint16), (low >> 16).to(tl.uint16))
    high = tl.join((high & 0xFFFF).to(tl.uint16), (high >> 16).to(tl.uint16))
    both = tl.permute(tl.join(low, high), (0, 1, 2, 4, 3))
    return tl.reshape(both, (8, ROWS, 4 * WORDS)).to(tl.bfloat16, bitcast=True)


@triton.jit
def _ones(WORDS: tl.constexpr):
    # made as weights are, so that the compiler lays x out once for both products
    one = tl.full((8, 16, WORDS), 0x3F803F80, tl.uint32)
    return _operand(one, one, 16, WORDS)


@triton.jit
def _on_all_rows(sums, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    # [8, 16, BLOCK_M], 16 equal rows -> [8, BLOCK_N, BLOCK_M]
    sums = tl.broadcast_to(tl.reshape(sums, (8, 1, 16, BLOCK_M)), (8, BLOCK_N // 16, 16, BLOCK_M))
    return tl.reshape(sums, (8, BLOCK_N, BLOCK_M))


@triton.jit
def _add_groups(acc, part, sum_x, s, z, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    # s, z: [8, BLOCK_N] in the order of N, to the order of the tile's rows; fma, so that nothing is left to fuse or not
    both = tl.permute(tl.reshape(tl.join(-z, s), (8, 8, BLOCK_N // 8, 2)), (0, 2, 1, 3))
    z, s = tl.split(tl.reshape(both, (8, BLOCK_N, 1, 2)))
    z = tl.broadcast_to(z, (8, BLOCK_N, BLOCK_M))
    s = tl.broadcast_to(s, (8, BLOCK_N, BLOCK_M))
    return tl.fma(tl.fma(z, sum_x, part), s, acc)


@triton.jit
def _tile_rows(row, BLOCK_N: tl.constexpr):
    # the output of each row of the tile: a lane's rows (8 apart) are neighbours in N, one vector load of s and z
    return (row % 8) * (BLOCK_N // 8) + row // 8


@triton.jit
def _store(OUT, acc, M, m, tile_n, N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    # [8, BLOCK_N, BLOCK_M]: the groups added in a fixed order, which tl.sum does not promise
    acc = tl.permute(acc, (1, 2, 0))
    a, b = tl.split(tl.reshape(acc, (BLOCK_N, BLOCK_M, 4, 2)))
    a, b = tl.split(tl.reshape(a + b, (BLOCK_N, BLOCK_M, 2, 2)))
    a, b = tl.split(a + b)
    at = (tl.program_id(2).to(tl.int64) * M + m)[None, :] * N + tile_n[:, None]
    tl.store(OUT + at, (a + b).to(OUT.dtype.element_ty), mask=(m[None, :] < M) & (tile_n[:, None] < N))


@triton.jit
def _int4_tile(
    X, Q, SCALE, SCALE_STEP, ZERO, ZERO_STEP, OUT, M, m0, first, last,
    N: tl.constexpr, K: tl.constexpr, G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = 256 // G
    n0 = tl.program_id(0) * BLOCK_N
    row = tl.arange(0, BLOCK_N)
    tile_row = _tile_rows(row, BLOCK_N)
    m = m0 + tl.arange(0, BLOCK_M)
    # Offsets of 32 bits within the tile, from pointers of 64; rows past the end read the last one.
    WORDS = Q.to(tl.pointer_type(tl.uint32), bitcast=True) + n0.to(tl.int64) * (K // 8)  # 8 codes each
    words_at = tl.minimum(tile_row, N - 1 - n0)[:, None] * (K // 8) + tl.arange(0, 32)[None, :]
    X += m0.to(tl.int64) * K
    x_at = tl.arange(0, BLOCK_M)[:, None] * K + tl.arange(0, 256)[None, :]
    SCALE += n0.to(tl.int64) * (K // G)
    ZERO += n0.to(tl.int64) * (K // G)
    SCALE_STEP += n0.to(tl.int64) * (K // 256)
    ZERO_STEP += n0.to(tl.int64) * (K // 256)
    row = tl.minimum(row, N - 1 - n0)
    code_at = row[None, :] * (K // G) + (tl.arange(0, 8) * GROUPS // 8)[:, None]
    step_at = row * (K // 256)

    # A constant that the compiler cannot see, by a load never made: as an immediate it would take its own instruction.
    nowhere = tl.full((1, 1, 1), 0, tl.int32)
    never = nowhere + n0 >= N
    magic = tl.load(WORDS + nowhere, mask=never, other=0x43004300)
    ones = _ones(4)
    acc = tl.full((8, BLOCK_N, BLOCK_M), 0, tl.float32)
    # Too narrow for the compiler's pipeline of asynchronous copies: codes and steps are fetched a block ahead here.
    scale, zero = tl.load(SCALE + first * GROUPS + code_at), tl.load(ZERO + first * GROUPS + code_at)
    scale_step, zero_step = tl.load(SCALE_STEP + first + step_at), tl.load(ZERO_STEP + first + step_at)
    for block in tl.range(first, last, num_stages=STAGES):
        words = tl.load(WORDS + block * 32 + words_at)
        x = tl.load(X + block * 256 + x_at, mask=m[:, None] < M, other=0)
        after = tl.minimum(block + 1, K // 256 - 1)
        scale_after, zero_after = tl.load(SCALE + after * GROUPS + code_at), tl.load(ZERO + after * GROUPS + code_at)
        scale_step_after, zero_step_after = tl.load(SCALE_STEP + after + step_at), tl.load(ZERO_STEP + after + step_at)

        # A word's codes are k = 0..7; code i and code i + 4 lie 16 bits apart, a pair of bf16 for one AND and one OR.
        words = tl.permute(tl.reshape(words, (BLOCK_N, 8, 4)), (1, 0, 2))
        w01 = _operand((words & 0x000F000F) | magic, ((words >> 4) & 0x000F000F) | magic, BLOCK_N, 4)
        w23 = _operand(((words >> 8) & 0x000F000F) | magic, ((words >> 12) & 0x000F000F) | magic, BLOCK_N, 4)
        x = tl.reshape(x, (BLOCK_M, 8, 4, 2, 2, 2))  # m, group, word, half, i // 2, i % 2
        x01, x23 = tl.split(tl.permute(x, (1, 2, 5, 3, 0, 4)))
        x01, x23 = tl.reshape(x01, (8, 16, BLOCK_M)), tl.reshape(x23, (8, 16, BLOCK_M))
        part = tl.dot(w23, x23, tl.dot(w01, x01))
        sum_x = _on_all_rows(tl.dot(ones, x23, tl.dot(ones, x01)), BLOCK_N, BLOCK_M)

        s = scale.to(tl.float32) * scale_step.to(tl.float32)[None, :]
        step = tl.broadcast_to(zero_step.to(tl.float32)[None, :], (8, BLOCK_N))
        z = tl.fma(zero.to(tl.float32), step, tl.full((8, BLOCK_N), 128.0, tl.float32))
        acc = _add_groups(acc, part, sum_x, s, z, BLOCK_N, BLOCK_M)
        scale, zero, scale_step, zero_step = scale_after, zero_after, scale_step_after, zero_step_after
    _store(OUT, acc, M, m, n0 + tile_row, N, BLOCK_N, BLOCK_M)


@triton.jit
def _int8_tile(
    X, Q, SCALE, ZERO, OUT, M, m0, first, last,
    N: tl.constexpr, K: tl.constexpr, G: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    N_WORDS: tl.constexpr = CHUNK // 4
    n0 = tl.program_id(0) * BLOCK_N
    row = tl.arange(0, BLOCK_N)
    tile_row = _tile_rows(row, BLOCK_N)
    m = m0 + tl.arange(0, BLOCK_M)
    word = tl.arange(0, 8 * N_WORDS)
    k = tl.arange(0, 8 * CHUNK)
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
    ones = _ones(N_WORDS)
    acc = tl.full((8, BLOCK_N, BLOCK_M), 0, tl.float32)
    group = tl.minimum((first * 8 + chunk) * CHUNK // G, K // G - 1)[:, None]
    scale, zero = tl.load(SCALE + row + group), tl.load(ZERO + row + group)
    for block in tl.range(first, last, num_stages=STAGES):
        if K % (8 * CHUNK) == 0:
            words = tl.load(WORDS + block * (8 * N_WORDS) + words_at)
            x = tl.load(X + block * (8 * CHUNK) + x_at, mask=m[:, None] < M, other=0)
        else:
            here = (block * (8 * N_WORDS) + word < K // 4)[None, :]
            words = tl.load(WORDS + block * (8 * N_WORDS) + words_at, mask=here, other=0)
            here = (block * (8 * CHUNK) + k < K)[None, :]
            x = tl.load(X + block * (8 * CHUNK) + x_at, mask=(m[:, None] < M) & here, other=0)
        group = tl.minimum(((block + 1) * 8 + chunk) * CHUNK // G, K // G - 1)[:, None]
        scale_after, zero_after = tl.load(SCALE + row + group), tl.load(ZERO + row + group)

        # A word's codes are k = 0..3, of two nibbles each; the XOR with 8 in the high ones adds 128 to the code.
        words = tl.permute(tl.reshape(words, (BLOCK_N, 8, N_WORDS)), (1, 0, 2))
        low = _operand((words & 0x000F000F) ^ magic, ((words >> 8) & 0x000F000F) ^ magic, BLOCK_N, N_WORDS)
        high = _operand(
            ((words >> 4) & 0x000F000F) ^ magic_high, ((words >> 12) & 0x000F000F) ^ magic_high, BLOCK_N, N_WORDS
        )
        x = tl.permute(tl.reshape(x, (BLOCK_M, 8, N_WORDS, 2, 2)), (1, 2, 4, 3, 0))  # chunk, word, odd, half, m
        x = tl.reshape(x, (8, CHUNK, BLOCK_M))
        x16 = (x.to(tl.float32) * 16).to(tl.bfloat16)
        part = tl.dot(high, x16, tl.dot(low, x))
        sum_x = _on_all_rows(tl.dot(ones, x), BLOCK_N, BLOCK_M)
        z = zero.to(tl.float32) + 2304.0
        acc = _add_groups(acc, part, sum_x, scale.to(tl.float32), z, BLOCK_N, BLOCK_M)
        scale, zero = scale_after, zero_after
    _store(OUT, acc, M, m, n0 + tile_row, N, BLOCK_N, BLOCK_M)


@triton.jit
def _int4_small_m_kernel(
    X, Q, SCALE, SCALE_STEP, ZERO, ZERO_STEP, OUT, M,
    N: tl.constexpr, K: tl.constexpr, G: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    m0 = tl.program_id(1) * 16
    first = tl.program_id(2) * (K // 256) // SPLITS
    last = (tl.program_id(2) + 1) * (K // 256) // SPLITS
    if M - m0 <= 8:  # half the products and the sums, each as below
        _int4_tile(
            X, Q, SCALE, SCALE_STEP, ZERO, ZERO_STEP, OUT, M, m0, first, last, N, K, G, BLOCK_N, 8, STAGES
        )  # fmt: skip
    else:
        _int4_tile(
            X, Q, SCALE, SCALE_STEP, ZERO, ZERO_STEP, OUT, M, m0, first, last, N, K, G, BLOCK_N, 16, STAGES
        )  # fmt: skip


@triton.jit
def _int8_small_m_kernel(
    X, Q, SCALE, ZERO, OUT, M,
    N: tl.constexpr, K: tl.constexpr, G: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    m0 = tl.program_id(1) * 16
    BLOCKS: tl.constexpr = (K + 8 * CHUNK - 1) // (8 * CHUNK)
    first = tl.program_id(2) * BLOCKS // SPLITS
    last = (tl.program_id(2) + 1) * BLOCKS // SPLITS
    if M - m0 <= 8:
        _int8_tile(X, Q, SCALE, ZERO, OUT, M, m0, first, last, N, K, G, CHUNK, BLOCK_N, 8, STAGES)
    else:
        _int8_tile(X, Q, SCALE, ZERO, OUT, M, m0, first, last, N, K, G, CHUNK, BLOCK_N, 16, STAGES)


@triton.jit
def _small_m_sum_kernel(PARTS, OUT, COUNT, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    # float32 [SPLITS, COUNT] -> [COUNT], in the order of K
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(PARTS + at, mask=at < COUNT, other=0)
    for _ in tl.static_range(1, SPLITS):
        PARTS += COUNT
        total += tl.load(PARTS + at, mask=at < COUNT, other=0)
    tl.store(OUT + at, total.to(OUT.dtype.element_ty), mask=at < COUNT)


def _int4_group(x: Tensor, qdata: Tensor, scale: Tensor, scale_step: Tensor, zero: Tensor, zero_step: Tensor) -> int:
    """The group size; raises where the shapes do not make an INT4 weight that ``x`` can be multiplied with."""
    n, k = qdata.shape[0], 2 * qdata.shape[1]
    if x.shape[1] != k or k % 256:
        raise ValueError(f"x has K = {x.shape[1]}, qdata {k}: they must agree and be a multiple of 256")
    if scale.shape != zero.shape or scale.shape[0] != n or scale.shape[1] not in (k // g for g in (32, 64, 128, 256)):
        raise ValueError(
            f"scale is {tuple(scale.shape)} and zero {tuple(zero.shape)}: "
            f"a weight of {n} x {k} has {n} x {k // 32} of each, or a group size of 64, 128 or 256"
        )
    if scale_step.shape != (n, k // 256) or zero_step.shape != (n, k // 256):
        raise ValueError(
            f"scale_step is {tuple(scale_step.shape)} and zero_step {tuple(zero_step.shape)}: "
            f"a weight of {n} x {k} has {n} x {k // 256} of each"
        )
    return k // scale.shape[1]


def _int8_group(x: Tensor, qdata: Tensor, scale: Tensor, zero: Tensor) -> int:
    """The group size; raises where the shapes do not make an INT8 weight that ``x`` can be multiplied with."""
    n, k = qdata.shape
    if x.shape[1] != k:
        raise ValueError(f"x has K = {x.shape[1]}, qdata {k}: they must agree")
    if scale.shape != zero.shape or scale.shape[0] != n or k % scale.shape[1]:
        raise ValueError(
            f"scale is {tuple(scale.shape)} and zero {tuple(zero.shape)}: "
            f"a weight of {n} x {k} has {n} of each, times a divisor of {k}"
        )
    return k // scale.shape[1]


def _check_contiguous(*weight: Tensor) -> None:
    for tensor in weight:
        if not tensor.is_contiguous():
            raise ValueError(
                f"a weight's tensor of {tuple(tensor.shape)} has strides {tensor.stride()}: not contiguous"
            )


def _launch(x: Tensor, n: int, blocks: int, choice: Blocks, run: Callable[..., None], add: Any) -> Tensor:
    """[M, N]: the output of ``run(out, grid, options)``, or the sum by the kernel ``add`` of its parts along K."""
    if x.dtype != torch.bfloat16:
        raise ValueError(f"x is {x.dtype}: the kernel takes torch.bfloat16")
    m = x.shape[0]
    programs = grid(m, n, blocks, choice)
    count = programs[2]
    options = {"SPLITS": count, "BLOCK_N": choice.n, "STAGES": choice.stages, "num_warps": _WARPS}
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if count == 1:
        run(out, programs, options)
        return out
    parts = torch.empty(count, m, n, dtype=torch.float32, device=x.device)
    run(parts, programs, options)
    add[((m * n + _SUM_BLOCK - 1) // _SUM_BLOCK,)](parts, out, m * n, SPLITS=count, BLOCK=_SUM_BLOCK)
    return out


def _launch_int4(
    kernel: Any, add: Any, x: Tensor, qdata: Tensor, scale: Tensor, scale_step: Tensor, zero: Tensor, zero_step: Tensor,
    choice: Blocks = INT4,
) -> Tensor:  # fmt: skip
    group = _int4_group(x, qdata, scale, scale_step, zero, zero_step)
    _check_contiguous(qdata, scale, scale_step, zero, zero_step)
    n, k = qdata.shape[0], x.shape[1]
    x = x.contiguous()

    def run(out: Tensor, programs: tuple, options: dict) -> None:
        kernel[programs](
            x, qdata, scale, scale_step, zero, zero_step, out, x.shape[0], N=n, K=k, G=group, **options
        )  # fmt: skip

    return _launch(x, n, k // 256, choice, run, add)


def _launch_int8(
    kernel: Any, add: Any, x: Tensor, qdata: Tensor, scale: Tensor, zero: Tensor, choice: Blocks = INT8
) -> Tensor:
    group = _int8_group(x, qdata, scale, zero)
    _check_contiguous(qdata, scale, zero)
    n, k = qdata.shape
    if group % 16:
        raise ValueError(f"the group size is {group}: the kernel takes multiples of 16")
    chunk = 16 if group % 32 else 32  # of K, by a warp
    x = x.contiguous()

    def run(out: Tensor, programs: tuple, options: dict) -> None:
        kernel[programs](x, qdata, scale, zero, out, x.shape[0], N=n, K=k, G=group, CHUNK=chunk, **options)

    return _launch(x, n, triton.cdiv(k, 8 * chunk), choice, run, add)


@triton_op("eagle3::int4_small_m", mutates_args={})
def int4_small_m(
    x: Tensor, qdata: Tensor, scale: Tensor, scale_step: Tensor, zero: Tensor, zero_step: Tensor
) -> Tensor:
    """``x @ w.T`` with ``w = (q - zero * zero_step) * (scale * scale_step)``; the weights are those of ExecuTorch.

    On CUDA the kernel of this module, on the host ``int4_reference``. One node of an exported program.

    Args:
        x: bfloat16 [M, K], K a multiple of 256; M may be dynamic
        qdata: uint8 [N, K / 2], the low 4 bits are the even k
        scale, zero: uint8 codes [N, K / G], G of 32 (or 64, 128, 256)
        scale_step, zero_step: float16 [N, K / 256]

    Returns:
        bfloat16 [M, N]; a row's bits do not depend on the other rows or their number

    Raises:
        ValueError: shapes that do not agree; on CUDA, another dtype of ``x`` or weights that are not contiguous
    """
    kernels = wrap_triton(_int4_small_m_kernel), wrap_triton(_small_m_sum_kernel)
    return _launch_int4(*kernels, x, qdata, scale, scale_step, zero, zero_step)


@triton_op("eagle3::int8_small_m", mutates_args={})
def int8_small_m(x: Tensor, qdata: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """``x @ w.T`` with ``w = (q - zero) * scale``; the weights are torchao's ``IntxUnpackedToInt8Tensor``.

    On CUDA the kernel of this module, on the host ``int8_reference``. One node of an exported program.

    Args:
        x: bfloat16 [M, K]; M may be dynamic
        qdata: int8 [N, K]
        scale: bfloat16 [N, K / G], G a multiple of 16 up to K
        zero: int8 [N, K / G]

    Returns:
        bfloat16 [M, N]; a row's bits do not depend on the other rows or their number

    Raises:
        ValueError: shapes that do not agree; on CUDA, another dtype of ``x``, a G that is no multiple of 16, or weights
            that are not contiguous
    """
    return _launch_int8(wrap_triton(_int8_small_m_kernel), wrap_triton(_small_m_sum_kernel), x, qdata, scale, zero)


@int4_small_m.register_kernel("cpu")
def int4_reference(
    x: Tensor, qdata: Tensor, scale: Tensor, scale_step: Tensor, zero: Tensor, zero_step: Tensor
) -> Tensor:
    """``int4_small_m`` in plain PyTorch: float32 on the dequantized weights, any floating dtype of ``x``."""
    group = _int4_group(x, qdata, scale, scale_step, zero, zero_step)
    q = torch.stack([qdata & 0xF, qdata >> 4], dim=-1).flatten(1).float()
    repeats = 256 // group
    s = scale.float() * scale_step.float().repeat_interleave(repeats, 1)
    z = zero.float() * zero_step.float().repeat_interleave(repeats, 1)
    w = (q - z.repeat_interleave(group, 1)) * s.repeat_interleave(group, 1)
    return (x.float() @ w.T).to(x.dtype)


@int8_small_m.register_kernel("cpu")
def int8_reference(x: Tensor, qdata: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """``int8_small_m`` in plain PyTorch: float32 on the dequantized weights, any floating dtype of ``x``, any G."""
    group = _int8_group(x, qdata, scale, zero)
    w = (qdata.float() - zero.float().repeat_interleave(group, 1)) * scale.float().repeat_interleave(group, 1)
    return (x.float() @ w.T).to(x.dtype)
