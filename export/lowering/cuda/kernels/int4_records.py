"""Linear layers of few rows over INT4 weights in records: an alternative to the kernel of ``int4.py``, with fewer
instructions per weight and more programs on a multiprocessor. No export uses it, since it was never timed;
``scripts/gpu/gpu_tournament.py`` times both.

A record holds all that 32 outputs need of a block of 256 of K, 4,736 bytes: words [group 8][r 8][c 4][mid 4] of 8 codes
each, scales and zero points [group][output][2], steps [output][2]. Output 4 r + mid has word c of a group: the 16 bytes
that a lane loads are exactly what its registers hold as operands of the matrix instruction. So words do not pass
through shared memory, a warp loads 512 consecutive bytes, and a program's run of blocks is two stretches of memory.
``records`` packs a weight, and ``unpacked`` returns its parts again.

Arithmetic, for a row x and a group g of K (``q``: codes; ``s``, ``z``: the group's scale and zero point)::

    y = sum over g of s * (sum over k of q x  -  z * sum over k of x)

A code in bits 0 to 3 of a bfloat16 is q * 2^-133, one in bits 4 to 7 is q * 2^-129: subnormal numbers, for which a code
takes no instruction but its AND. x is multiplied by 2^100 or 2^96 and sums by 2^33 at the end, all of them exactly for
|x| < 2^27; larger ones make infinities. A word's codes lie at bits 0, 16, 4, 20, 8, 24, 12, 28 for k = 0 to 7, so that
x needs no shuffle. The sums over k run on tensor cores, bf16 to float32, all else is float32: weights are not rounded.

A tile is 32 outputs of the first half of all outputs and the same 32 of the second, which are gate and up of a gated
MLP. All blocks of all tiles are shared evenly among the programs, in order; a tile that several programs share is added
by the last of them in the order of K. No order depends on the number of rows, so a row has the same bits in every call.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from eagle3.export.lowering.cuda.kernels.int4 import BLOCK
from eagle3.export.lowering.cuda.kernels.small_m import WARPS, on_all_rows, operand, sum_of_groups
from eagle3.export.lowering.cuda.kernels.sums import COUNTERS, arrive, gate_of

OUTPUTS, GROUP = 32, 32
"""The number of outputs of a record, and of weights that share a scale: records exist for groups of 32 only."""
PLACES = (0, 16, 4, 20, 8, 24, 12, 28)
"""The bits of a word at which its codes of k = 0 to 7 begin."""
TOGETHER = {8: 3, 16: 2}
"""The number of programs that fit on a multiprocessor, by the most rows of any call, at 80 and 128 registers a
thread."""
REGISTERS = {8: 80, 16: 128}
"""The most registers a thread, which the compiler is told, by the rows of a tile."""
UP: tl.constexpr = tl.constexpr(8589934592.0)  # 2^33
LOW: tl.constexpr = tl.constexpr(1.2676506002282294e30)  # 2^100
HIGH: tl.constexpr = tl.constexpr(7.922816251426434e28)  # 2^96


class Shares(NamedTuple):
    """A matmul whose blocks are shared evenly among ``programs``; up to ``parts`` of them share a tile."""

    programs: int
    parts: int


def shares(n: int, k: int, programs: int) -> Shares:
    """Return the shares of a weight [n, k] for at most ``programs`` programs."""
    blocks = k // BLOCK
    tiles = n // (2 * OUTPUTS)
    programs = min(programs, tiles * blocks)

    def of(block: int) -> int:  # the program that computes the block
        return ((block + 1) * programs - 1) // (tiles * blocks)

    parts = max(of((tile + 1) * blocks - 1) - of(tile * blocks) + 1 for tile in range(tiles))
    return Shares(programs, parts)


def fits(n: int, k: int, group: int) -> bool:
    """Return True if a weight can be packed into records."""
    return n % (2 * OUTPUTS) == 0 and k % BLOCK == 0 and group == GROUP


def records(qdata: Tensor, scale: Tensor, scale_step: Tensor, zero: Tensor, zero_step: Tensor) -> Tensor:
    """Pack the parts of a ``CudaCoalescedInt4Tensor``: codes uint8 [N, K / 2], scale and zero uint8 [N, K / 32], steps
    float16 [N, K / 256].

    Returns uint8 [N / 32, K / 256, 4736]. Raises ValueError for a weight for which ``fits`` is False.
    """
    n, k = qdata.shape[0], 2 * qdata.shape[1]
    if not fits(n, k, k // scale.shape[1]):
        raise ValueError(
            f"{n} x {k} in groups of {k // scale.shape[1]}: records are of multiples of {2 * OUTPUTS} x {BLOCK} in "
            f"groups of {GROUP}"
        )
    rows, blocks = n // OUTPUTS, k // BLOCK
    nibbles = torch.stack([qdata & 0xF, qdata >> 4], -1).view(rows, 8, 4, blocks, 8, 4, 8)
    words = torch.zeros(nibbles.shape[:-1], dtype=torch.int32, device=qdata.device)
    for at, place in enumerate(PLACES):
        words |= nibbles[..., at].int() << place
    words = words.permute(0, 3, 4, 1, 5, 2).contiguous()  # rows, block, group, r, c, mid
    codes = torch.stack([scale, zero], -1).view(rows, OUTPUTS, blocks, 8, 2).permute(0, 2, 3, 1, 4).contiguous()
    steps = torch.stack([scale_step, zero_step], -1).view(rows, OUTPUTS, blocks, 2).transpose(1, 2).contiguous()
    parts = (words.view(torch.uint8), codes, steps.view(torch.uint8))
    return torch.cat([part.reshape(rows, blocks, -1) for part in parts], -1)


def unpacked(packed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Invert ``records``."""
    rows, blocks, _ = packed.shape
    words, codes, steps = (part.contiguous() for part in packed.split((32 * 128, 32 * 16, 32 * 4), -1))
    words = words.view(torch.int32).view(rows, blocks, 8, 8, 4, 4).permute(0, 3, 5, 1, 2, 4)  # rows, r, mid, ...
    low, high = (
        torch.stack([words >> place & 0xF for place in PLACES[odd::2]], -1).reshape(rows * OUTPUTS, -1)
        for odd in (0, 1)
    )
    scale, zero = (
        codes.view(rows, blocks, 8, OUTPUTS, 2).permute(0, 3, 1, 2, 4).reshape(rows * OUTPUTS, -1, 2).unbind(2)
    )
    steps = steps.view(torch.float16).view(rows, blocks, OUTPUTS, 2).transpose(1, 2).reshape(rows * OUTPUTS, -1, 2)
    scale_step, zero_step = steps.unbind(2)
    qdata = (low | high << 4).to(torch.uint8)
    return qdata, *(part.contiguous() for part in (scale, scale_step, zero, zero_step))


@triton.jit
def ask_l2(pointer, BYTES: tl.constexpr):
    # Asks L2 for BYTES (a multiple of 16) from a pointer on, by one thread
    tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; "
        "@p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,n", [pointer.to(tl.uint64), BYTES], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


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
    # uint16 [8, 64] and uint32 [8, 64] -> z and s in the halves of 64 bits
    scale_step = (steps & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    zero_step = (steps >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    s = (codes & 0xFF).to(tl.float32) * scale_step
    z = (codes >> 8).to(tl.float32) * zero_step
    return (z.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | s.to(tl.uint32, bitcast=True)


@triton.jit
def _scaled(acc, part, terms, sum_x, BLOCK_M: tl.constexpr):
    z = tl.broadcast_to((terms >> 32).to(tl.uint32).to(tl.float32, bitcast=True), (8, 32, BLOCK_M))
    s = tl.broadcast_to(terms.to(tl.uint32).to(tl.float32, bitcast=True), (8, 32, BLOCK_M))
    return tl.fma(tl.fma(z, sum_x, part), s, acc)


@triton.jit
def _operands(x, BLOCK_M: tl.constexpr):
    # bf16 [8 groups, M, 4 c, 8 of a word] -> bf16 [8, 16, M] twice, multiplied
    x0, x1 = tl.split(tl.permute(tl.reshape(x, (8, BLOCK_M, 4, 2, 4)), (0, 2, 4, 1, 3)))  # g, c, 4 of a word, m
    high = tl.arange(0, 16)[None, :, None] // 2 % 2 == 1
    power = tl.where(high, HIGH, LOW).to(tl.bfloat16)
    return tl.reshape(x0, (8, 16, BLOCK_M)) * power, tl.reshape(x1, (8, 16, BLOCK_M)) * power


@triton.jit
def int4_records_kernel(
    X, RECORDS, NEXT, ARRIVED, PARTS, OUT, M,
    N: tl.constexpr, K: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK_M: tl.constexpr, AHEAD: tl.constexpr,
    FIRST: tl.constexpr, OF_NEXT: tl.constexpr, EARLY: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    # L2 is asked for AHEAD blocks ahead of the loads (a multiple of 4, which are asked for at once), for FIRST blocks
    # before the wait for x, and by each program for OF_NEXT bytes of the next matmul's weights before it adds sums.
    BLOCKS: tl.constexpr = K // 256
    TOTAL: tl.constexpr = N // 64 * BLOCKS
    SIZE: tl.constexpr = 1184  # words of a record
    HALF: tl.constexpr = TOTAL * SIZE  # from a record of the first half of outputs to that of the second
    pid = tl.program_id(0)
    m0 = tl.program_id(1) * BLOCK_M
    start = (pid.to(tl.int64) * TOTAL // PROGRAMS).to(tl.int32)
    end = ((pid.to(tl.int64) + 1) * TOTAL // PROGRAMS).to(tl.int32)
    # The program's own stretch: offsets of 32 bits from a pointer of 64.
    RECORDS = RECORDS.to(tl.pointer_type(tl.uint32), bitcast=True) + start.to(tl.int64) * SIZE
    X += m0.to(tl.int64) * K
    if EARLY:
        gdc_launch_dependents()
    if FIRST > 0:  # noqa: SIM102  (of the two conditions one is the compiler's)
        if end - start >= FIRST:  # a shorter share could end the weights
            ask_l2(RECORDS, FIRST * SIZE * 4)
            ask_l2(RECORDS + HALF, FIRST * SIZE * 4)
    g, four = tl.arange(0, 8), tl.arange(0, 4)
    word_at = (g * 128)[:, None, None, None] + (tl.arange(0, 8) * 16)[None, :, None, None]
    word_at = word_at + (four * 4)[None, None, :, None] + four[None, None, None, :]
    n = tl.arange(0, 64)
    half = n // 32 * HALF
    code_at = 2 * half[None, :] + 2048 + g[:, None] * 32 + (n % 32)[None, :]
    step_at = half[None, :] + 1152 + (n % 32)[None, :] + 0 * g[:, None]  # in the layout of codes
    m = tl.arange(0, BLOCK_M)  # rows past the last are the last, of the same lines, and not stored
    x_at = (g * 32)[:, None, None, None] + (tl.minimum(m, M - 1 - m0) * K)[None, :, None, None]
    x_at = x_at + (four * 8)[None, None, :, None] + g[None, None, None, :]
    # Constants that the compiler cannot see, by loads never made: it would take the halves of a word apart.
    nowhere = tl.full((1, 1, 1), 0, tl.int32)
    low = tl.load(RECORDS + nowhere, mask=nowhere + pid >= PROGRAMS, other=0x000F000F)
    high = tl.load(RECORDS + nowhere, mask=nowhere + pid >= PROGRAMS, other=0x00F000F0)
    # -1 as weights are 1: of x it makes what z is multiplied by
    ones = operand(tl.full((8, 16, 4), 0x80018001, tl.uint32), tl.full((8, 16, 4), 0x80108010, tl.uint32), 16, 4)
    a0 = tl.load(RECORDS + word_at, cache_modifier=".cg")
    a1 = tl.load(RECORDS + HALF + word_at, cache_modifier=".cg")
    codes, steps = tl.load(RECORDS.to(tl.pointer_type(tl.uint16), bitcast=True) + code_at), tl.load(RECORDS + step_at)
    tile, k = start // BLOCKS, start % BLOCKS
    left = end - start
    if EARLY:
        gdc_wait()
    while left > 0:
        acc0 = tl.full((8, 32, BLOCK_M), 0, tl.float32)
        acc1 = acc0
        last = tl.minimum(BLOCKS, k + left)
        XK = X + k * 256
        x = tl.load(XK + x_at)
        for block in tl.range(k, last, num_stages=1):
            left -= 1
            if left > 0:  # nothing is read past the program's last record
                RECORDS += SIZE
            if block + 1 < last:
                XK += 256
            x0, x1 = _operands(x, BLOCK_M)
            part0, part1 = _product(a0, x0, x1, low, high), _product(a1, x0, x1, low, high)
            a0 = tl.load(RECORDS + word_at, cache_modifier=".cg")
            a1 = tl.load(RECORDS + HALF + word_at, cache_modifier=".cg")
            sum_x = on_all_rows(tl.dot(ones, x1, tl.dot(ones, x0)), 32, BLOCK_M)
            terms = _terms(codes, steps)
            codes = tl.load(RECORDS.to(tl.pointer_type(tl.uint16), bitcast=True) + code_at)
            steps = tl.load(RECORDS + step_at)
            x = tl.load(XK + x_at)
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
                ask_l2(NEXT + pid.to(tl.int64) * OF_NEXT, OF_NEXT)
        total = tl.join(sum_of_groups(acc0, 32, BLOCK_M), sum_of_groups(acc1, 32, BLOCK_M))  # (mid, r), m, half
        _finish(OUT, PARTS, ARRIVED, total * UP, tile, m0 + m, M, pid, N, TOTAL, BLOCKS, PROGRAMS, BLOCK_M, ACTIVATION)
        tile += 1
        k = 0


@triton.jit
def _finish(
    OUT, PARTS, ARRIVED, total, tile, m, M, pid, N: tl.constexpr, TOTAL: tl.constexpr, BLOCKS: tl.constexpr,
    PROGRAMS: tl.constexpr, BLOCK_M: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    # Stores a tile's sums; the last of the programs that share the tile adds them first, in the order of K.
    total = tl.reshape(total, (4, 8, BLOCK_M, 2))
    total = tl.reshape(tl.permute(total, (2, 3, 1, 0)), (BLOCK_M, 64))  # m, (half, r, mid)
    n = tl.arange(0, 64)
    at = m[:, None].to(tl.int64) * N + (n // 32 * (N // 2) + tile * 32 + n % 32)[None, :]
    here = (m < M)[:, None]
    first = tile.to(tl.int64) * BLOCKS
    lowest = ((first * PROGRAMS + PROGRAMS - 1) // TOTAL).to(tl.int32)  # the program of the tile's first block
    highest = (((first + BLOCKS) * PROGRAMS - 1) // TOTAL).to(tl.int32)  # and of its last
    whole = lowest == highest
    if not whole:
        size = tl.full((), N, tl.int64) * M
        PARTS = PARTS.to(tl.pointer_type(tl.float32), bitcast=True)  # counters where no tile is shared
        tl.store(PARTS + (pid - lowest) * size + at, total, mask=here)
        counter = ARRIVED + tl.program_id(1) * (N // 64) + tile
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
    multiprocessors: int = 132, following: Tensor | None = None, **asked: Any,
) -> Tensor:  # fmt: skip
    """Return bfloat16 [M, N] of ``x`` [M, K], or [M, N / 2] with an ``activation``.

    ``most_rows``, 8 or 16, is the most rows of any call with this weight. It decides the number of programs, and so the
    order of the sums. ``following`` is the next matmul's weight. ``asked`` gives the kernel's ``AHEAD``, ``FIRST``,
    ``OF_NEXT`` and ``EARLY``, which are 0 by default. Raises ValueError for another dtype of ``x``, a weight of another
    K, and more rows than there are counters for.
    """
    (m, k), (rows, blocks, _) = x.shape, packed.shape
    n = rows * OUTPUTS
    if x.dtype != torch.bfloat16:
        raise ValueError(f"x is {x.dtype}: the kernel takes torch.bfloat16")
    if k != blocks * BLOCK:
        raise ValueError(f"x has K = {k}, the records {blocks * BLOCK}: they must agree")
    most_tiles = COUNTERS // (n // (2 * OUTPUTS))
    if m > most_tiles * most_rows:
        raise ValueError(f"{m} rows of {n} outputs: the kernel takes {most_tiles * most_rows} rows of them")
    share = shares(n, k, multiprocessors * TOGETHER[most_rows])
    of_tile = 8 if m <= 8 else most_rows
    out = torch.empty(m, n // 2 if activation else n, dtype=x.dtype, device=x.device)
    parts = torch.empty(share.parts, m, n, dtype=torch.float32, device=x.device) if share.parts > 1 else arrived
    constants = dict.fromkeys(("AHEAD", "FIRST", "OF_NEXT"), 0) | {"EARLY": False} | asked
    kernel[(share.programs, triton.cdiv(m, of_tile))](
        x.contiguous(), packed, packed if following is None else following, arrived, parts, out, m, N=n, K=k,
        PROGRAMS=share.programs, BLOCK_M=of_tile, ACTIVATION=activation, num_warps=WARPS,
        maxnreg=REGISTERS[of_tile], **constants,
    )  # fmt: skip
    return out
