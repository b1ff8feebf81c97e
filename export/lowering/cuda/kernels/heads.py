"""Computes and writes the heads that attention needs from a matmul, in Triton: norms, rotary embeddings, stores."""

import triton
import triton.language as tl


@triton.jit
def _head(
    PRODUCT, BIAS, WEIGHT, COS, SIN, row, column, here, d,
    D: tl.constexpr, WIDTH: tl.constexpr, BIASED: tl.constexpr, EPS: tl.constexpr, WEIGHTED: tl.constexpr,
    PLUS: tl.constexpr, ROTARY: tl.constexpr, APART: tl.constexpr, REPEATED: tl.constexpr, ANGLES: tl.constexpr,
):  # fmt: skip
    # Returns float32 [places, BLOCK_D]: the heads that begin at ``column`` ([places, 1], or one for all) in rows of
    # PRODUCT, with their bias, normed unless EPS is 0, with rotary embeddings on the first ROTARY dimensions. All loads
    # are issued before the first result is used.
    at = row[:, None] * WIDTH + column
    real = (d < D)[None, :]
    inside = here[:, None] & real
    x = tl.load(PRODUCT + at + d[None, :], mask=inside, other=0)
    if BIASED:
        bias = tl.load(BIAS + column + d[None, :], mask=real, other=0).to(tl.float32)
    if WEIGHTED:
        weight = tl.load(WEIGHT + d, mask=d < D, other=0).to(tl.float32)[None, :] + PLUS
    if ROTARY > 0:
        if 2 * APART == ROTARY:  # as below, in fewer registers
            second = d >= APART
            across = (d + APART) % ROTARY
        else:
            second = d // APART % 2 == 1
            across = tl.where(second, d - APART, d + APART)
        turning = (d < ROTARY)[None, :]
        y = tl.load(PRODUCT + at + across[None, :], mask=here[:, None] & turning, other=0)
        if BIASED:
            bias_across = tl.load(BIAS + column + across[None, :], mask=turning, other=0).to(tl.float32)
        if WEIGHTED:
            weight_across = tl.load(WEIGHT + across, mask=d < ROTARY, other=0).to(tl.float32)[None, :] + PLUS
        angle = row[:, None] * ANGLES + (d // REPEATED % ANGLES)[None, :]
        cos = tl.load(COS + angle, mask=here[:, None] & turning, other=1).to(tl.float32)
        sin = tl.load(SIN + angle, mask=here[:, None] & turning, other=0).to(tl.float32)
        y = y.to(tl.float32)
        if BIASED:
            y += bias_across
        y = tl.where(second[None, :], y, -y)
    x = x.to(tl.float32)
    if BIASED:
        x += bias
    if EPS > 0:
        shrunk = tl.rsqrt(tl.sum(x * x, 1) / D + EPS)[:, None]
        x = x * shrunk
        if ROTARY > 0:
            y = y * shrunk
    if WEIGHTED:
        x = x * weight
        if ROTARY > 0:
            y = y * weight_across
    if ROTARY > 0:
        x = x * cos + y * sin
    return x


@triton.jit
def _codes(heads):
    # Returns the codes [places, BLOCK_D], whole numbers in float32, and the scales [places].
    heads = heads.to(tl.float32)
    scales = tl.maximum(tl.max(tl.abs(heads), 1), 1e-20) / 127
    return tl.floor(heads / scales[:, None] + 0.5), scales


@triton.jit
def write_queries(
    Q, PRODUCT, BIAS, COS, SIN, WEIGHT, begin, kv_head, rows,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr, AT: tl.constexpr, BIASED: tl.constexpr, EPS: tl.constexpr, WEIGHTED: tl.constexpr,
    PLUS: tl.constexpr, ROTARY: tl.constexpr, APART: tl.constexpr, REPEATED: tl.constexpr, ANGLES: tl.constexpr,
):  # fmt: skip
    # Writes the queries of a tile of the attention, from ``begin``.
    MOST: tl.constexpr = 4096 // BLOCK_D
    PLACES: tl.constexpr = MOST if MOST < BLOCK_M else BLOCK_M
    d = tl.arange(0, BLOCK_D)
    for place in tl.static_range(0, BLOCK_M, PLACES):
        packed = begin + place + tl.arange(0, PLACES)
        row = packed // GROUPS
        head = kv_head * GROUPS + packed % GROUPS
        here = row < rows
        x = _head(
            PRODUCT, BIAS, WEIGHT, COS, SIN, row, (AT + head * D)[:, None], here, d,
            D, WIDTH, BIASED, EPS, WEIGHTED, PLUS, ROTARY, APART, REPEATED, ANGLES,
        )  # fmt: skip
        at = (row * (KV_HEADS * GROUPS) + head) * D
        tl.store(Q + at[:, None] + d[None, :], x.to(Q.dtype.element_ty), mask=here[:, None] & (d < D)[None, :])


@triton.jit
def write_keys_and_values(
    K, V, K_SCALES, V_SCALES, PRODUCT, BIAS, COS, SIN, WEIGHT, earliest, begin, end, kv_head,
    D: tl.constexpr, SLOTS: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr, K_AT: tl.constexpr,
    V_AT: tl.constexpr, BIASED: tl.constexpr, K_EPS: tl.constexpr, V_EPS: tl.constexpr, WEIGHTED: tl.constexpr,
    PLUS: tl.constexpr, ROTARY: tl.constexpr, APART: tl.constexpr, REPEATED: tl.constexpr, ANGLES: tl.constexpr,
    CODES: tl.constexpr,
):  # fmt: skip
    # Writes the keys and values of the rows from ``begin`` to ``end``; row 0 has the position ``earliest``. If CODES
    # they are written as int8 codes and their scales, as ``int8_codes`` makes them.
    PLACES: tl.constexpr = 8 if BLOCK_D > 256 else 16
    d = tl.arange(0, BLOCK_D)
    for place in tl.range(begin, end, PLACES, num_stages=1):
        row = place + tl.arange(0, PLACES)
        here = row < end
        k = _head(
            PRODUCT, BIAS, WEIGHT, COS, SIN, row, K_AT + kv_head * D, here, d,
            D, WIDTH, BIASED, K_EPS, WEIGHTED, PLUS, ROTARY, APART, REPEATED, ANGLES,
        )  # fmt: skip
        v = _head(
            PRODUCT, BIAS, WEIGHT, COS, SIN, row, V_AT + kv_head * D, here, d,
            D, WIDTH, BIASED, V_EPS, False, 0.0, 0, 1, 1, 1,
        )  # fmt: skip
        slot = (row + earliest) % SLOTS
        places = slot[:, None] * D + d[None, :]
        if CODES:
            k, k_scales = _codes(k.to(PRODUCT.dtype.element_ty))
            v, v_scales = _codes(v.to(PRODUCT.dtype.element_ty))
            tl.store(K_SCALES + slot, k_scales, mask=here)
            tl.store(V_SCALES + slot, v_scales, mask=here)
        inside = here[:, None] & (d < D)[None, :]
        tl.store(K + places, k.to(K.dtype.element_ty), mask=inside)
        tl.store(V + places, v.to(V.dtype.element_ty), mask=inside)
