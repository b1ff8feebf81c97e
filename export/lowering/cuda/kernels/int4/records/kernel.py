"""Linear layers of few rows over INT4 weights in records (``layout.py``): an alternative to the kernel for tiles, with
fewer instructions per weight and more programs on a multiprocessor. ``eagle3-export --int4-layout
records`` takes it. It was never timed; ``scripts/gpu/gpu_tournament.py`` times both.

Words do not pass through shared memory: a warp loads 512 consecutive bytes, which are the operands of its matrix
instructions, and a program's run of blocks is two stretches of memory.

Arithmetic, for a row x and a group g of K (``q``: codes; ``s``, ``z``: the group's scale and zero point)::

    y = sum over g of s * (sum over k of q x  -  z * sum over k of x)

A code in bits 0 to 3 of a bfloat16 is q * 2^-133, one in bits 4 to 7 is q * 2^-129: subnormal numbers, for which a code
takes no instruction but its AND. x is multiplied by 2^100 or 2^96 and sums by 2^33 at the end, all of them exactly for
|x| < 2^27; larger ones make infinities. The sums over k run on tensor cores, bf16 to float32, all else is float32:
weights are not rounded.

A tile is 32 outputs of the first half of all outputs and the same 32 of the second, which are gate and up of a gated
MLP. All blocks of all tiles are shared evenly among the programs, in order; a tile that several programs share is added
by the last of them in the order of K. No order depends on the number of rows, so a row has the same bits in every call.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.library import triton_op, wrap_triton

from eagle3.export.lowering.cuda.kernels.int4.records.layout import OUTPUTS, PAIR, RECORD, dequantized
from eagle3.export.lowering.cuda.kernels.int4.tiles.kernel import BLOCK
from eagle3.export.lowering.cuda.kernels.l2 import ask_l2, of_next
from eagle3.export.lowering.cuda.kernels.small_m import (
    ROWS,
    WARPS,
    check_contiguous,
    on_all_rows,
    operand,
    sum_of_groups,
)
from eagle3.export.lowering.cuda.kernels.sums import COUNTERS, arrive, even_programs, gate_of, gated, row_tiles

TOGETHER = {8: 3, 16: 2}
"""The number of programs that fit on a multiprocessor, by the most rows of any call, at 80 and 128 registers a
thread."""
REGISTERS = {8: 80, 16: 128}
"""The most registers a thread, which the compiler is told, by the rows of a tile."""
LEVERS = {"EARLY": True, "FIRST": 3}
"""The constants of a kernel that loads its first weights before it waits for the kernel in front, and asks L2 for three
blocks of them. AHEAD stays 0 until it is timed: with 4 the loop has 155 instructions instead of 138."""
UP: tl.constexpr = tl.constexpr(8589934592.0)  # 2^33
LOW: tl.constexpr = tl.constexpr(1.2676506002282294e30)  # 2^100
HIGH: tl.constexpr = tl.constexpr(7.922816251426434e28)  # 2^96


class Shares(NamedTuple):
    """A matmul whose blocks are shared evenly among ``count`` programs; up to ``parts`` of them share a tile."""

    count: int
    parts: int

    def programs(self, _tiles: int) -> tuple[int, int]:
        """Return the two grid axes after that of the tiles of rows, as ``sums.Division`` does."""
        return self.count, 1


def shares_here(n: int, k: int, most_rows: int) -> Shares:
    """Return the shares of a weight [n, k] on the GPUs that ``sums.made_for`` names. ``most_rows``, 8 or 16, is the
    most rows of any call with this weight."""
    return shares(n, k, even_programs(TOGETHER[most_rows], f"{n} x {k}"))


@cache
def shares(n: int, k: int, programs: int) -> Shares:
    """Return the shares of a weight [n, k] for at most ``programs`` programs."""
    blocks = k // BLOCK
    tiles = n // PAIR
    programs = min(programs, tiles * blocks)

    def of(block: int) -> int:  # the program that computes the block
        return ((block + 1) * programs - 1) // (tiles * blocks)

    parts = max(of((tile + 1) * blocks - 1) - of(tile * blocks) + 1 for tile in range(tiles))
    return Shares(programs, parts)


@triton.jit
def _product(words, x0, x1, low, high):
    # uint32 [8 groups, 8 r, 4 c, 4 mid], bf16 [8, 16, M] twice -> float32 [8, 32 (mid, r), M], by 2^-33
    words = tl.reshape(tl.permute(words, (0, 3, 1, 2)), (8, 32, 4))
    w0 = operand(words & low, words & high, 32, 4)
    words = words >> 8
    w1 = operand(words & low, words & high, 32, 4)
    return tl.dot(w1, x1, tl.dot(w0, x0))


@triton.jit
def _terms(codes, steps):
    # uint32 [8, 32] of two outputs' codes, [8, 32, 2] of their steps -> -z and s in the halves of 64 bits [8, 32, 2]
    scale_step = (steps & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    zero_step = (steps >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    # Bytes of one register, which a conversion selects: codes of 16 bits would take instructions to select them.
    s = tl.join(codes & 0xFF, codes >> 16 & 0xFF).to(tl.float32) * scale_step
    z = tl.join(codes >> 8 & 0xFF, codes >> 24).to(tl.float32) * (zero_step * -1.0)
    return (z.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | s.to(tl.uint32, bitcast=True)


@triton.jit
def _scaled(acc, part, terms, sum_x, BLOCK_M: tl.constexpr):
    z = tl.broadcast_to((terms >> 32).to(tl.uint32).to(tl.float32, bitcast=True), (8, 32, BLOCK_M))
    s = tl.broadcast_to(terms.to(tl.uint32).to(tl.float32, bitcast=True), (8, 32, BLOCK_M))
    return tl.fma(tl.fma(z, sum_x, part), s, acc)


@triton.jit
def _inputs(X, low, high, BLOCK_M: tl.constexpr):
    # bf16 [8 groups, M, 4 c, 8 of a word]; a thread loads what it multiplies, of 16 rows from the first 8 and the last
    x = tl.load(X + low)
    if BLOCK_M == 16:
        x = tl.reshape(tl.permute(tl.join(x, tl.load(X + high)), (0, 4, 1, 2, 3)), (8, 16, 4, 8))
    return x


@triton.jit
def _operands(x, BLOCK_M: tl.constexpr):
    # bf16 [8 groups, M, 4 c, 8 of a word] -> bf16 [8, 16, M] twice, multiplied
    x0, x1 = tl.split(tl.permute(tl.reshape(x, (8, BLOCK_M, 4, 2, 4)), (0, 2, 4, 1, 3)))  # g, c, 4 of a word, m
    high = tl.arange(0, 16)[None, :, None] // 2 % 2 == 1
    power = tl.where(high, HIGH, LOW).to(tl.bfloat16)
    return tl.reshape(x0, (8, 16, BLOCK_M)) * power, tl.reshape(x1, (8, 16, BLOCK_M)) * power


@triton.jit
def int4_records_small_m_kernel(
    X, RECORDS, NEXT, ARRIVED, PARTS, OUT, M,
    N: tl.constexpr, K: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SHARED: tl.constexpr, AHEAD: tl.constexpr, FIRST: tl.constexpr, OF_NEXT: tl.constexpr,
    EARLY: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    # L2 is asked for AHEAD blocks ahead of the loads (a multiple of 4, which are asked for at once), for FIRST blocks
    # before the wait for x, and by each program for OF_NEXT bytes of the next matmul's weights before it adds sums.
    BLOCKS: tl.constexpr = K // BLOCK_K
    TOTAL: tl.constexpr = N // BLOCK_N * BLOCKS
    SIZE: tl.constexpr = 1184  # words of a record
    HALF: tl.constexpr = TOTAL * SIZE  # from a record of the first half of outputs to that of the second
    pid = tl.program_id(1)
    m0 = tl.program_id(0) * BLOCK_M
    start = (pid.to(tl.int64) * TOTAL // PROGRAMS).to(tl.int32)
    end = ((pid.to(tl.int64) + 1) * TOTAL // PROGRAMS).to(tl.int32)
    # The program's own stretch: offsets of 32 bits from a pointer of 64.
    RECORDS = RECORDS.to(tl.pointer_type(tl.uint32), bitcast=True) + start.to(tl.int64) * SIZE
    X += m0.to(tl.int64) * K
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if FIRST > 0:  # noqa: SIM102  (of the two conditions one is the compiler's)
        if end - start >= FIRST:  # a shorter share could end the weights
            ask_l2(RECORDS, FIRST * SIZE * 4)
            ask_l2(RECORDS + HALF, FIRST * SIZE * 4)
    g, four = tl.arange(0, 8), tl.arange(0, 4)
    word_at = (g * 128)[:, None, None, None] + (tl.arange(0, 8) * 16)[None, :, None, None]
    word_at = word_at + (four * 4)[None, None, :, None] + four[None, None, None, :]
    n = tl.arange(0, 32)  # two outputs, with neighbouring codes and steps
    half = n // 16 * HALF
    code_at = half[None, :] + 1024 + g[:, None] * 16 + (n % 16)[None, :]
    step_at = (half + n % 16 * 2)[None, :, None] + 1152 + tl.arange(0, 2)[None, None, :] + 0 * g[:, None, None]
    x_at = (g * 32)[:, None, None, None] + (four * 8)[None, None, :, None] + g[None, None, None, :]
    # Rows past the last are the last, of the same lines, and not stored.
    low_at = x_at + (tl.minimum(g, M - 1 - m0) * K)[None, :, None, None]
    high_at = x_at + (tl.minimum(g + 8, M - 1 - m0) * K)[None, :, None, None]
    # Constants that the compiler cannot see, by loads never made: it would take the halves of a word apart.
    nowhere = tl.full((1, 1, 1), 0, tl.int32)
    low = tl.load(RECORDS + nowhere, mask=nowhere + pid >= PROGRAMS, other=0x000F000F)
    high = tl.load(RECORDS + nowhere, mask=nowhere + pid >= PROGRAMS, other=0x00F000F0)
    # 1 as weights are 1: of x it makes what -z is multiplied by. A -1 takes more instructions.
    ones = operand(tl.full((8, 16, 4), 0x00010001, tl.uint32), tl.full((8, 16, 4), 0x00100010, tl.uint32), 16, 4)
    a0 = tl.load(RECORDS + word_at, cache_modifier=".cg")
    a1 = tl.load(RECORDS + HALF + word_at, cache_modifier=".cg")
    codes, steps = tl.load(RECORDS + code_at), tl.load(RECORDS + step_at)
    tile, k = start // BLOCKS, start % BLOCKS
    left = end - start
    if EARLY:
        tl.extra.cuda.gdc_wait()
    x = _inputs(X + k * BLOCK_K, low_at, high_at, BLOCK_M)
    while left > 0:
        acc0 = tl.full((8, 32, BLOCK_M), 0, tl.float32)
        acc1 = acc0
        last = tl.minimum(BLOCKS, k + left)
        for block in tl.range(k, last, num_stages=1):
            left -= 1
            if left > 0:  # nothing is read past the program's last record
                RECORDS += SIZE
            after = tl.where(block + 1 < BLOCKS, block + 1, 0)  # of this tile, or the first of the next
            x0, x1 = _operands(x, BLOCK_M)
            part0, part1 = _product(a0, x0, x1, low, high), _product(a1, x0, x1, low, high)
            a0 = tl.load(RECORDS + word_at, cache_modifier=".cg")
            a1 = tl.load(RECORDS + HALF + word_at, cache_modifier=".cg")
            sum_x = on_all_rows(tl.dot(ones, x1, tl.dot(ones, x0)), 32, BLOCK_M)
            terms = _terms(codes, steps)
            codes, steps = tl.load(RECORDS + code_at), tl.load(RECORDS + step_at)
            x = _inputs(X + after * BLOCK_K, low_at, high_at, BLOCK_M)
            if AHEAD > 0:  # noqa: SIM102
                if (left % 4 == 0) & (left >= AHEAD + 4):
                    ask_l2(RECORDS + AHEAD * SIZE, 4 * SIZE * 4)
                    ask_l2(RECORDS + HALF + AHEAD * SIZE, 4 * SIZE * 4)
            terms = tl.permute(tl.reshape(terms, (8, 2, 8, 4)), (0, 3, 2, 1))  # group, mid, r, half
            t0, t1 = tl.split(tl.reshape(terms, (8, 32, 1, 2)))
            acc0 = _scaled(acc0, part0, t0, sum_x, BLOCK_M)
            acc1 = _scaled(acc1, part1, t1, sum_x, BLOCK_M)
        if OF_NEXT > 0:  # noqa: SIM102
            if left == 0:
                ask_l2(NEXT.to(tl.uint64) + pid.to(tl.uint64) * OF_NEXT, OF_NEXT)
        total = tl.join(sum_of_groups(acc0, 32, BLOCK_M), sum_of_groups(acc1, 32, BLOCK_M))  # (mid, r), m, half
        _finish(
            OUT, PARTS, ARRIVED, total * UP, tile, m0 + tl.arange(0, BLOCK_M), M, pid, N, TOTAL, BLOCKS, PROGRAMS,
            BLOCK_M, SHARED, ACTIVATION,
        )  # fmt: skip
        tile += 1
        k = 0


@triton.jit
def _finish(
    OUT, PARTS, ARRIVED, total, tile, m, M, pid, N: tl.constexpr, TOTAL: tl.constexpr, BLOCKS: tl.constexpr,
    PROGRAMS: tl.constexpr, BLOCK_M: tl.constexpr, SHARED: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    # Stores a tile's sums; the last of the programs that share the tile adds them first, in the order of K.
    total = tl.reshape(total, (4, 8, BLOCK_M, 2))
    total = tl.reshape(tl.permute(total, (2, 3, 1, 0)), (BLOCK_M, 64))  # m, (half, r, mid)
    n = tl.arange(0, 64)
    at = m[:, None].to(tl.int64) * N + (n // 32 * (N // 2) + tile * 32 + n % 32)[None, :]
    here = (m < M)[:, None]
    whole = True
    if SHARED:
        first = tile.to(tl.int64) * BLOCKS
        lowest = ((first * PROGRAMS + PROGRAMS - 1) // TOTAL).to(tl.int32)  # the program of the tile's first block
        highest = (((first + BLOCKS) * PROGRAMS - 1) // TOTAL).to(tl.int32)  # and of its last
        whole = lowest == highest
        if not whole:
            size = tl.full((), N, tl.int64) * M
            tl.store(PARTS + (pid - lowest) * size + at, total, mask=here)
            counter = ARRIVED + tl.program_id(0) * (N // 64) + tile
            if arrive(counter) == highest - lowest:
                whole = True
                total = tl.load(PARTS + at, mask=here, other=0, cache_modifier=".cg")
                for part in tl.range(1, highest - lowest + 1):
                    total += tl.load(PARTS + part * size + at, mask=here, other=0, cache_modifier=".cg")
                tl.store(counter, 0)
    if whole:
        if ACTIVATION == "":
            tl.store(OUT + at, total.to(OUT.dtype.element_ty), mask=here)
        else:
            gate, up = tl.split(tl.permute(tl.reshape(total, (BLOCK_M, 2, 32)), (0, 2, 1)))
            place = m[:, None].to(tl.int64) * (N // 2) + (tile * 32 + tl.arange(0, 32))[None, :]
            tl.store(OUT + place, gate_of(gate, up, ACTIVATION).to(OUT.dtype.element_ty), mask=here)


def _launch_records(
    kernel: Any, x: Tensor, packed: Tensor, arrived: Tensor, activation: str = "", most_rows: int = 8,
    following: Tensor | None = None, **asked: Any,
) -> Tensor:  # fmt: skip
    """Return bfloat16 [M, N] of ``x`` [M, K], or [M, N / 2] with an ``activation``.

    ``most_rows``, 8 or 16, is the most rows of any call with this weight. It decides the number of programs, and so the
    order of the sums. ``following`` is the next matmul's weight, which L2 is asked for. ``asked`` gives the kernel's
    ``AHEAD``, ``FIRST``, ``OF_NEXT`` and ``EARLY``; by default ``OF_NEXT`` is ``of_next``, the others are 0. Raises
    ValueError for another dtype of ``x``, a weight of another K, and more rows than there are counters for.
    """
    m, n = x.shape[0], outputs_of(x, packed)
    if x.dtype != torch.bfloat16:
        raise ValueError(f"x is {x.dtype}: the kernel takes torch.bfloat16")
    out = torch.empty(m, n // 2 if activation else n, dtype=x.dtype, device=x.device)
    if statically_known_true(m == 0):
        return out
    most_tiles = COUNTERS // (n // PAIR)
    if not statically_known_true((m + most_rows - 1) // most_rows <= most_tiles):
        raise ValueError(f"{m} rows of {n} outputs: the kernel takes {most_tiles * most_rows} rows of them")
    share, run = records_run(kernel, x, packed, arrived, most_rows, activation, following, **asked)
    parts = torch.empty(share.parts, m, n, dtype=torch.float32, device=x.device) if share.parts > 1 else arrived
    for rows, count in row_tiles(m, [size for size in ROWS if size <= most_rows]):
        run((count, *share.programs(n // PAIR)), rows, out, parts)
    return out


def records_run(
    kernel: Any, x: Tensor, packed: Tensor, arrived: Tensor, most_rows: int, activation: str = "",
    following: Tensor | None = None, **asked: Any,
) -> tuple[Shares, Callable[[tuple, int, Tensor, Tensor], None]]:  # fmt: skip
    """Return the shares of the blocks, and a function that starts the kernel, ``run(grid, rows of a tile, out,
    parts)``."""
    check_contiguous(packed)
    n, k = outputs_of(x, packed), x.shape[1]
    share, x = shares_here(n, k, most_rows), x.contiguous()
    constants = {"AHEAD": 0, "FIRST": 0, "OF_NEXT": of_next(following, share.count), "EARLY": False} | asked

    def run(programs: tuple, rows: int, out: Tensor, parts: Tensor) -> None:
        kernel[programs](
            x, packed, packed if following is None else following, arrived, parts, out, x.shape[0], N=n, K=k,
            PROGRAMS=share.count, SHARED=share.parts > 1, BLOCK_M=rows, BLOCK_N=PAIR, BLOCK_K=BLOCK,
            ACTIVATION=activation, num_warps=WARPS, maxnreg=REGISTERS[rows], **constants,
        )  # fmt: skip

    return share, run


def outputs_of(x: Tensor, packed: Tensor) -> int:
    """Return the number of outputs of a weight in records. Raises ValueError if it does not fit ``x``."""
    k, (rows, blocks, size) = x.shape[1], packed.shape
    if k != blocks * BLOCK:
        raise ValueError(f"x has K = {k}, the records {blocks * BLOCK}: they must agree")
    if size != RECORD or rows % 2:
        raise ValueError(f"the records are {tuple(packed.shape)}: there are an even number, of {RECORD} bytes each")
    return rows * OUTPUTS


class Traced:
    """A kernel that a trace records, with the limit of registers in a configuration, since a trace takes no such
    argument."""

    def __getitem__(self, grid: tuple) -> Callable[..., None]:
        def launch(*arguments: object, maxnreg: int, **constants: object) -> None:
            wrap_triton(_limited(maxnreg))[grid](*arguments, **constants)

        return launch


@cache
def _limited(registers: int) -> Any:
    """Return the kernel with at most that many registers a thread."""
    return triton.autotune([triton.Config({}, maxnreg=registers)], key=[])(int4_records_small_m_kernel)


@triton_op("eagle3::int4_records_small_m", mutates_args={})
def int4_records_small_m(
    x: Tensor, packed: Tensor, arrived: Tensor, most_rows: int, activation: str = "", following: Tensor | None = None,
    early: bool = False,
) -> Tensor:  # fmt: skip
    """Compute ``x @ w.T`` with ``w = (q - zero) * scale``; zero and scale are a code times a step. The results may be
    gated (see ``sums``).

    On CUDA this is the kernel of this module, on the host ``records_reference``. It is one node of an exported program
    and one launch. ``following`` and ``early`` change no result.

    Args:
        x: bfloat16 [M, K], K a multiple of 256; M may be dynamic
        packed: uint8 [N / 32, K / 256, 4736], the records of one weight or of several one after the other
        arrived: ``sums.counters()``, zero again when it returns
        most_rows: 8 or 16, the most rows of any call with this weight
        activation: applied to the gate, the first half of the outputs; "": the outputs are not gated
        following: the weight of the next matmul, records or bfloat16 [N, K], which L2 is asked for; it must be
            constant, since nothing waits
        early: the kernel may start before the one in front has ended, and loads its first weights before it waits for
            that; ``packed`` must be constant then

    Returns:
        bfloat16 [M, N], gated half of them; a row's bits do not depend on the other rows or their number

    Raises:
        ValueError: shapes that do not agree; on CUDA, another dtype of ``x``, records that are not contiguous, a next
            weight that ``of_next`` refuses, or more rows than there are counters for
    """
    asked = LEVERS if early else {}
    return _launch_records(Traced(), x, packed, arrived, activation, most_rows, following, **asked)


@int4_records_small_m.register_kernel("cpu")
def records_reference(
    x: Tensor, packed: Tensor, arrived: Tensor | None = None, most_rows: int = 8, activation: str = "",
    following: Tensor | None = None, early: bool = False,
) -> Tensor:  # fmt: skip
    """``int4_records_small_m`` in plain PyTorch: float32 on the dequantized weights, any floating dtype of ``x``."""
    outputs_of(x, packed)
    return gated((x.float() @ dequantized(packed).T).to(x.dtype), activation)
