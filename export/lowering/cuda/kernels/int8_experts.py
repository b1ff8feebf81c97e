"""Gate and up of the experts of a few rows over INT8 weights in Triton; each chosen expert's weights are read once for
16 rows.

The weight is that of the linear over all experts (``targets/experts.py``), which serves many rows: torchao's
``IntxUnpackedToInt8Tensor``. Each expert has a range of its rows. A program takes 64 outputs of one expert
(``choices.py``) with the instructions of ``small_m.py``. K is not divided.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from eagle3.export.lowering.cuda.kernels.choices import choices_of, launch
from eagle3.export.lowering.cuda.kernels.small_m import (
    INT8,
    WARPS,
    add_int8_block,
    check_contiguous,
    ones_operand,
    sum_of_groups,
    tile_rows,
)

GROUP = 32
"""The number of weights along K that share a scale."""
BLOCK_K = 8 * GROUP


@triton.jit
def _int8_experts_small_m_kernel(
    X, Q, SCALE, ZERO, BIAS, CHOSEN, OUT, M, CHOICES,
    EXPERTS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, EACH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile, choice = tl.program_id(1), tl.program_id(2)
    m, t = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_T)[None, :]
    at, here = m * TOP_K + t, (m < M) & (t < TOP_K)
    expert = tl.load(CHOSEN + choice)
    tl.device_assert((expert >= 0) & (expert < EXPERTS), "there is no such expert")
    first, mine = choices_of(expert, tl.load(CHOSEN + at, mask=here, other=-1), at, here, CHOICES)
    if first < choice:
        return  # that choice's program computes the expert

    GROUPS: tl.constexpr = K // 32
    n0 = tile * BLOCK_N
    row = tl.arange(0, BLOCK_N)
    tile_row = tile_rows(row, BLOCK_N)
    word, k = tl.arange(0, 64)[None, :], tl.arange(0, BLOCK_K)[None, :]
    chunk = tl.arange(0, 8)[:, None]
    # Outputs past the end read the last one.
    WORDS = Q.to(tl.pointer_type(tl.uint32), bitcast=True) + expert * (N * (K // 4))  # 4 codes each
    words_at = tl.minimum(n0 + tile_row, N - 1)[:, None] * (K // 4) + word
    SCALE += expert * (N * GROUPS)
    ZERO += expert * (N * GROUPS)
    scales_at = tl.minimum(n0 + row, N - 1)[None, :] * GROUPS
    x_at = (mine // EACH).to(tl.int64)[:, None] * K + k
    there = mine[:, None] >= 0

    nowhere = tl.full((1, 1, 1), 0, tl.int32)
    never = nowhere + choice >= CHOICES
    magic = tl.load(WORDS + nowhere, mask=never, other=0x43004300)
    magic_high = tl.load(WORDS + nowhere, mask=never, other=0x43084308)
    ones = ones_operand(8)
    acc = tl.full((8, BLOCK_N, BLOCK_M), 0, tl.float32)
    group = scales_at + tl.minimum(chunk, GROUPS - 1)
    scale, zero = tl.load(SCALE + group), tl.load(ZERO + group)
    for block in tl.range(0, (K + BLOCK_K - 1) // BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            words = tl.load(WORDS + block * 64 + words_at)
            x = tl.load(X + block * BLOCK_K + x_at, mask=there, other=0)
        else:  # what is past the end has rows of 0
            words = tl.load(WORDS + block * 64 + words_at, mask=block * 64 + word < K // 4, other=0)
            x = tl.load(X + block * BLOCK_K + x_at, mask=there & (block * BLOCK_K + k < K), other=0)
        group = scales_at + tl.minimum(block * 8 + 8 + chunk, GROUPS - 1)
        scale_after, zero_after = tl.load(SCALE + group), tl.load(ZERO + group)
        acc = add_int8_block(acc, words, x, scale, zero, magic, magic_high, ones, BLOCK_N, BLOCK_M, 32)
        scale, zero = scale_after, zero_after

    n = n0 + tile_row
    within = n < N
    total = sum_of_groups(acc, BLOCK_N, BLOCK_M)
    total += tl.load(BIAS + expert * N + n, mask=within, other=0).to(tl.float32)[:, None]
    at = mine.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(OUT + at, total.to(OUT.dtype.element_ty), mask=(mine[None, :] >= 0) & within[:, None])


def _launch_experts(
    kernel: Any, x: Tensor, qdata: Tensor, scale: Tensor, zero: Tensor, bias: Tensor, chosen: Tensor
) -> Tensor:
    check(x, qdata, scale, zero, bias)
    check_contiguous(qdata, scale, zero, bias)
    (m, top_k), (experts, n), k = chosen.shape, bias.shape, x.shape[1]
    x, chosen = x.contiguous(), chosen.contiguous()

    def run(count: Any, constants: dict[str, Any], out: Tensor) -> None:
        kernel[(count, triton.cdiv(n, INT8.n), m * top_k)](
            x, qdata, scale, zero, bias, chosen, out, m, m * top_k, EXPERTS=experts, N=n, K=k, BLOCK_N=INT8.n,
            BLOCK_K=BLOCK_K, STAGES=INT8.stages, num_warps=WARPS, **constants,
        )  # fmt: skip

    return launch(x, chosen, n, run)


def check(x: Tensor, qdata: Tensor, scale: Tensor, zero: Tensor, bias: Tensor) -> None:
    """Raise ValueError for shapes that do not agree."""
    (experts, n), k, shape = bias.shape, x.shape[1], tuple(qdata.shape)
    if k % GROUP or shape != (experts * n, k):
        raise ValueError(
            f"the weight is {shape[0]} x {shape[1]}: {experts} experts of {n} x {k} have {experts * n} x {k}, K in "
            f"groups of {GROUP}"
        )
    if scale.shape != zero.shape or scale.shape != (experts * n, k // GROUP):
        raise ValueError(
            f"scale is {tuple(scale.shape)} and zero {tuple(zero.shape)}: a weight of {experts * n} x {k} has "
            f"{experts * n} x {k // GROUP} of each"
        )


@triton_op("eagle3::int8_experts_small_m", mutates_args={})
def int8_experts_small_m(x: Tensor, qdata: Tensor, scale: Tensor, zero: Tensor, bias: Tensor, chosen: Tensor) -> Tensor:
    """Return for each choice its expert's product ``x @ w.T + bias`` with ``w = (q - zero) * scale``.

    On CUDA the operator is one launch of this module's kernel; on the host it is ``experts_reference``. A row's bits do
    not depend on the other rows or their number.

    Args:
        x: bfloat16 [M, K], or [M * k, K], a row for each choice; K a multiple of 32; M of 1 to 16 may be dynamic
        qdata: int8 [experts * N, K]
        scale: bfloat16 [experts * N, K / 32]
        zero: int8, as many
        bias: bfloat16 [experts, N]
        chosen: int64 [M, k], a row's experts, each once

    Returns:
        bfloat16 [M * k, N]

    Raises:
        ValueError: shapes that do not agree; on CUDA, another dtype of ``x``, weights that are not contiguous, or more
            than 16 rows
    """
    return _launch_experts(wrap_triton(_int8_experts_small_m_kernel), x, qdata, scale, zero, bias, chosen)


@int8_experts_small_m.register_kernel("cpu")
def experts_reference(x: Tensor, qdata: Tensor, scale: Tensor, zero: Tensor, bias: Tensor, chosen: Tensor) -> Tensor:
    """``int8_experts_small_m`` in plain PyTorch: float32 on the dequantized weights, any floating dtype of ``x``."""
    check(x, qdata, scale, zero, bias)
    of, groups = chosen.flatten(), qdata.float().unflatten(1, (-1, GROUP))
    weight = ((groups - zero.float()[..., None]) * scale.float()[..., None]).flatten(1)
    x = x.repeat_interleave(of.shape[0] // x.shape[0], 0)
    out = torch.einsum("ck,cnk->cn", x.float(), weight.unflatten(0, (bias.shape[0], -1))[of])
    return (out + bias.float()[of]).to(x.dtype)
