"""The division of attention's positions among programs, and the kernel that adds the parts of a whole context.

A few rows fill a GPU only if the positions are divided among programs of ``chunk`` positions each, counted from
position 0. Over a window, program i takes the chunks whose number is i modulo the number of programs. Over a whole
context each chunk has a program of its own, and later chunks are longer: a long cache needs few programs, and a short
text in it still has many. A program whose chunk holds no token ends at once. Each program writes its maximum, sum and
weighted values in float32. These partial results of all chunks that hold tokens are then added in the order of their
positions. For a window, the last program to arrive adds them (see ``sums``). For a whole context a second launch does,
with a program for each row and head, since one program would take 1.5 us a chunk for heads of 512 (timed on an H200).
Neither the terms nor their order depend on the other rows of a call, and positions that a row does not attend to add
exact zeros. The kernels, as compiled for a method, therefore give a row the same bits for any number of rows up to
``FEW``.
"""

from typing import NamedTuple

import triton
import triton.language as tl

FEW = 16
"""The most rows for which the positions are divided among programs."""
AHEAD = 8
"""The number of partial results of a whole context whose loads are in flight together while they are added."""
MOST_PARTS = 64
"""The most programs among which the positions of a window are divided, and also the number of chunks of equal size at
the beginning of a whole context. Up to twice that context, half as many chunks of twice the size follow, and so on."""


class Division(NamedTuple):
    """The division of positions among programs. ``chunk`` is the number of positions of a chunk. ``doublings`` is how
    often the chunks double (see ``MOST_PARTS``), or -1 for a window. ``parts`` is the most programs that a tile of up
    to ``FEW`` rows needs."""

    chunk: int
    doublings: int
    parts: int


def division(longest: int, slots: int, groups: int) -> Division:
    # the partial result of 8 rows is at most half as large as what the program reads
    chunk = 128 if groups <= 4 else 256
    if longest == slots:
        doublings, begin, parts = 0, MOST_PARTS * chunk, min(MOST_PARTS, triton.cdiv(slots, chunk))
        while begin < slots:
            doublings += 1
            parts += triton.cdiv(min(begin, slots - begin), chunk << doublings)
            begin *= 2
        return Division(chunk, doublings, parts)

    def needed() -> int:  # a ring's window may begin at any position of a chunk
        return triton.cdiv(longest + FEW - 2, chunk) + 1

    while needed() > MOST_PARTS:
        chunk *= 2
    return Division(chunk, -1, needed())


@triton.jit
def chunk_bounds(chunk, CHUNK: tl.constexpr, MOST: tl.constexpr, DOUBLINGS: tl.constexpr):
    # Returns the first position of a chunk of a whole context, and the first behind it.
    begin = chunk * CHUNK
    size = tl.full((), CHUNK, tl.int32)
    for doubling in tl.static_range(DOUBLINGS):
        behind = chunk - (MOST + doubling * (MOST // 2))
        if behind >= 0:
            size = tl.full((), CHUNK * 2 ** (doubling + 1), tl.int32)
            begin = CHUNK * MOST * 2**doubling + behind * size
    return begin, begin + size


@triton.jit
def _chunk_of(position, CHUNK: tl.constexpr, MOST: tl.constexpr, DOUBLINGS: tl.constexpr):
    # Returns the chunk of a whole context that a position is in.
    chunk = position // CHUNK
    for doubling in tl.static_range(DOUBLINGS):
        behind = position - CHUNK * MOST * 2**doubling
        if behind >= 0:
            chunk = MOST + doubling * (MOST // 2) + behind // (CHUNK * 2 ** (doubling + 1))
    return chunk


@triton.jit
def attention_sum_kernel(
    PARTS, STATS, FIRST, LAST, SINKS, OUT, rows, parts, HEADS: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr,
    MOST: tl.constexpr, DOUBLINGS: tl.constexpr, HAS_SINKS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_PARTS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    # Adds the parts of a whole context for one row and one head; the tensors are those of _attention_kernel.
    row, head = tl.program_id(0), tl.program_id(1)
    at = (row * HEADS + head).to(tl.int64)
    whole = tl.full((), HEADS, tl.int64) * rows
    oldest = 0
    used = 1
    if parts > 1:
        oldest = _chunk_of(tl.load(FIRST + row).to(tl.int32), CHUNK, MOST, DOUBLINGS)
        used = _chunk_of(tl.load(LAST + row).to(tl.int32), CHUNK, MOST, DOUBLINGS) + 1 - oldest
    at += oldest * whole
    part = tl.arange(0, BLOCK_PARTS)
    highest = tl.max(tl.load(STATS + (at + part * whole) * 2, mask=part < used, other=-1e30), 0)
    total = tl.full((), 0, tl.float32)
    if HAS_SINKS:
        sink = tl.load(SINKS + head).to(tl.float32) * 1.4426950408889634
        highest = tl.maximum(highest, sink)
        total = tl.exp2(sink - highest)
    d = tl.arange(0, BLOCK_D)
    out = tl.full((BLOCK_D,), 0, tl.float32)
    for begin in tl.range(0, used, AHEAD):
        for behind in tl.static_range(AHEAD):  # whose loads do not wait for each other
            there = begin + behind < used
            its = at + (begin + behind) * whole
            its_top = tl.load(STATS + its * 2, mask=there, other=-1e30)
            its_total = tl.load(STATS + its * 2 + 1, mask=there, other=0)
            its_out = tl.load(PARTS + its * D + d, mask=there & (d < D), other=0)
            share = tl.exp2(its_top - highest)
            total = tl.fma(its_total, share, total)
            out = tl.fma(its_out, tl.broadcast_to(share, (BLOCK_D,)), out)
    at -= oldest * whole
    tl.store(OUT + at * D + d, (out / total).to(OUT.dtype.element_ty), mask=d < D)
