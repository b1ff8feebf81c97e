"""Linear layers of many rows over INT4 weights in records (``layout.py``); each weight is decoded while it is
multiplied.

The kernel is that of ``tiles/matmul.py`` for another layout: weights are decoded and rounded alike, so both give the
same bits. A group of a record is 512 consecutive bytes, which a warp loads at once. The codes of a word lie 4 and 16
bits apart, so one AND selects a denormal number without a shift for the second of a pair.

Up to 32 rows use the small-M kernel of ``kernel.py`` in tiles of 16.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton
from torch.nn import functional as F

from eagle3.export.lowering.cuda.kernels.int4.records.kernel import Traced, outputs_of, records_run
from eagle3.export.lowering.cuda.kernels.int4.records.layout import dequantized
from eagle3.export.lowering.cuda.kernels.int4.tiles.kernel import BLOCK
from eagle3.export.lowering.cuda.kernels.int4.tiles.matmul import decoded, terms_of
from eagle3.export.lowering.cuda.kernels.large_m import PROGRAM, TILE, finish, halves, launch, never


@triton.jit
def _int4_records_matmul_kernel(
    X, RECORDS, ARRIVED, PARTS, OUT, M,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, DIVIDED: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = K // 256
    SIZE: tl.constexpr = 1184  # words of a record
    INNER: tl.constexpr = 256 // BLOCK_K
    parts = tl.num_programs(2)
    first = tl.program_id(2) * BLOCKS // parts * INNER
    last = (tl.program_id(2) + 1) * BLOCKS // parts * INNER
    m0 = tl.program_id(0) * BLOCK_M
    n0 = tl.program_id(1) * BLOCK_N
    # Offsets of 32 bits within the tile, from pointers of 64; rows and records past the end read the last one.
    X += m0.to(tl.int64) * K
    RECORDS = RECORDS.to(tl.pointer_type(tl.uint32), bitcast=True) + n0.to(tl.int64) * (BLOCKS * SIZE // 32)
    SCALES = RECORDS.to(tl.pointer_type(tl.uint16), bitcast=True)
    last_record = (N - 1 - n0) // 32
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, 128)
    # Rows of the tile are [record 4][mid 4][r 8]: a lane's four rows of a record, 8 apart, have neighbouring words.
    own = n // 32 * 32 + n % 8 * 4 + n % 32 // 8  # the output of each row
    x_at = tl.minimum(m, M - 1 - m0)[:, None] * K + tl.arange(0, 32)[None, :]
    piece = tl.arange(0, 8)  # record and group
    piece = tl.minimum(piece // 2, last_record) * (BLOCKS * SIZE) + piece % 2 * 128
    words_at = piece[:, None] + tl.arange(0, 128)[None, :]
    record = tl.minimum(own // 32, last_record) * (BLOCKS * SIZE)
    half = (32 * tl.arange(0, 2))[None, :]
    code_at = (2 * record + 2048 + own % 32)[:, None]
    step_at = (record + 1152 + own % 32)[:, None] + 0 * half

    four, odd = tl.arange(0, 4), tl.arange(0, 2)
    nowhere = tl.minimum(N - 1 - n0, 0)
    shift = never(RECORDS, four, nowhere, (4 * four).to(tl.uint32))
    mask = never(RECORDS, odd, nowhere, (0xF + 0xEFFF1 * odd).to(tl.uint32))
    power = never(RECORDS, odd, nowhere, ((127 + 124 - 16 * odd) << 23).to(tl.uint32)).to(tl.float32, bitcast=True)
    acc = tl.full((128, BLOCK_M), 0, tl.float32)
    code = tl.load(SCALES + first // INNER * (2 * SIZE) + half + code_at)
    step = tl.load(RECORDS + first // INNER * SIZE + step_at)
    for block in tl.range(first, last, num_stages=STAGES):
        k = block * BLOCK_K
        words = tl.load(RECORDS + block // INNER * SIZE + block % INNER * 256 + words_at)
        x0, x1 = tl.load(X + k + x_at), tl.load(X + k + 32 + x_at)
        after = tl.minimum(block + 1, K // BLOCK_K - 1)
        code_after = tl.load(SCALES + after // INNER * (2 * SIZE) + after % INNER * 64 + half + code_at)
        step_after = tl.load(RECORDS + after // INNER * SIZE + step_at)
        terms0, terms1 = terms_of(code, step)
        words = tl.permute(tl.reshape(words, (4, 2, 8, 4, 4)), (0, 4, 2, 1, 3))  # record, mid, r, group, c
        words0, words1 = halves(tl.reshape(words, (128, 8)), 128, 4)
        acc = tl.dot(decoded(words0, terms0, shift, mask, power), tl.trans(x0), acc)
        acc = tl.dot(decoded(words1, terms1, shift, mask, power), tl.trans(x1), acc)
        code, step = code_after, step_after

    acc = tl.reshape(tl.permute(tl.reshape(acc, (4, 4, 8, BLOCK_M)), (0, 2, 1, 3)), (128, BLOCK_M))
    finish(OUT, PARTS, ARRIVED, acc, M, m0 + m, n0 + n, n0 + n < N, N, BLOCK_M, DIVIDED)


def _launch_matmul(
    kernel: Any, few: Any, x: Tensor, packed: Tensor, arrived: Tensor, most_rows: int = 8, count: Any = None
) -> Tensor:
    """Launch the kernel, or ``few``, the small-M kernel, for up to 32 rows. ``count`` is the number of programs along
    K; None means ``parts_of_k``."""
    n, k = outputs_of(x, packed), x.shape[1]
    # One tensor for both kernels, as in ``int4_matmul``.
    x = x.contiguous().as_strided((*x.shape, 1), (k, 1, 1))
    short = records_run(few, x, packed, arrived, most_rows)

    def run(programs: tuple, out: Tensor, parts: Tensor, divided: bool) -> None:
        kernel[programs](x, packed, arrived, parts, out, x.shape[0], N=n, K=k, DIVIDED=divided, **PROGRAM)

    return launch(x, n, triton.cdiv(n, TILE), k // BLOCK, arrived, run, count, short)


@triton_op("eagle3::int4_records_matmul", mutates_args={})
def int4_records_matmul(x: Tensor, packed: Tensor, arrived: Tensor, most_rows: int) -> Tensor:
    """Compute ``x @ w.T`` with ``w = (q - zero) * scale`` in float32, rounded to bfloat16.

    On CUDA this is the kernel of this module, or that of ``int4_records_small_m`` for up to 32 rows; on the host it
    multiplies the dequantized weights. It is one node of an exported program and one launch. The arguments are those of
    ``int4_records_small_m``. Beyond 32 rows weights are rounded, and a row's bits depend on the number of rows, which
    decides how K is divided.

    Raises:
        ValueError: shapes that do not agree; on CUDA, another dtype of ``x``, or records that are not contiguous
    """
    return _launch_matmul(wrap_triton(_int4_records_matmul_kernel), Traced(), x, packed, arrived, most_rows)


@int4_records_matmul.register_kernel("cpu")
def records_matmul_reference(x: Tensor, packed: Tensor, arrived: Tensor | None = None, most_rows: int = 8) -> Tensor:
    """``int4_records_matmul`` in plain PyTorch, any floating dtype of ``x``."""
    outputs_of(x, packed)
    return F.linear(x, dequantized(packed).bfloat16().to(x.dtype))
