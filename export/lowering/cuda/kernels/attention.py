"""Attention over a KV cache in Triton; each key and value is read once for all rows that share them.

A row attends to a range of positions, from its ``first`` to its own. Position p is in slot p modulo the number of
slots, so of a ring of two windows the kernel reads about one window. The rows of a program are those of all query heads
of one key-value head, stacked. Only a chunk of prefill, or heads too wide for the registers, needs more programs, which
find the keys in L2.

For a few rows the positions are divided among programs, whose partial results are then added (``attention_sums``).
A chunk of prefill has a kernel of its own (``attention_chunk``).

The softmax uses powers of 2 in float32. Its weights are rounded to bfloat16 for the matmul with the values. A softcap
and sinks (see ``EagerAttention``) take a few instructions.

A cache may hold int8 codes with a scale for each position. Codes are exact in bfloat16. The scale of a key multiplies
its scores, and that of a value its weights, so that the matmuls take the codes as they are.

For few rows, the operations between a layer's matmul and its attention are part of the launch
(``attention_of_product``): bias, norms and rotary embeddings of queries, keys and values, and the cache writes. No
program waits for another one. Each program computes its own queries, and it writes those new keys and values that it
will read. Several programs may therefore write the same bits to the same place of the cache. A program reads only what
it wrote itself before a barrier, or what an earlier launch wrote. If a method for one row gets a chunk of prefill, its
tiles repeat the writes of the tiles before them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from eagle3.export.lowering.cuda.kernels.attention_chunk import (
    attended,
    check_operands,
    launch_chunk,
    plain_rows,
    wrapped_chunk,
)
from eagle3.export.lowering.cuda.kernels.attention_sums import (
    AHEAD,
    FEW,
    MOST_PARTS,
    attention_sum_kernel,
    chunk_bounds,
    division,
)
from eagle3.export.lowering.cuda.kernels.heads import write_keys_and_values, write_queries
from eagle3.export.lowering.cuda.kernels.sums import arrive
from eagle3.targets.attention import attend, dequantized


class Product(NamedTuple):
    """The matmul output that queries and the new keys and values are computed from; see ``attention_of_product``."""

    out: Tensor
    bias: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    heads: int = 0
    starts: Sequence[int] = (0, 0, 0)
    eps: Sequence[float] = (0.0, 0.0, 0.0)
    plus: float = 0.0
    rotary: Sequence[int] = ()


@triton.jit
def _attention_kernel(
    Q, K, V, FIRST, LAST, SINKS, ARRIVED, PARTS, STATS, OUT, rows, parts, PRODUCT, BIAS, COS, SIN, Q_WEIGHT, K_WEIGHT,
    K_SCALES, V_SCALES, KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, SLOTS: tl.constexpr,
    CHUNK: tl.constexpr, MOST: tl.constexpr, DOUBLINGS: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, DIRECT: tl.constexpr, BLOCK_D: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr, Q_AT: tl.constexpr, K_AT: tl.constexpr, V_AT: tl.constexpr, BIASED: tl.constexpr,
    Q_EPS: tl.constexpr, K_EPS: tl.constexpr, V_EPS: tl.constexpr, Q_WEIGHTED: tl.constexpr, K_WEIGHTED: tl.constexpr,
    PLUS: tl.constexpr, ROTARY: tl.constexpr, APART: tl.constexpr, REPEATED: tl.constexpr, ANGLES: tl.constexpr,
    CODES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Q and OUT bf16 [rows, heads, D], K and V bf16 [KV_HEADS, SLOTS, D], or if CODES int8 with K_SCALES and V_SCALES
    # float32 [KV_HEADS, SLOTS]. Unless DIRECT: PARTS float32 [parts, rows, heads, D], STATS float32 [parts, rows,
    # heads, 2], the maximum (of powers of 2) and the sum. Unless WIDTH is 0 Q and the rows' places in K and V are
    # written here, of PRODUCT bf16 [rows, WIDTH], BIAS [WIDTH], COS and SIN [rows, ANGLES].
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.minimum(packed // GROUPS, rows - 1)
    head = kv_head * GROUPS + packed % GROUPS
    d = tl.arange(0, BLOCK_D)
    at = (row * (KV_HEADS * GROUPS) + head).to(tl.int64)
    first = tl.load(FIRST + row).to(tl.int32)
    last = tl.load(LAST + row).to(tl.int32)
    low = tl.load(FIRST + tile * BLOCK_M // GROUPS).to(tl.int32)  # neither falls from row to row
    high = tl.load(LAST + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUPS, rows - 1)).to(tl.int32)
    start = low // BLOCK_N * BLOCK_N
    end = high + 1
    part = 0
    if parts > 1:
        if DOUBLINGS < 0:  # a window
            chunk = low // CHUNK + tl.program_id(2)
            part = chunk % parts
            start = tl.maximum(start, chunk * CHUNK)
            end = tl.minimum(end, chunk * CHUNK + CHUNK)
        else:
            part = tl.program_id(2)
            begin, behind = chunk_bounds(part, CHUNK, MOST, DOUBLINGS)
            start = tl.maximum(start, begin)
            end = tl.minimum(end, behind)
            if start >= end:
                return
    K += kv_head.to(tl.int64) * (SLOTS * D)
    V += kv_head.to(tl.int64) * (SLOTS * D)
    K_SCALES += kv_head * SLOTS
    V_SCALES += kv_head * SLOTS

    if WIDTH > 0:
        write_queries(
            Q, PRODUCT, BIAS, COS, SIN, Q_WEIGHT, tile * BLOCK_M, kv_head, rows, KV_HEADS, GROUPS, D, BLOCK_D, BLOCK_M,
            WIDTH, Q_AT, BIASED, Q_EPS, Q_WEIGHTED, PLUS, ROTARY, APART, REPEATED, ANGLES,
        )  # fmt: skip
        written = tl.load(LAST).to(tl.int32)
        write_keys_and_values(
            K, V, K_SCALES, V_SCALES, PRODUCT, BIAS, COS, SIN, K_WEIGHT, written, tl.maximum(start - written, 0),
            end - written, kv_head, D, SLOTS, BLOCK_D, WIDTH, K_AT, V_AT, BIASED, K_EPS, V_EPS, K_WEIGHTED, PLUS,
            ROTARY, APART, REPEATED, ANGLES, CODES,
        )  # fmt: skip
        tl.debug_barrier()

    q = tl.load(Q + at[:, None] * D + d[None, :], mask=d[None, :] < D, other=0)

    top, total, acc = attended(
        q, K, V, K_SCALES, V_SCALES, first, last, start, end, D, SLOTS, SCALE, SOFTCAP, CODES, BLOCK_D, BLOCK_M, BLOCK_N
    )

    here = packed < rows * GROUPS
    sink = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    if HAS_SINKS:
        sink = tl.load(SINKS + head).to(tl.float32) * 1.4426950408889634
    if DIRECT:
        total += tl.exp2(sink - top)
        out = (acc / total[:, None]).to(OUT.dtype.element_ty)
        tl.store(OUT + at[:, None] * D + d[None, :], out, mask=here[:, None] & (d[None, :] < D))
    else:
        whole = tl.full((), KV_HEADS * GROUPS, tl.int64) * rows  # a single row is a number of the compiler's
        mine = at + part * whole
        tl.store(STATS + mine * 2, top, mask=here)
        tl.store(STATS + mine * 2 + 1, total, mask=here)
        within = here & (start < end)  # what no token is in nothing adds
        tl.store(PARTS + mine[:, None] * D + d[None, :], acc, mask=within[:, None] & (d[None, :] < D))
        if DOUBLINGS >= 0:  # another launch adds
            return
        counter, arrived = ARRIVED + tile * KV_HEADS + kv_head, 0
        if parts > 1:
            arrived = arrive(counter)
        else:
            tl.debug_barrier()  # what one thread stored, another loads
        if arrived == parts - 1:
            oldest = 0
            used = 1
            if parts > 1:
                oldest = low // CHUNK
                used = tl.minimum(high // CHUNK + 1 - oldest, parts)
            for column in tl.range(0, BLOCK_D, COLUMNS):
                c = column + tl.arange(0, COLUMNS)
                these = here[:, None] & (c[None, :] < D)
                highest, sums = sink, tl.where(sink > float("-inf"), 1.0, 0.0)
                out = tl.full((BLOCK_M, COLUMNS), 0, tl.float32)
                for number in tl.range(used, num_stages=3):
                    its = at + (oldest + number) % parts * whole
                    its_top = tl.load(STATS + its * 2, mask=here, other=0, cache_modifier=".cg")
                    its_total = tl.load(STATS + its * 2 + 1, mask=here, other=0, cache_modifier=".cg")
                    its_out = tl.load(PARTS + its[:, None] * D + c[None, :], these, 0, cache_modifier=".cg")
                    raised = tl.maximum(highest, its_top)
                    shrunk, share = tl.exp2(highest - raised), tl.exp2(its_top - raised)
                    highest, sums = raised, tl.fma(its_total, share, sums * shrunk)
                    out = tl.fma(its_out, tl.broadcast_to(share[:, None], (BLOCK_M, COLUMNS)), out * shrunk[:, None])
                tl.store(OUT + at[:, None] * D + c[None, :], (out / sums[:, None]).to(OUT.dtype.element_ty), these)
            tl.store(counter, 0, mask=parts > 1)


CONFIGS = (64, 3, 4), (32, 4, 4), (64, 2, 4), (32, 3, 4), (32, 2, 4), (32, 2, 8), (16, 3, 4), (16, 2, 4)
"""The configurations: keys of a block, stages, warps."""
_tuned_kernel = triton.autotune(
    [triton.Config({"BLOCK_N": keys}, num_warps=warps, num_stages=stages) for keys, stages, warps in CONFIGS],
    key=["SLOTS", "D", "GROUPS", "BLOCK_M"],
)(_attention_kernel)


def rows_of_tile(groups: int, divided_rows: int, width: int) -> int:
    """Return the number of rows of a program, which counts all query heads of a key-value head."""
    return min(plain_rows(width), max(16, triton.next_power_of_2(groups * divided_rows)))


def launch(
    kernels: tuple[Any, Any], query: Tensor, keys: Tensor, values: Tensor, first: Tensor, last: Tensor, arrived: Tensor,
    scale: float, longest: int, divided_rows: int, softcap: float, sinks: Tensor | None,
    key_scales: Tensor | None = None, value_scales: Tensor | None = None, product: Product | None = None, **options,
) -> Tensor:  # fmt: skip
    """Return the result of ``attention`` for few rows, computed by specializations of ``_attention_kernel`` and
    ``attention_sum_kernel``. With a ``product``, ``query`` is also written, and keys and values are written in place.
    ``options`` go to the first kernel."""
    codes = key_scales is not None
    check_operands(query, keys, values, codes)
    query = query.contiguous()
    _, rows, heads, width = query.shape
    _, kv_heads, slots, _ = keys.shape
    groups, block_d = heads // kv_heads, max(16, triton.next_power_of_2(width))
    chunk, doublings, most = division(longest, slots, groups)
    block_m = rows_of_tile(groups, divided_rows, width)
    direct = most == 1
    out, has_sinks = torch.empty_like(query), sinks is not None
    if direct:
        parts, unsummed, stats = 1, out, out
    else:
        kept = most * torch.sym_min(rows, FEW) + rows
        unsummed = torch.empty(kept, heads, width, dtype=torch.float32, device=query.device)
        stats = torch.empty(kept, heads, 2, dtype=torch.float32, device=query.device)
        parts = 1 + (most - 1) * (FEW // torch.sym_max(rows, FEW))  # more rows fill a GPU without a division
    made = product or Product(query)
    optional = made.bias, made.cos, made.sin, made.q_weight, made.k_weight
    starts = dict(zip(("Q_AT", "K_AT", "V_AT"), made.starts, strict=True))
    eps = dict(zip(("Q_EPS", "K_EPS", "V_EPS"), made.eps, strict=True))
    rotary = dict(zip(("ROTARY", "APART", "REPEATED"), made.rotary or (0, 1, 1), strict=True))
    attend, add = kernels
    attend[((rows * groups + block_m - 1) // block_m, kv_heads, parts)](
        query, keys, values, first, last, sinks if has_sinks else query, arrived, unsummed, stats, out, rows, parts,
        made.out, *(query if each is None else each for each in (*optional, key_scales, value_scales)),
        WIDTH=product.out.shape[1] if product else 0, **starts, **eps, **rotary, PLUS=made.plus,
        ANGLES=1 if made.cos is None else made.cos.shape[-1], BIASED=made.bias is not None,
        Q_WEIGHTED=made.q_weight is not None, K_WEIGHTED=made.k_weight is not None, KV_HEADS=kv_heads, GROUPS=groups,
        D=width, SLOTS=slots, CHUNK=chunk, MOST=MOST_PARTS, DOUBLINGS=doublings, SCALE=scale,
        SOFTCAP=softcap, HAS_SINKS=has_sinks, DIRECT=direct, CODES=codes, BLOCK_D=block_d,
        COLUMNS=min(block_d, 8192 // block_m), BLOCK_M=block_m, **options,
    )  # fmt: skip
    if not direct and doublings >= 0:
        add[(rows, heads)](
            unsummed, stats, first, last, sinks if has_sinks else query, out, rows, parts, HEADS=heads, D=width,
            CHUNK=chunk, MOST=MOST_PARTS, DOUBLINGS=doublings, HAS_SINKS=has_sinks, BLOCK_D=block_d,
            BLOCK_PARTS=triton.next_power_of_2(most), AHEAD=AHEAD,
        )  # fmt: skip
    return out


def wrapped() -> tuple[Any, Any]:
    """Return the kernels as a traced operator calls them."""
    return wrap_triton(_tuned_kernel), wrap_triton(attention_sum_kernel)


@triton_op("eagle3::attention", mutates_args={})
def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    first: Tensor,
    last: Tensor,
    arrived: Tensor,
    scale: float,
    longest: int,
    divided_rows: int,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    """Return the softmax-weighted values of the positions that each row attends to, which must be in the cache. On CUDA
    this is the kernel of this module or of ``attention_chunk``, on the host ``attention_reference``. It is one node of
    an exported program.

    Args:
        query: bfloat16 [1, T, heads, head_dim], T may be dynamic
        keys, values: bfloat16 [1, kv_heads, slots, head_dim], contiguous; position p is in slot p % slots. With scales
            int8 codes
        first, last: int64 [T], the first and last position that row t attends to; neither decreases from row to row
        arrived: ``sums.counters()``, zero again when it returns; not used for a whole context
        scale: factor on the dot products of query and key
        longest: the most positions that a row attends to
        divided_rows: for up to ``FEW`` rows, the positions are divided among programs; the tiles suit this number of
            rows best. 0: they are never divided, T is that of a chunk of prefill (``attention_chunk``)
        softcap: a scaled dot product x becomes softcap * tanh(x / softcap); 0: no softcap
        sinks: [heads], an additional logit of each softmax, whose value is zero
        key_scales, value_scales: float32 [1, kv_heads, slots], by which codes are multiplied

    Returns:
        bfloat16 [1, T, heads, head_dim]; the bits of a row do not depend on the others for up to ``FEW`` of them

    Raises:
        ValueError: (on CUDA) another dtype, a cache that is not contiguous
    """
    scales = key_scales, value_scales
    if divided_rows:
        given = query, keys, values, first, last, arrived, scale, longest, divided_rows, softcap, sinks, *scales
        return launch(wrapped(), *given)
    kernel, options = wrapped_chunk(query.shape[3], key_scales is not None)
    return launch_chunk(kernel, query, keys, values, first, last, scale, softcap, sinks, *scales, **options)


@attention.register_kernel("cpu")
def attention_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    first: Tensor,
    last: Tensor,
    arrived: Tensor,
    scale: float,
    longest: int,
    divided_rows: int,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    """``attention`` in plain PyTorch, of any floating dtype."""
    if key_scales is not None and value_scales is not None:
        keys, values = dequantized((keys, values), (key_scales, value_scales), query.dtype)
    slots = keys.shape[2]
    position = last[-1] - (last[-1] - torch.arange(slots)) % slots  # the position that each slot was last written for
    mask = (position >= first[:, None]) & (position <= last[:, None])
    out = attend(query.transpose(1, 2), keys, values, mask[None, None], scale, softcap or None, sinks)
    return out.transpose(1, 2).contiguous()
