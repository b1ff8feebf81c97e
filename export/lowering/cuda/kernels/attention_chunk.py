"""Attention of a chunk of prefill in Triton, and the loop over keys that it shares with the kernel of few rows
(``attention``).

No positions are divided among programs. The rows of a program are those of all query heads of one key-value head,
stacked, so that a block of keys serves them all; other programs find it in L2.

On sm_90 a program takes 128 rows, or 64 of heads wider than 256, since ``wgmma`` reads keys, values and queries from
shared memory. That leaves the registers for the rows, and every warp multiplies what is loaded once: shared memory
limits the other code, in which each warp loads its keys and values into registers. Code without ``wgmma`` has the same
grid on sm_90 and takes the rows of a program ``PLAIN_ROWS`` at a time, one after the other.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from eagle3.export.lowering.cuda.kernels.sums import has_wgmma


@triton.jit
def attended(
    q, K, V, K_SCALES, V_SCALES, first, last, start, end, D: tl.constexpr, SLOTS: tl.constexpr, SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr, CODES: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # q bf16 [ROWS, BLOCK_D], first and last int32 [ROWS], K and V of one head. Returns for the positions from start to
    # end, in float32: the maximum (of powers of 2) [ROWS], the sum [ROWS] and the weighted values [ROWS, BLOCK_D].
    d = tl.arange(0, BLOCK_D)
    WHOLE: tl.constexpr = D == BLOCK_D
    top = tl.full((ROWS,), -1e30, tl.float32)  # finite: of a row without a position so far, no difference is NaN
    total = tl.full((ROWS,), 0, tl.float32)
    acc = tl.full((ROWS, BLOCK_D), 0, tl.float32)
    for begin in tl.range(start, end, BLOCK_N):
        position = begin + tl.arange(0, BLOCK_N)
        slot = position % SLOTS
        places = slot[:, None] * D + d[None, :]
        k = tl.load(K + places) if WHOLE else tl.load(K + places, mask=d[None, :] < D, other=0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)))
        if CODES:
            scores *= tl.load(K_SCALES + slot)[None, :]
        if SOFTCAP > 0:
            scores = SOFTCAP * 1.4426950408889634 * (1 - 2 / (1 + tl.exp(scores * (2 * SCALE / SOFTCAP))))
        else:
            scores = scores * (SCALE * 1.4426950408889634)
        seen = (position[None, :] >= first[:, None]) & (position[None, :] <= last[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrunk = tl.exp2(top - higher)
        total = total * shrunk + tl.sum(weights, 1)
        top = higher
        v = tl.load(V + places) if WHOLE else tl.load(V + places, mask=d[None, :] < D, other=0)
        if CODES:
            weights *= tl.load(V_SCALES + slot)[None, :]
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * shrunk[:, None])
    return top, total, acc


@triton.jit
def _attention_chunk_kernel(
    Q, K, V, FIRST, LAST, SINKS, OUT, K_SCALES, V_SCALES, rows, KV_HEADS: tl.constexpr, GROUPS: tl.constexpr,
    D: tl.constexpr, SLOTS: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    CODES: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, PLAIN_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Q and OUT bf16 [rows, heads, D], K and V bf16 [KV_HEADS, SLOTS, D], or if CODES int8 with K_SCALES and V_SCALES
    # float32 [KV_HEADS, SLOTS]. A program takes BLOCK_M rows, ROWS at a time.
    m0 = tl.program_id(0) * BLOCK_M
    if BLOCK_M == ROWS:
        _tile_of_rows(
            Q, K, V, FIRST, LAST, SINKS, OUT, K_SCALES, V_SCALES, rows, m0, KV_HEADS, GROUPS, D, SLOTS, SCALE, SOFTCAP,
            HAS_SINKS, CODES, BLOCK_D, ROWS, BLOCK_N,
        )  # fmt: skip
    else:
        for own in tl.range((tl.minimum(BLOCK_M, rows * GROUPS - m0) + ROWS - 1) // ROWS, num_stages=1):
            _tile_of_rows(
                Q, K, V, FIRST, LAST, SINKS, OUT, K_SCALES, V_SCALES, rows, m0 + own * ROWS, KV_HEADS, GROUPS, D,
                SLOTS, SCALE, SOFTCAP, HAS_SINKS, CODES, BLOCK_D, ROWS, BLOCK_N,
            )  # fmt: skip


@triton.jit
def _tile_of_rows(
    Q, K, V, FIRST, LAST, SINKS, OUT, K_SCALES, V_SCALES, rows, m0, KV_HEADS: tl.constexpr, GROUPS: tl.constexpr,
    D: tl.constexpr, SLOTS: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    CODES: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(1)
    packed = m0 + tl.arange(0, ROWS)
    row = tl.minimum(packed // GROUPS, rows - 1)
    head = kv_head * GROUPS + packed % GROUPS
    at = (row * (KV_HEADS * GROUPS) + head).to(tl.int64)[:, None] * D + tl.arange(0, BLOCK_D)[None, :]
    within = tl.arange(0, BLOCK_D)[None, :] < D
    first = tl.load(FIRST + row).to(tl.int32)
    last = tl.load(LAST + row).to(tl.int32)
    low = tl.load(FIRST + m0 // GROUPS).to(tl.int32)  # neither falls from row to row
    high = tl.load(LAST + tl.minimum((m0 + ROWS - 1) // GROUPS, rows - 1)).to(tl.int32)
    heads_before = kv_head.to(tl.int64) * SLOTS
    q = tl.load(Q + at, mask=within, other=0)
    top, total, acc = attended(
        q, K + heads_before * D, V + heads_before * D, K_SCALES + heads_before, V_SCALES + heads_before, first, last,
        low // BLOCK_N * BLOCK_N, high + 1, D, SLOTS, SCALE, SOFTCAP, CODES, BLOCK_D, ROWS, BLOCK_N,
    )  # fmt: skip
    if HAS_SINKS:
        total += tl.exp2(tl.load(SINKS + head).to(tl.float32) * 1.4426950408889634 - top)
    out = (acc / total[:, None]).to(OUT.dtype.element_ty)
    tl.store(OUT + at, out, mask=(packed < rows * GROUPS)[:, None] & within)


CONFIGS = (64, 3, 4), (32, 4, 4), (64, 2, 4), (64, 2, 8), (32, 3, 4), (32, 2, 4), (32, 2, 8)
"""The configurations without ``wgmma``: keys of a block, stages, warps."""
_tuned_kernel = triton.autotune(
    [triton.Config({"BLOCK_N": keys}, num_warps=warps, num_stages=stages) for keys, stages, warps in CONFIGS],
    key=["SLOTS", "D", "GROUPS", "BLOCK_M"],
)(_attention_chunk_kernel)


def plain_rows(width: int) -> int:
    """Return the most rows that a program without ``wgmma`` takes at a time for heads of ``width``; the registers
    bound them."""
    return 128 if width <= 64 else 64 if width <= 256 else 32


def wgmma_program(width: int, codes: bool) -> dict[str, int]:
    """Return the constants and options of a program with ``wgmma``. Larger tiles would spill registers, or their blocks
    of keys and values would not fit into shared memory twice."""
    rows = 128 if width <= 256 else 64
    keys = (64 if width <= 256 else 32) // (2 if codes and width > 128 else 1)
    warps, stages = (4, 3) if width <= 64 else (8, 2)
    return {"BLOCK_M": rows, "BLOCK_N": keys, "num_warps": warps, "num_stages": stages}


def wrapped_chunk(width: int, codes: bool) -> tuple[Any, dict[str, int]]:
    """Return the kernel as a traced operator calls it, and the options of its launch."""
    if has_wgmma():
        return wrap_triton(_attention_chunk_kernel), wgmma_program(width, codes)
    return wrap_triton(_tuned_kernel), {"BLOCK_M": plain_rows(width)}


def check_operands(query: Tensor, keys: Tensor, values: Tensor, codes: bool) -> None:
    """Raise ValueError for another dtype than the kernels take, or a cache that is not contiguous."""
    if query.dtype != torch.bfloat16 or not keys.dtype == values.dtype == (torch.int8 if codes else torch.bfloat16):
        raise ValueError(
            f"query is {query.dtype}, the cache {keys.dtype}: the kernel takes torch.bfloat16, and codes in torch.int8"
        )
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError(f"the caches have strides {keys.stride()} and {values.stride()}: not contiguous")


def launch_chunk(
    kernel: Any, query: Tensor, keys: Tensor, values: Tensor, first: Tensor, last: Tensor, scale: float, softcap: float,
    sinks: Tensor | None, key_scales: Tensor | None = None, value_scales: Tensor | None = None, **options: int,
) -> Tensor:  # fmt: skip
    """Return the result of ``attention``, computed by ``_attention_chunk_kernel``. ``options`` are its ``BLOCK_M`` and,
    unless it is tuned, its ``BLOCK_N``; those of ``wgmma_program`` with ``wgmma``. Raises ValueError for operands that
    ``check_operands`` refuses."""
    codes = key_scales is not None
    check_operands(query, keys, values, codes)
    query = query.contiguous()
    _, rows, heads, width = query.shape
    _, kv_heads, slots, _ = keys.shape
    groups, block_m, out = heads // kv_heads, options["BLOCK_M"], torch.empty_like(query)
    own = {"ROWS": block_m, "PLAIN_ROWS": plain_rows(width) if has_wgmma() else 0} | options
    optional = sinks, key_scales, value_scales
    sink_logits, *scales = (query if each is None else each for each in optional)
    kernel[((rows * groups + block_m - 1) // block_m, kv_heads)](
        query, keys, values, first, last, sink_logits, out, *scales, rows, KV_HEADS=kv_heads, GROUPS=groups, D=width,
        SLOTS=slots, SCALE=scale, SOFTCAP=softcap, HAS_SINKS=sinks is not None, CODES=codes,
        BLOCK_D=max(16, triton.next_power_of_2(width)), **own,
    )  # fmt: skip
    return out
