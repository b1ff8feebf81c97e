"""Linear layers of few rows over INT4 weights in Triton; each weight byte is read once for 16 rows.

The codes are those of ExecuTorch's ``CudaCoalescedInt4Tensor``, two per byte, in place in the checkpoint. Scales and
zero points are laid out for the kernel (``tensor.py``). ExecuTorch's own kernel serves up to 4 rows, and its time
grows with each row (pytorch/executorch PR 21456).

In bytes, a weight is 4 bits, plus two codes of 8 bits per group of 32 and two fp16 steps per 256: 0.578 bytes. A linear
of 5376 x 21504 (N x K, Gemma 4 31B's ``down_proj``) is 66.8 MB: 14 us at 4.8 TB/s, whatever the kernel. 8 rows add 0.34
MB of activations (read once for every 128 outputs, 14 MB, from L2), 0.09 MB of output and 1.0 MB of partial sums,
written and read. A warp's loads are whole lines of 128 bytes: 256 codes of an output and, up to 8 rows, 64 outputs'
scales and zero points.

Arithmetic, for a row x and a group g of K (``q``: codes; ``s``, ``z``: the group's scale and zero point)::

    y = sum over g of s * (sum over k of (128 + q) x  -  (128 + z) * sum over k of x)

The sums over k run on tensor cores, bf16 to float32, all else is float32: weights are never rounded. 128 + q comes from
the bits of q without a conversion, 0x4300 | q is bf16(128 + q) (Kim et al., "Who Says Elephants Can't Run", 2022,
do so in fp16). The main loop takes 2.5 to 2.6 instructions a weight for up to 8 rows and 3.8 to 4.0 for up to 16,
counted in the machine code for sm_80 to sm_120 (timed on an H200: measured.md of lowering/cuda).

A program takes a tile of 128 outputs, or half of one for up to 16 rows, and a run of blocks of 256 of K, 8 groups of
32, one to a warp: the groups are the batch dimension of a 3D ``tl.dot``. Scales and zero points are fetched a block
ahead, decoded once and given to the lanes that need them through shared memory, both numbers at once. The 8 sums are
added in pairs. Programs that divide K add their sums as ``sums`` says. No order depends on the number of rows, so a row
has the same bits in every call.
"""

from collections.abc import Callable, Sequence
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
    check_contiguous,
    on_all_rows,
    ones_operand,
    operand,
    sum_of_groups,
)
from eagle3.export.lowering.cuda.kernels.sums import (
    Division,
    gated,
    launch,
    place,
    run_of_blocks,
    store,
    takes_whole_tiles,
)

BLOCK = 256
"""The number of consecutive weights of an output that share their steps."""
TILE = 128
"""The number of outputs whose scales and zero points are stored together: the outputs of one program, or of two for 16
rows."""
MOST = 3
"""The most weights with the same input in one launch, which those of query, key and value need."""
INT4 = Blocks(n=TILE, stages=3)
"""Two programs fit on an SM of sm_80 and sm_90. The copies of a block are issued late in the loop, after its second
barrier, so that mostly one block is in flight, 16 KB of codes. One more block in flight took 2 to 5% longer on an H200,
since arithmetic is the limit, not memory."""
OUTPUTS = {8: TILE, 16: TILE // 2}
"""The outputs of a program, by its rows. With 16 rows and 128 outputs only one program fits on an SM. With 64, two fit
if there is one weight; three weights take 158 registers on sm_80."""


@triton.jit
def _terms(codes, steps, BLOCK_N: tl.constexpr):
    # uint16 [8, BLOCK_N], uint32 [BLOCK_N] -> -(128 + z) and s as float32 in the halves of 64 bits [8, BLOCK_N]
    scale_step = (steps & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    zero_step = (steps >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    s = (codes & 0xFF).to(tl.float32) * scale_step[None, :]
    # fma, so that nothing is left to fuse or not
    minus_step = tl.broadcast_to(-zero_step[None, :], (8, BLOCK_N))
    z = tl.fma((codes >> 8).to(tl.float32), minus_step, tl.full((8, BLOCK_N), -128.0, tl.float32))
    return (z.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | s.to(tl.uint32, bitcast=True)


@triton.jit
def add_half(acc, words, terms, x01, x23, sum_x, magic, BLOCK_M: tl.constexpr):
    # A word's codes are k = 0..7; code i and code i + 4 lie 16 bits apart, a pair of bf16 for one AND and one OR.
    words = tl.permute(tl.reshape(words, (64, 8, 4)), (1, 0, 2))
    w01 = operand((words & 0x000F000F) | magic, ((words >> 4) & 0x000F000F) | magic, 64, 4)
    w23 = operand(((words >> 8) & 0x000F000F) | magic, ((words >> 12) & 0x000F000F) | magic, 64, 4)
    part = tl.dot(w23, x23, tl.dot(w01, x01))
    z = tl.broadcast_to((terms >> 32).to(tl.uint32).to(tl.float32, bitcast=True), (8, 64, BLOCK_M))
    s = tl.broadcast_to(terms.to(tl.uint32).to(tl.float32, bitcast=True), (8, 64, BLOCK_M))
    return tl.fma(tl.fma(z, sum_x, part), s, acc)


@triton.jit
def place_of_tile(tile, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, BLOCK_N: tl.constexpr):
    # Which of the weights the tile is of, its first output among that one's, their number, and how many are before.
    # Pointers stay with the caller: PyTorch's analysis would take one given here for what the results come from, and
    # the weight for written, once something is stored at a place that depends on them.
    TILES0: tl.constexpr = (N0 + BLOCK_N - 1) // BLOCK_N
    TILES1: tl.constexpr = (N1 + BLOCK_N - 1) // BLOCK_N
    which, n0, outputs, before = 0, tile * BLOCK_N, N0, 0
    if N1:  # noqa: SIM102  (of the two conditions one is the compiler's)
        if tile >= TILES0:
            which, n0, outputs, before = 1, n0 - TILES0 * BLOCK_N, N1, N0
    if N2:  # noqa: SIM102
        if tile >= TILES0 + TILES1:
            which, n0, outputs, before = 2, n0 - TILES1 * BLOCK_N, N2, N0 + N1
    return which, n0, outputs, before


@triton.jit
def int4_small_m_kernel(
    X, Q0, Q1, Q2, CODES, STEPS, ARRIVED, PARTS, OUT, M,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, K: tl.constexpr, G: tl.constexpr, WHOLE: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = K // BLOCK_K
    GROUPS: tl.constexpr = BLOCK_K // G
    PROGRAMS: tl.constexpr = 128 // BLOCK_N  # of a tile
    tile, part, _ = place(WHOLE, SPLITS)
    first, last = run_of_blocks(tile, part, BLOCKS, WHOLE, SPLITS)
    m0 = tl.program_id(0) * BLOCK_M
    m = m0 + tl.arange(0, BLOCK_M)
    second = tile % PROGRAMS * 8  # where the tile's second half begins in each 16 rows
    tile = tile // PROGRAMS
    CODES = CODES.to(tl.pointer_type(tl.uint16), bitcast=True) + tile.to(tl.int64) * (BLOCKS * GROUPS * 128)
    STEPS = STEPS.to(tl.pointer_type(tl.uint32), bitcast=True) + tile.to(tl.int64) * (BLOCKS * 128)
    which, n0, outputs, before = place_of_tile(tile, N0, N1, N2, 128)
    Q = tl.where(which == 2, Q2, tl.where(which == 1, Q1, Q0))
    # A lane's rows of the tile (8 apart) are neighbours in N: its scales and zero points lie side by side.
    n = tl.arange(0, BLOCK_N)
    if PROGRAMS == 2:
        n = (n // 8) * 16 + n % 8 + second
    row = tl.arange(0, 64)
    row = (row % 8) * 16 + row // 8 + second  # and 8 more in the second half of 128 outputs
    # Offsets of 32 bits within the tile, from pointers of 64.
    X += m0.to(tl.int64) * K
    WORDS = Q.to(tl.pointer_type(tl.uint32), bitcast=True) + n0.to(tl.int64) * (K // 8)  # 8 codes each
    # Rows past the last are the last, fetched again (2 KB of a block's 20 with 4 rows), and not stored. A mask takes 1
    # to 5% more instructions, and with a gate more than 128 registers on sm_120.
    x_at = tl.minimum(tl.arange(0, BLOCK_M), M - 1 - m0)[:, None] * K + tl.arange(0, BLOCK_K)[None, :]
    if N0 % 128 == 0 and N1 % 128 == 0 and N2 % 128 == 0:
        words0_at = row[:, None] * (K // 8) + tl.arange(0, 32)[None, :]
        words1_at = words0_at + K
    else:  # outputs past the end read the last one
        last_row = outputs - 1 - n0
        words0_at = tl.minimum(row, last_row)[:, None] * (K // 8) + tl.arange(0, 32)[None, :]
        words1_at = tl.minimum(row + 8, last_row)[:, None] * (K // 8) + tl.arange(0, 32)[None, :]
    codes_at = (tl.arange(0, 8) * GROUPS // 8)[:, None] * 128 + n[None, :]

    # A constant that the compiler cannot see, by a load never made: as an immediate it would take its own instruction.
    nowhere = tl.full((1, 1, 1), 0, tl.int32)
    magic = tl.load(WORDS + nowhere, mask=nowhere + n0 >= outputs, other=0x43004300)
    ones = ones_operand(4)
    acc0 = tl.full((8, 64, BLOCK_M), 0, tl.float32)
    acc1 = tl.full((8, 64, BLOCK_M), 0, tl.float32)
    codes, steps = tl.load(CODES + first * (GROUPS * 128) + codes_at), tl.load(STEPS + first * 128 + n)
    for block in tl.range(first, last, num_stages=STAGES):
        words0 = tl.load(WORDS + block * 32 + words0_at)
        if PROGRAMS == 1:
            words1 = tl.load(WORDS + block * 32 + words1_at)
        x = tl.load(X + block * BLOCK_K + x_at)
        after = tl.minimum(block + 1, BLOCKS - 1)
        codes_after, steps_after = (
            tl.load(CODES + after * (GROUPS * 128) + codes_at),
            tl.load(STEPS + after * 128 + n),
        )

        x = tl.reshape(x, (BLOCK_M, 8, 4, 2, 2, 2))  # m, group, word, half, i // 2, i % 2
        x01, x23 = tl.split(tl.permute(x, (1, 2, 5, 3, 0, 4)))
        x01, x23 = tl.reshape(x01, (8, 16, BLOCK_M)), tl.reshape(x23, (8, 16, BLOCK_M))
        sum_x = on_all_rows(tl.dot(ones, x23, tl.dot(ones, x01)), 64, BLOCK_M)
        terms = _terms(codes, steps, BLOCK_N)
        if PROGRAMS == 1:
            terms = tl.permute(tl.reshape(terms, (8, 8, 2, 8)), (0, 3, 1, 2))
            terms, terms1 = tl.split(tl.reshape(terms, (8, 64, 1, 2)))
            acc1 = add_half(acc1, words1, terms1, x01, x23, sum_x, magic, BLOCK_M)
        else:
            terms = tl.reshape(tl.permute(tl.reshape(terms, (8, 8, 8)), (0, 2, 1)), (8, 64, 1))
        acc0 = add_half(acc0, words0, terms, x01, x23, sum_x, magic, BLOCK_M)
        codes, steps = codes_after, steps_after
    total = sum_of_groups(acc0, 64, BLOCK_M)
    n = n0 + row
    if PROGRAMS == 1:
        total = tl.join(total, sum_of_groups(acc1, 64, BLOCK_M))
        total = tl.reshape(tl.permute(total, (2, 0, 1)), (BLOCK_N, BLOCK_M))
        n = tl.arange(0, BLOCK_N)
        n = n0 + (n % 8) * 16 + n // 8
    store(OUT, PARTS, ARRIVED, total, M, m, before + n, n < outputs, N0 + N1 + N2, WHOLE, SPLITS, ACTIVATION)


def _launch_int4(
    kernel: Any, x: Tensor, qdata: Sequence[Tensor], codes: Tensor, steps: Tensor, arrived: Tensor,
    activation: str = "", choice: Blocks = INT4,
) -> Tensor:  # fmt: skip
    group = int4_group(x, qdata, codes, steps)
    check_contiguous(*qdata, codes, steps)
    x = x.contiguous()
    divided, run = small_m_run(kernel, x, qdata, codes, steps, arrived, group, activation, choice)
    outputs = sum(each.shape[0] for each in qdata)
    return launch(x, outputs, TILE, codes.shape[0], divided, ROWS, arrived, run, activation, TILE // OUTPUTS[ROWS[-1]])


def small_m_run(
    kernel: Any, x: Tensor, qdata: Sequence[Tensor], codes: Tensor, steps: Tensor, arrived: Tensor, group: int,
    activation: str = "", choice: Blocks = INT4,
) -> tuple[Division, Callable[[tuple, int, Tensor, Tensor], None]]:  # fmt: skip
    """Return the division of K, and a function that starts the kernel, ``run(grid, rows of a tile, out, parts)``; the
    grid has a program for each tile."""
    k = x.shape[1]
    weights, (n0, n1, n2) = as_most(qdata)
    divided = choice.division(codes.shape[0] * TILE, k // BLOCK, whole=takes_whole_tiles(n0, n1, n2))

    def run(programs: tuple, rows: int, out: Tensor, parts: Tensor) -> None:
        each = TILE // OUTPUTS[rows]
        kernel[(programs[0], programs[1] * each, programs[2])](
            x, *weights, codes, steps, arrived, parts, out, x.shape[0], N0=n0, N1=n1, N2=n2, K=k, G=group,
            WHOLE=divided.whole * each, SPLITS=divided.parts, BLOCK_M=rows, BLOCK_N=OUTPUTS[rows], BLOCK_K=BLOCK,
            STAGES=choice.stages, ACTIVATION=activation, num_warps=WARPS,
        )  # fmt: skip

    return divided, run


def as_most(qdata: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Return ``MOST`` weights and the number of outputs of each, as the kernels take them. Missing weights have 0
    outputs."""
    missing = MOST - len(qdata)
    return (*qdata, *[qdata[0]] * missing), (*(each.shape[0] for each in qdata), *[0] * missing)


def int4_group(x: Tensor, qdata: Sequence[Tensor], codes: Tensor, steps: Tensor) -> int:
    """Return the group size. Raises ValueError if the shapes are not those of INT4 weights that fit ``x``."""
    k, widths = x.shape[1], {2 * each.shape[1] for each in qdata}
    if not 1 <= len(qdata) <= MOST:
        raise ValueError(f"{len(qdata)} weights: the kernel takes 1 to {MOST}")
    if widths != {k} or k % BLOCK:
        given = ", ".join(map(str, sorted(widths)))
        raise ValueError(f"x has K = {k}, qdata {given}: they must agree and be a multiple of {BLOCK}")
    tiles, blocks = sum(triton.cdiv(each.shape[0], TILE) for each in qdata), k // BLOCK
    groups = codes.shape[2] if codes.dim() == 5 else 0
    outputs = " + ".join(str(each.shape[0]) for each in qdata)
    if groups not in (1, 2, 4, 8) or codes.shape != (tiles, blocks, groups, TILE, 2):
        raise ValueError(
            f"codes are {tuple(codes.shape)}: weights of {outputs} x {k} have {tiles} x {blocks} x 8 x {TILE} x 2, or "
            "1, 2 or 4 for the 8"
        )
    if steps.shape != (tiles, blocks, TILE, 2):
        raise ValueError(
            f"steps are {tuple(steps.shape)}: weights of {outputs} x {k} have {tiles} x {blocks} x {TILE} x 2"
        )
    return BLOCK // groups


@triton_op("eagle3::int4_small_m", mutates_args={})
def int4_small_m(
    x: Tensor, qdata: Sequence[Tensor], codes: Tensor, steps: Tensor, arrived: Tensor, activation: str = ""
) -> Tensor:
    """Compute ``x @ w.T`` with ``w = (q - zero) * scale``; zero and scale are a code times a step. The results of
    several weights lie side by side in the last dimension. They may be ``gated`` (see ``sums``).

    On CUDA this is the kernel of this module, on the host ``int4_reference``. It is one node of an exported program and
    one launch.

    Args:
        x: bfloat16 [M, K], K a multiple of 256; M may be dynamic
        qdata: uint8 [N, K / 2] of each weight, 1 to ``MOST`` of them; the low 4 bits are the even k
        codes: uint8 [tiles, K / 256, 256 / G, 128, 2] of scale and zero, G of 32 (or 64, 128, 256); a tile is 128
            outputs of one weight; the last tile is padded
        steps: float16 [tiles, K / 256, 128, 2] of scale and zero
        arrived: ``sums.counters()``, zero again when it returns
        activation: applied to the gate, the first half of the outputs; "": the outputs are not gated

    Returns:
        bfloat16 [M, N of all], gated half of them; a row's bits do not depend on the other rows or their number

    Raises:
        ValueError: shapes that do not agree; on CUDA, another dtype of ``x``, weights that are not contiguous, more
            rows than there are counters for, or halves of other than whole tiles
    """
    return _launch_int4(wrap_triton(int4_small_m_kernel), x, qdata, codes, steps, arrived, activation)


@int4_small_m.register_kernel("cpu")
def int4_reference(
    x: Tensor,
    qdata: Sequence[Tensor],
    codes: Tensor,
    steps: Tensor,
    arrived: Tensor | None = None,
    activation: str = "",
) -> Tensor:
    """``int4_small_m`` in plain PyTorch: float32 on the dequantized weights, any floating dtype of ``x``."""
    int4_group(x, qdata, codes, steps)
    products = [(x.float() @ w.T).to(x.dtype) for w in dequantized(qdata, codes, steps)]
    return gated(torch.cat(products, 1), activation)


def dequantized(qdata: Sequence[Tensor], codes: Tensor, steps: Tensor) -> list[Tensor]:
    """Return each weight as float32 [N, K]."""
    repeats = codes.shape[2]
    found, first = [], 0
    for each in qdata:
        last = first + triton.cdiv(each.shape[0], TILE)
        scale, scale_step, zero, zero_step = untiled(codes[first:last], steps[first:last], each.shape[0])
        q = torch.stack([each & 0xF, each >> 4], dim=-1).flatten(1).float()
        s = scale.float() * scale_step.float().repeat_interleave(repeats, 1)
        z = zero.float() * zero_step.float().repeat_interleave(repeats, 1)
        group = BLOCK // repeats
        found.append((q - z.repeat_interleave(group, 1)) * s.repeat_interleave(group, 1))
        first = last
    return found


def tiled(scale: Tensor, scale_step: Tensor, zero: Tensor, zero_step: Tensor) -> tuple[Tensor, Tensor]:
    """Return the kernel's ``codes`` and ``steps`` for the parts of a ``CudaCoalescedInt4Tensor``: uint8 codes
    [N, K / G] and float16 steps [N, K / 256]."""
    blocks = scale_step.shape[1]
    codes = torch.stack([scale, zero], dim=-1).unflatten(1, (blocks, -1))
    return in_tiles(codes), in_tiles(torch.stack([scale_step, zero_step], dim=-1)[:, :, None]).squeeze(2)


def untiled(codes: Tensor, steps: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Invert ``tiled``: return ``scale``, ``scale_step``, ``zero``, ``zero_step``."""
    (scale, zero), (scale_step, zero_step) = (
        in_rows(each, n).flatten(1, 2).unbind(-1) for each in (codes, steps.unsqueeze(2))
    )
    return scale, scale_step, zero, zero_step


def in_tiles(values: Tensor) -> Tensor:
    """Rearrange [N, blocks, groups, c] to [tiles, blocks, groups, TILE, c], with padding in the last tile. The c
    values, 1 to 4 bytes in all, are moved as one number, which is faster."""
    n, blocks, groups, count = values.shape
    number = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[count * values.element_size()]
    values, kind = values.contiguous().view(number).squeeze(-1), values.dtype
    values = torch.nn.functional.pad(values, (0, 0, 0, 0, 0, -n % TILE)).view(-1, TILE, blocks, groups)
    return values.permute(0, 2, 3, 1).contiguous().view(kind).unflatten(-1, (TILE, count))


def in_rows(values: Tensor, n: int) -> Tensor:
    """Invert ``in_tiles`` for ``n`` outputs."""
    return values.permute(0, 3, 1, 2, 4).flatten(0, 1)[:n]
