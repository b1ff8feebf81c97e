"""Heads of a product as attention takes them, in Triton: normed, turned by the angles of their rows, written."""

import triton
import triton.language as tl


@triton.jit
def _head(
    PRODUCT, WEIGHT, COS, SIN, at, row, here, d,
    D: tl.constexpr, EPS: tl.constexpr, WEIGHTED: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    # float32 [places, BLOCK_D]: the heads that begin at ``at`` in PRODUCT, normed unless EPS is 0, turned by the angles
    # of their rows. What it takes is loaded at once, before the first of it is waited for.
    inside = here[:, None] & (d < D)[None, :]
    x = tl.load(PRODUCT + at[:, None] + d[None, :], mask=inside, other=0)
    if WEIGHTED:
        weight = tl.load(WEIGHT + d, mask=d < D, other=0).to(tl.float32)[None, :]
    if TURNED:
        across = (d + D // 2) % D
        y = tl.load(PRODUCT + at[:, None] + across[None, :], mask=inside, other=0)
        if WEIGHTED:
            weight_across = tl.load(WEIGHT + across, mask=d < D, other=0).to(tl.float32)[None, :]
        angle = row[:, None] * D + d[None, :]
        cos = tl.load(COS + angle, mask=inside, other=0).to(tl.float32)
        sin = tl.load(SIN + angle, mask=inside, other=0).to(tl.float32)
        y = tl.where((d < D // 2)[None, :], -y.to(tl.float32), y.to(tl.float32))
    x = x.to(tl.float32)
    if EPS > 0:
        shrunk = tl.rsqrt(tl.sum(x * x, 1) / D + EPS)[:, None]
        x = x * shrunk
        if TURNED:
            y = y * shrunk
    if WEIGHTED:
        x = x * weight
        if TURNED:
            y = y * weight_across
    if TURNED:
        x = x * cos + y * sin
    return x


@triton.jit
def write_queries(
    Q, PRODUCT, COS, SIN, WEIGHT, begin, kv_head, rows,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr, AT: tl.constexpr, EPS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    # those of a tile of the attention, from ``begin``
    MOST: tl.constexpr = 4096 // BLOCK_D
    PLACES: tl.constexpr = MOST if MOST < BLOCK_M else BLOCK_M
    d = tl.arange(0, BLOCK_D)
    for place in tl.static_range(0, BLOCK_M, PLACES):
        packed = begin + place + tl.arange(0, PLACES)
        row = packed // GROUPS
        head = kv_head * GROUPS + packed % GROUPS
        here = row < rows
        x = _head(PRODUCT, WEIGHT, COS, SIN, row * WIDTH + AT + head * D, row, here, d, D, EPS, WEIGHTED, True)
        at = (row * (KV_HEADS * GROUPS) + head) * D
        tl.store(Q + at[:, None] + d[None, :], x.to(Q.dtype.element_ty), mask=here[:, None] & (d < D)[None, :])


@triton.jit
def write_keys_and_values(
    K, V, PRODUCT, COS, SIN, WEIGHT, earliest, begin, end, kv_head,
    D: tl.constexpr, SLOTS: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr, K_AT: tl.constexpr,
    V_AT: tl.constexpr, K_EPS: tl.constexpr, V_EPS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    # those of the rows from ``begin`` to ``end``, of which row 0 has the position ``earliest``
    PLACES: tl.constexpr = 8 if BLOCK_D > 256 else 16
    d = tl.arange(0, BLOCK_D)
    for place in tl.range(begin, end, PLACES, num_stages=1):
        row = place + tl.arange(0, PLACES)
        here = row < end
        at = row * WIDTH + kv_head * D
        k = _head(PRODUCT, WEIGHT, COS, SIN, at + K_AT, row, here, d, D, K_EPS, WEIGHTED, True)
        v = _head(PRODUCT, WEIGHT, COS, SIN, at + V_AT, row, here, d, D, V_EPS, False, False)
        places = ((row + earliest) % SLOTS)[:, None] * D + d[None, :]
        inside = here[:, None] & (d < D)[None, :]
        tl.store(K + places, k.to(K.dtype.element_ty), mask=inside)
        tl.store(V + places, v.to(V.dtype.element_ty), mask=inside)
