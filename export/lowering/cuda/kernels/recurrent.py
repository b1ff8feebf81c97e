"""Recurrent layers in Triton, over a state that rolls back (``eagle3.targets.recurrent``): the gated delta rule
(``gated_delta``), Kimi's (``kimi_delta``) and Mamba 2 (``mamba2``). In Mamba 2 the update of a row is the row's value;
in Kimi's each key channel has a decay of its own.

A program keeps some columns of one head's state in registers, so that a call reads and writes the state once. It first
applies the changes that the ring holds between the committed position and the first row. It then either runs its rows
one after the other and leaves their changes in the ring (``rows``), or commits them (``chunk``).

**Rows.** Each change is ``fma(key, update, decay * state)`` in float32, in the commit as in the row itself. A state and
an output therefore have the same bits however the rows are divided among calls of one method.

**Chunks.** A block of rows takes products on the tensor cores in place of a loop. Updates of the gated delta rule
solve a triangular system, whose inverse is built from blocks that double in size, as in ``gated_delta``. Decays of
channels are part of the products (``recurrent_block``). The products are in TF32 with three terms, which is nearly as
accurate as float32.

Programs share the ring. A call reads changes of the last ``ROLLBACK_ROWS`` positions and writes as many, so with twice
as many slots no program writes what another one has still to read. That holds for rows that follow the read positions;
the last rows of a chunk may be further away, so they are a launch of their own, which commits nothing.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from eagle3.export.lowering.cuda.kernels.recurrent_block import products_of_channels, ring_after, run_rows, state_before
from eagle3.targets.spec import ROLLBACK_ROWS

SLOTS = 2 * ROLLBACK_ROWS
"""The slots of the ring."""
ROW_COLUMNS, ROW_WARPS = 16, 4
CHUNK_COLUMNS, CHUNK_WARPS = 32, 8
"""The most columns of a head's state in a program, and its warps. With fewer warps a chunk's kernel spills
registers."""
CHUNK_NUMBERS = 4096
"""The most numbers of the state in a chunk's program of more than 16 columns. With more, registers are spilled."""
BLOCK, DOUBLINGS = 16, 4
"""The rows of a block of a chunk, and their logarithm. Products on the tensor cores take at least 16 rows; the inverse
of a larger block takes more registers than a thread has."""


@triton.jit
def _changed(state, key, update, decay, BLOCK_K: tl.constexpr, COLUMNS: tl.constexpr):
    # The one form of a change, whose bits do not depend on what surrounds it.
    return tl.fma(
        tl.broadcast_to(key[:, None], (BLOCK_K, COLUMNS)),
        tl.broadcast_to(update[None, :], (BLOCK_K, COLUMNS)),
        state * tl.exp(decay),
    )


@triton.jit
def _decay(LOGARITHMS, k, in_k, DECAYS: tl.constexpr):
    # Returns a head's log decay, or [BLOCK_K, 1] of its channels.
    return tl.load(LOGARITHMS + k[:, None], mask=in_k[:, None], other=0.0) if DECAYS > 1 else tl.load(LOGARITHMS)


@triton.jit
def _committed(
    state, CHANGES, committed, first, key_head, head, k, v, in_k, in_v, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr,
    D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_K: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    SLOTS: tl.constexpr, DECAYS: tl.constexpr,
):  # fmt: skip
    # Returns the state at position ``first`` of one that is valid at ``committed``.
    begin = tl.maximum(tl.maximum(committed, first - SLOTS // 2), 0)
    for position in tl.range(begin, first, num_stages=3):
        change = CHANGES + position % SLOTS * WIDTH
        key = tl.load(change + key_head * D_K + k, mask=in_k, other=0.0)
        update = tl.load(change + KEY_HEADS * D_K + head * D_V + v, mask=in_v, other=0.0)
        decay = _decay(change + KEY_HEADS * D_K + HEADS * D_V + head * DECAYS, k, in_k, DECAYS)
        state = _changed(state, key, update, decay, BLOCK_K, COLUMNS)
    return state


@triton.jit
def _recurrent_rows_kernel(
    QUERY, KEY, VALUE, DECAY, BETA, STATE, CHANGES, FIRST, COMMITTED, OUT, rows, begin, KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_K: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, SLOTS: tl.constexpr, DELTA: tl.constexpr, DECAYS: tl.constexpr,
):  # fmt: skip
    # QUERY, KEY [KEY_HEADS, rows, D_K], VALUE, OUT [HEADS, rows, D_V], DECAY [HEADS, rows, DECAYS], BETA [HEADS, rows],
    # all float32. DECAYS is 1, or D_K. Runs the rows from ``begin`` on. If ``begin`` is not 0, the state is that of its
    # position already. BETA is read with DELTA.
    head, block = tl.program_id(0), tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    k = tl.arange(0, BLOCK_K)
    v = block * COLUMNS + tl.arange(0, COLUMNS)
    in_k, in_v = k < D_K, v < D_V
    first = tl.load(FIRST).to(tl.int32)
    committed = tl.load(COMMITTED).to(tl.int32)
    tile = STATE + head * (D_K * D_V) + k[:, None] * D_V + v[None, :]
    in_tile = in_k[:, None] & in_v[None, :]
    state = tl.load(tile, mask=in_tile & (first + begin > 0), other=0.0)
    state = _committed(
        state, CHANGES, tl.where(begin > 0, first, committed), first, key_head, head, k, v, in_k, in_v, KEY_HEADS,
        HEADS, D_K, D_V, BLOCK_K, COLUMNS, WIDTH, SLOTS, DECAYS,
    )  # fmt: skip
    tl.debug_barrier()  # what one thread loaded, another may store
    tl.store(tile, state, mask=in_tile)

    leaves_key = in_k & (block == 0) & (head % (HEADS // KEY_HEADS) == 0)
    for row in tl.range(begin, rows, num_stages=3):
        key = tl.load(KEY + (key_head * rows + row) * D_K + k, mask=in_k, other=0.0)
        query = tl.load(QUERY + (key_head * rows + row) * D_K + k, mask=in_k, other=0.0)
        update = tl.load(VALUE + (head * rows + row) * D_V + v, mask=in_v, other=0.0)
        decay = _decay(DECAY + head * rows * DECAYS + row * DECAYS, k, in_k, DECAYS)
        if DELTA:
            beta = tl.load(BETA + head * rows + row)
            update = (update - tl.sum(state * tl.exp(decay) * key[:, None], 0)) * beta
        state = _changed(state, key, update, decay, BLOCK_K, COLUMNS)
        tl.store(OUT + (head * rows + row) * D_V + v, tl.sum(state * query[:, None], 0), mask=in_v)
        change = CHANGES + (first + row) % SLOTS * WIDTH
        tl.store(change + key_head * D_K + k, key, mask=leaves_key)
        tl.store(change + KEY_HEADS * D_K + head * D_V + v, update, mask=in_v)
        if DECAYS > 1:
            logarithms = change + KEY_HEADS * D_K + HEADS * D_V + head * D_K + k[:, None]
            tl.store(logarithms, decay, mask=in_k[:, None] & (block == 0))
        else:
            tl.store(change + KEY_HEADS * D_K + HEADS * D_V + head, decay, mask=block == 0)


@triton.jit
def _recurrent_chunk_kernel(
    QUERY, KEY, VALUE, DECAY, BETA, STATE, SAVED, CHANGES, FIRST, COMMITTED, FROM_SAVED, OUT, rows, count,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr, DELTA: tl.constexpr, BLOCK: tl.constexpr,
    SLICE: tl.constexpr, DOUBLINGS: tl.constexpr, DECAYS: tl.constexpr,
):  # fmt: skip
    # As _recurrent_rows_kernel; commits the first ``count`` rows, of which the ring gets nothing. SAVED is as STATE.
    # DECAYS of more than 1 are for DELTA alone.
    head, block = tl.program_id(0), tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    k = tl.arange(0, BLOCK_K)
    v = block * COLUMNS + tl.arange(0, COLUMNS)
    in_k, in_v = k < D_K, v < D_V
    first = tl.load(FIRST).to(tl.int32)
    committed = tl.load(COMMITTED).to(tl.int32)
    saved = tl.load(FROM_SAVED) != 0
    place = head * (D_K * D_V) + k[:, None] * D_V + v[None, :]
    in_tile = in_k[:, None] & in_v[None, :]
    state = tl.load(STATE + place, mask=in_tile & (first > 0) & (saved == 0), other=0.0)
    state += tl.load(SAVED + place, mask=in_tile & (first > 0) & saved, other=0.0)
    state = _committed(
        state, CHANGES, committed, first, key_head, head, k, v, in_k, in_v, KEY_HEADS, HEADS, D_K, D_V, BLOCK_K,
        COLUMNS, WIDTH, SLOTS, DECAYS,
    )  # fmt: skip

    # A product along d_k is divided among the warps: each takes a slice of the key and of the state. Otherwise a warp
    # would need the whole key of all rows in its registers, which spills.
    state = tl.reshape(state, (BLOCK_K // SLICE, SLICE, COLUMNS))
    index = tl.arange(0, BLOCK)
    row, column = index[:, None], index[None, :]
    sliced = tl.arange(0, BLOCK_K // SLICE)[:, None, None] * SLICE + tl.arange(0, SLICE)[None, None, :]
    for begin in tl.range(0, count, BLOCK):
        at = begin + index
        here = at < count
        keys = (key_head * rows + at)[None, :, None] * D_K + sliced
        in_keys = here[None, :, None] & (sliced < D_K)
        values = (head * rows + at)[:, None] * D_V + v[None, :]
        in_values = here[:, None] & in_v[None, :]
        key = tl.load(KEY + keys, mask=in_keys, other=0.0)
        query = tl.load(QUERY + keys, mask=in_keys, other=0.0)
        update = tl.load(VALUE + values, mask=in_values, other=0.0)
        if DECAYS > 1:
            decay = tl.load(DECAY + (head * rows + at)[None, :, None] * D_K + sliced, mask=in_keys, other=0.0)
            system, seen, key, query, left = products_of_channels(
                key, query, decay, BLOCK_K // SLICE, BLOCK, SLICE, DOUBLINGS
            )
            beta = tl.load(BETA + head * rows + at, mask=here, other=0.0)
            system *= beta[:, None]
            right = (update - tl.sum(tl.dot(key, state, input_precision="tf32x3"), 0)) * beta[:, None]
            out = tl.sum(tl.dot(query, state, input_precision="tf32x3"), 0)
            turned = tl.permute(left, (0, 2, 1))
        else:
            decay = tl.load(DECAY + head * rows + at, mask=here, other=0.0)
            # Sums of the rows between, and of the later rows: a difference of sums from the first row would round what
            # is left of strong decays.
            later = tl.where(row > column, tl.broadcast_to(decay[:, None], (BLOCK, BLOCK)), 0.0)
            between = tl.where(row >= column, tl.exp(tl.cumsum(later, 0)), 0.0)
            behind = tl.exp(tl.sum(later, 0))
            since = tl.exp(tl.cumsum(decay, 0))[:, None]
            turned = tl.permute(key, (0, 2, 1))
            if DELTA:
                beta = tl.load(BETA + head * rows + at, mask=here, other=0.0)
                system = tl.sum(tl.dot(key, turned, input_precision="tf32x3"), 0) * between * beta[:, None]
                right = (update - tl.sum(tl.dot(key, state, input_precision="tf32x3"), 0) * since) * beta[:, None]
            seen = tl.sum(tl.dot(query, turned, input_precision="tf32x3"), 0) * between
            out = tl.sum(tl.dot(query, state, input_precision="tf32x3"), 0) * since
        if DELTA:
            pair = (row >> 1 == column >> 1) & (row > column)
            inverse = tl.where(row == column, 1.0, tl.where(pair, -system, 0.0))
            for doubling in tl.static_range(1, DOUBLINGS):
                pair = (row >> (doubling + 1) == column >> (doubling + 1)) & (row >> doubling > column >> doubling)
                product = tl.dot(inverse, tl.where(pair, system, 0.0), input_precision="tf32x3")
                inverse -= tl.dot(product, inverse, input_precision="tf32x3")
            update = tl.dot(inverse, right, input_precision="tf32x3")
        out += tl.dot(seen, update, input_precision="tf32x3")
        tl.store(OUT + values, out, mask=in_values)
        if BLOCK_K == SLICE:  # no sum over slices, which has a barrier between the stores of two blocks
            tl.debug_barrier()
        if DECAYS > 1:
            left = tl.broadcast_to(update[None], (BLOCK_K // SLICE, BLOCK, COLUMNS))
            through = tl.exp(tl.sum(decay, 1))[:, :, None]
        else:
            left = tl.broadcast_to((update * behind[:, None])[None], (BLOCK_K // SLICE, BLOCK, COLUMNS))
            through = tl.exp(tl.sum(decay, 0))
        state = state * through + tl.dot(turned, left, input_precision="tf32x3")
    state = tl.reshape(state, (BLOCK_K, COLUMNS))
    tl.debug_barrier()
    tl.store(STATE + place, state, mask=in_tile)
    tl.store(SAVED + place, state, mask=in_tile)


def _sizes(query: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None, changes: Tensor) -> dict[str, int]:
    """Return the constants that both kernels take."""
    d_k = query.shape[2]
    return {
        "KEY_HEADS": query.shape[0],
        "HEADS": value.shape[0],
        "D_K": d_k,
        "D_V": value.shape[2],
        "BLOCK_K": max(16, triton.next_power_of_2(d_k)),
        "WIDTH": changes.shape[-1],
        "SLOTS": changes.shape[1],
        "DELTA": beta is not None,
        "DECAYS": d_k if decay.dim() == 3 else 1,
    }


def launch_rows(
    kernel: Any, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None, state: Tensor,
    changes: Tensor, first: Tensor, committed: Tensor, out: Tensor, begin: Any = 0,
) -> None:  # fmt: skip
    """Run ``_recurrent_rows_kernel`` on the rows from ``begin`` on; ``state``, ``changes`` and ``out`` are written."""
    sizes = _sizes(query, value, decay, beta, changes)
    grid = value.shape[0], triton.cdiv(sizes["D_V"], ROW_COLUMNS)
    kernel[grid](
        query, key, value, decay, decay if beta is None else beta, state, changes, first, committed, out,
        query.shape[1], begin, **sizes, COLUMNS=ROW_COLUMNS, num_warps=ROW_WARPS,
    )  # fmt: skip


def launch_chunk(
    kernels: tuple[Any, Any], query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None,
    state: Tensor, saved: Tensor, changes: Tensor, first: Tensor, committed: Tensor, from_saved: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """Run ``_recurrent_chunk_kernel`` on all but the last ``ROLLBACK_ROWS`` rows, and ``_recurrent_rows_kernel`` on
    those."""
    of_chunk, of_rows = kernels
    sizes, count = _sizes(query, value, decay, beta, changes), query.shape[1] - ROLLBACK_ROWS
    columns = min(CHUNK_COLUMNS, max(16, CHUNK_NUMBERS // sizes["BLOCK_K"]))
    grid = value.shape[0], triton.cdiv(sizes["D_V"], columns)
    of_chunk[grid](
        query, key, value, decay, decay if beta is None else beta, state, saved, changes, first, committed, from_saved,
        out, query.shape[1], count, **sizes, COLUMNS=columns, BLOCK=BLOCK,
        SLICE=max(16, sizes["BLOCK_K"] // CHUNK_WARPS), DOUBLINGS=DOUBLINGS, num_warps=CHUNK_WARPS,
    )  # fmt: skip
    launch_rows(of_rows, query, key, value, decay, beta, state, changes, first, committed, out, count)


@triton_op("eagle3::recurrent_rows", mutates_args={})
def recurrent_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    state: Tensor,
    changes: Tensor,
    first: Tensor,
    committed: Tensor,
) -> list[Tensor]:
    """Run up to ``ROLLBACK_ROWS`` rows that can be rejected. On CUDA these are the kernels of this module, on the host
    ``recurrent_rows_reference``. It is one node of an exported program.

    Args:
        query, key: float32 [key heads, T, d_k]; of unit length in the gated delta rule, ``query`` scaled
        value: float32 [value heads, T, d_v]
        decay: float32 [value heads, T], the logarithm, or [value heads, T, d_k] in Kimi's delta rule
        beta: float32 [value heads, T] of the gated delta rule; None in Mamba 2, where ``value`` is the update
        state: float32 [value heads, d_k, d_v], before position ``committed``; not read if the first position is 0
        changes: float32 [1, SLOTS, 1, width], a ring by position: the key of all key heads, the update of all value
            heads, and the log decay of each, or those of its channels
        first: int64 [1 or more], whose first entry is the position of the first row
        committed: int64 [1]

    Returns:
        float32 [value heads, T, d_v]; the state before the first row; the ring with the rows' changes. A lowered
        program writes the last two over the old ones. The bits of a row do not depend on how the rows are divided among
        calls
    """
    state, changes, out = state.clone(), changes.clone(), torch.empty_like(value)
    kernel = wrap_triton(_recurrent_rows_kernel)
    launch_rows(kernel, query, key, value, decay, beta, state, changes, first, committed, out)
    return [out, state, changes]


@triton_op("eagle3::recurrent_chunk", mutates_args={})
def recurrent_chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    state: Tensor,
    saved: Tensor,
    changes: Tensor,
    first: Tensor,
    committed: Tensor,
    from_saved: Tensor,
) -> list[Tensor]:
    """Run more than ``ROLLBACK_ROWS`` rows, and commit all but the last ``ROLLBACK_ROWS``.

    Args:
        saved: as ``state``, which it replaces where ``from_saved`` (bool [1]) is True
        query, key, value, decay, beta, state, changes, first, committed: see ``recurrent_rows``

    Returns:
        float32 [value heads, T, d_v]; the state before the last ``ROLLBACK_ROWS`` rows, twice, of which the second
        replaces ``saved``; the ring with the changes of these rows
    """
    state, saved, changes, out = state.clone(), saved.clone(), changes.clone(), torch.empty_like(value)
    kernels = wrap_triton(_recurrent_chunk_kernel), wrap_triton(_recurrent_rows_kernel)
    given = query, key, value, decay, beta, state, saved, changes, first, committed, from_saved, out
    launch_chunk(kernels, *given)
    return [out, state, saved, changes]


@recurrent_rows.register_kernel("cpu")
def recurrent_rows_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    state: Tensor,
    changes: Tensor,
    first: Tensor,
    committed: Tensor,
) -> list[Tensor]:
    """``recurrent_rows`` in plain PyTorch, row by row, of any floating dtype."""
    given = query, key, value, decay, beta
    state = state_before(state, changes, int(first[0]), int(committed), key, value)
    out, update, _ = run_rows(*given, state)
    return [out, state, ring_after(changes, int(first[0]), key, update, decay)]


@recurrent_chunk.register_kernel("cpu")
def recurrent_chunk_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    state: Tensor,
    saved: Tensor,
    changes: Tensor,
    first: Tensor,
    committed: Tensor,
    from_saved: Tensor,
) -> list[Tensor]:
    """``recurrent_chunk`` in plain PyTorch, row by row, of any floating dtype."""
    count = key.shape[1] - ROLLBACK_ROWS
    given = query, key, value, decay, beta
    state = state_before(saved if from_saved else state, changes, int(first[0]), int(committed), key, value)
    bulk, _, state = run_rows(*(each if each is None else each[:, :count] for each in given), state)
    tail, update, _ = run_rows(*(each if each is None else each[:, count:] for each in given), state)
    changes = ring_after(changes, int(first[0]) + count, key[:, count:], update, decay[:, count:])
    return [torch.cat((bulk, tail), 1), state, state.clone(), changes]
