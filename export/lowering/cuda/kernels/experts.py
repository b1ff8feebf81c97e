"""The experts of a few rows over INT4 weights in Triton: each chosen expert's weights are read once, however many of up
to 16 rows chose it.

ExecuTorch's ``fused_moe`` reads them once for each row, a byte twice, with 10 to 12 instructions a weight. Here a
program takes 128 outputs of one expert for all rows at once, as ``int4.py`` does for a linear, with its instructions:
the tensor cores multiply 8 rows or 16 in any case, and what a row did not choose is not stored. There is a program for
each choice of each row; it ends at once if an earlier choice is of the same expert.

Weights are symmetric: w = (q - 8) * s, with a scale for 32 of K. Their codes are those of ``fused_moe``, which reads
them for many rows (``sorted_experts.py``). Gate and up of a program are the same 64 outputs of both, so the activation
is computed where the products are. K is not divided: for Gemma 4 26B-A4B a row's 8 experts have 88 programs and 176,
four rows' four times as many.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.library import triton_op, wrap_triton

from eagle3.export.lowering.cuda.kernels.int4 import BLOCK, INT4, TILE, add_half
from eagle3.export.lowering.cuda.kernels.small_m import (
    ROWS,
    WARPS,
    check_contiguous,
    on_all_rows,
    ones_operand,
    sum_of_groups,
)
from eagle3.export.lowering.cuda.kernels.sums import gate_of, gated, row_tiles

GROUP = 32
"""Weights that share a scale, along K."""
ZERO = 8
"""The code of a weight of 0."""


@triton.jit
def _terms(scales):
    # bf16 [8, 64] in the order of N -> -(128 + 8) and s as float32 in the halves of 64 bits [8, 64, 1]
    both = (scales.to(tl.uint16, bitcast=True).to(tl.uint64) << 16) | tl.full((8, 64), 0xC308000000000000, tl.uint64)
    return tl.reshape(tl.permute(tl.reshape(both, (8, 8, 8)), (0, 2, 1)), (8, 64, 1))


@triton.jit
def int4_experts_small_m_kernel(
    X, Q, SCALE, CHOSEN, FACTORS, OUT, M, CHOICES,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, EACH: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    tile, choice = tl.program_id(1), tl.program_id(2)
    expert = tl.load(CHOSEN + choice)
    m, t = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_T)[None, :]
    here = (m < M) & (t < TOP_K)
    own = here & (tl.load(CHOSEN + m * TOP_K + t, mask=here, other=-1) == expert)
    if tl.min(tl.where(own, m * TOP_K + t, CHOICES)) < choice:
        return  # that choice's program computes the expert for all rows
    mine = tl.max(tl.where(own, m * TOP_K + t, -1), 1)  # each row's choice of the expert, or -1

    OUTPUTS: tl.constexpr = N if ACTIVATION == "" else N // 2
    GROUPS: tl.constexpr = K // 32
    # Two halves of 64 outputs: of a gate and of what it gates, or neighbours. A lane's rows (8 apart) are neighbours.
    row = tl.arange(0, 64)
    row = (row % 8) * 8 + row // 8
    if ACTIVATION == "":
        n0, n1 = tile * BLOCK_N, tile * BLOCK_N + 64
    else:
        n0, n1 = tile * 64, tile * 64 + OUTPUTS
    WORDS = Q.to(tl.pointer_type(tl.uint32), bitcast=True) + expert * (N * (K // 8))  # 8 codes each
    SCALE += expert * (GROUPS * N)
    word, k = tl.arange(0, 32)[None, :], tl.arange(0, BLOCK_K)[None, :]
    # Outputs past the end read the last one.
    words0_at = tl.minimum(n0 + row, OUTPUTS - 1)[:, None] * (K // 8) + word
    words1_at = tl.minimum(n1 + row, N - 1)[:, None] * (K // 8) + word
    group, n = tl.arange(0, 8)[:, None], tl.arange(0, 64)[None, :]
    scale0_at, scale1_at = tl.minimum(n0 + n, OUTPUTS - 1), tl.minimum(n1 + n, N - 1)
    x_at = (mine // EACH).to(tl.int64)[:, None] * K + k
    there = mine[:, None] >= 0

    # A constant that the compiler cannot see, by a load never made: as an immediate it would take its own instruction.
    nowhere = tl.full((1, 1, 1), 0, tl.int32)
    magic = tl.load(WORDS + nowhere, mask=nowhere + choice >= CHOICES, other=0x43004300)
    ones = ones_operand(4)
    acc0 = tl.full((8, 64, BLOCK_M), 0, tl.float32)
    acc1 = tl.full((8, 64, BLOCK_M), 0, tl.float32)
    at = tl.minimum(group, GROUPS - 1) * N
    scale0, scale1 = tl.load(SCALE + at + scale0_at), tl.load(SCALE + at + scale1_at)
    for block in tl.range(0, (K + BLOCK_K - 1) // BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            words0, words1 = tl.load(WORDS + block * 32 + words0_at), tl.load(WORDS + block * 32 + words1_at)
            x = tl.load(X + block * BLOCK_K + x_at, mask=there, other=0)
        else:  # what is past the end has rows of 0
            inside = block * 32 + word < K // 8
            words0 = tl.load(WORDS + block * 32 + words0_at, mask=inside, other=0)
            words1 = tl.load(WORDS + block * 32 + words1_at, mask=inside, other=0)
            x = tl.load(X + block * BLOCK_K + x_at, mask=there & (block * BLOCK_K + k < K), other=0)
        at = tl.minimum(block * 8 + 8 + group, GROUPS - 1) * N
        scale0_after, scale1_after = tl.load(SCALE + at + scale0_at), tl.load(SCALE + at + scale1_at)

        x = tl.reshape(x, (BLOCK_M, 8, 4, 2, 2, 2))  # m, group, word, half, i // 2, i % 2
        x01, x23 = tl.split(tl.permute(x, (1, 2, 5, 3, 0, 4)))
        x01, x23 = tl.reshape(x01, (8, 16, BLOCK_M)), tl.reshape(x23, (8, 16, BLOCK_M))
        sum_x = on_all_rows(tl.dot(ones, x23, tl.dot(ones, x01)), 64, BLOCK_M)
        acc0 = add_half(acc0, words0, _terms(scale0), x01, x23, sum_x, magic, BLOCK_M)
        acc1 = add_half(acc1, words1, _terms(scale1), x01, x23, sum_x, magic, BLOCK_M)
        scale0, scale1 = scale0_after, scale1_after
    total0, total1 = sum_of_groups(acc0, 64, BLOCK_M), sum_of_groups(acc1, 64, BLOCK_M)

    OUT += mine.to(tl.int64)[None, :] * OUTPUTS
    there = mine[None, :] >= 0
    if ACTIVATION == "":
        factor = tl.load(FACTORS + mine, mask=mine >= 0, other=0)[None, :]
        tl.store(OUT + (n1 + row)[:, None], (total1 * factor).to(OUT.dtype.element_ty),
                 mask=there & (n1 + row < N)[:, None])  # fmt: skip
        total0 *= factor
    else:
        total0 = gate_of(total0, total1, ACTIVATION)
    tl.store(OUT + (n0 + row)[:, None], total0.to(OUT.dtype.element_ty), mask=there & (n0 + row < OUTPUTS)[:, None])


def _launch_experts(
    kernel: Any, x: Tensor, codes: Tensor, scale: Tensor, chosen: Tensor, factors: Tensor, activation: str = ""
) -> Tensor:
    """Return a row for each choice: those of the experts' gated outputs with an ``activation``, otherwise of their
    outputs, times ``factors``. ``x`` has a row for each row of ``chosen`` or for each choice."""
    check(x, codes, scale, chosen)
    check_contiguous(codes, scale)
    if x.dtype != torch.bfloat16:
        raise ValueError(f"x is {x.dtype}: the kernel takes torch.bfloat16")
    (m, top_k), (_, n, half_k) = chosen.shape, codes.shape
    if not statically_known_true(m <= ROWS[-1]):
        raise ValueError(f"{m} rows of choices: the kernel takes {ROWS[-1]}")
    x, chosen, factors = x.contiguous(), chosen.contiguous(), factors.contiguous()
    each = 1 if statically_known_true(x.shape[0] == m * top_k) else top_k
    out = x.new_empty(m * top_k, n // 2 if activation else n)
    for rows, count in row_tiles(m, ROWS):
        kernel[(count, triton.cdiv(n, TILE), m * top_k)](
            x, codes, scale, chosen, factors, out, m, m * top_k, N=n, K=2 * half_k, TOP_K=top_k, EACH=each,
            BLOCK_M=rows, BLOCK_T=triton.next_power_of_2(top_k), BLOCK_N=TILE, BLOCK_K=BLOCK, STAGES=INT4.stages,
            ACTIVATION=activation, num_warps=WARPS,
        )  # fmt: skip
    return out


def check(x: Tensor, codes: Tensor, scale: Tensor, chosen: Tensor) -> None:
    """Raise ValueError for shapes that do not agree."""
    (m, top_k), (experts, n, half_k) = chosen.shape, codes.shape
    if x.shape[1] != 2 * half_k or x.shape[0] not in (m, m * top_k):
        given = f"x is {tuple(x.shape)}, codes {tuple(codes.shape)}, chosen {tuple(chosen.shape)}"
        raise ValueError(f"{given}: x has twice the codes' last size, and a row for each row of chosen or each choice")
    if scale.shape != (experts, 2 * half_k // GROUP, n) or 2 * half_k % GROUP:
        raise ValueError(
            f"scales are {tuple(scale.shape)}: experts of {n} x {2 * half_k} have {experts} x {2 * half_k / GROUP:g} x "
            f"{n}, K in groups of {GROUP}"
        )


@triton_op("eagle3::int4_experts_small_m", mutates_args={})
def int4_experts_small_m(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    chosen: Tensor,
    factors: Tensor,
    activation: str,
) -> Tensor:
    """Return for each choice its expert's output times its factor; the expert computes ``down @ (act(gate) * up)``.

    On CUDA these are two launches of the kernel of this module, on the host ``experts_reference``. A row's bits do not
    depend on the other rows or their number.

    Args:
        x: bfloat16 [M, hidden] or [M * k, hidden], a row for each choice; M of 1 to 16 may be dynamic
        gate_up: int8 [experts, 2 * width, hidden / 2], two codes a byte; the low 4 bits are the even column
        gate_up_scale: bfloat16 [experts, hidden / 32, 2 * width]
        down: int8 [experts, hidden, width / 2]
        down_scale: bfloat16 [experts, width / 32, hidden]
        chosen: int64 [M, k], a row's experts, each once
        factors: float32 [M, k]
        activation: ``SILU`` or ``GELU_TANH`` of ``sums.py``

    Returns:
        bfloat16 [M * k, hidden]

    Raises:
        ValueError: shapes that do not agree; on CUDA, another dtype of ``x``, weights that are not contiguous, or more
            than 16 rows
    """
    kernel = wrap_triton(int4_experts_small_m_kernel)
    inner = _launch_experts(kernel, x, gate_up, gate_up_scale, chosen, factors, activation)
    return _launch_experts(kernel, inner, down, down_scale, chosen, factors)


@int4_experts_small_m.register_kernel("cpu")
def experts_reference(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    chosen: Tensor,
    factors: Tensor,
    activation: str,
) -> Tensor:
    """``int4_experts_small_m`` in plain PyTorch: float32 on the dequantized weights, any floating dtype of ``x``."""
    check(x, gate_up, gate_up_scale, chosen)
    of, factors = chosen.flatten(), factors.flatten()
    x = x.repeat_interleave(of.shape[0] // x.shape[0], 0)

    def product(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        return torch.einsum("ck,cnk->cn", x.float(), dequantized(codes[of], scale[of]))

    inner = gated(product(x, gate_up, gate_up_scale).to(x.dtype), activation)
    return (product(inner, down, down_scale) * factors[:, None]).to(x.dtype)


def dequantized(codes: Tensor, scale: Tensor) -> Tensor:
    """int8 [experts, N, K / 2], bfloat16 [experts, K / 32, N] -> float32 [experts, N, K]"""
    q = torch.stack([codes & 0xF, (codes >> 4) & 0xF], dim=-1).flatten(2).float()
    return (q - ZERO) * scale.float().transpose(1, 2).repeat_interleave(GROUP, 2)
