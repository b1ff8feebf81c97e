"""The experts of a few rows over INT4 weights in Triton; the weights of each chosen expert are read once for 16 rows.

ExecuTorch's ``fused_moe`` reads the weights once for each row, loads each byte twice, and takes 10 to 12 instructions
per weight. A program of this kernel takes 128 outputs of one expert (``choices.py``) with the instructions of
``int4/tiles/kernel.py``.

Weights are symmetric: w = (q - 8) * s, with a scale for each 32 weights along K. Their codes are those of
``fused_moe``, which reads them for many rows (``sorted_experts.py``). A program computes the same 64 outputs of gate
and of up, so that it can apply the activation itself. K is not divided: for Gemma 4 26B-A4B, the 8 experts of a row
have 88 programs in one launch and 176 in the other, and four rows have four times as many.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from eagle3.export.lowering.cuda.kernels.choices import choices_of, launch
from eagle3.export.lowering.cuda.kernels.int4.tiles.kernel import BLOCK, TILE, add_half
from eagle3.export.lowering.cuda.kernels.small_m import (
    WARPS,
    check_contiguous,
    on_all_rows,
    ones_operand,
    sum_of_groups,
)
from eagle3.export.lowering.cuda.kernels.sums import gate_of, gated

GROUP = 32
"""The number of weights along K that share a scale."""
ZERO = 8
"""The code that stands for a weight of 0."""
STAGES = 4
"""One more than the number of blocks in flight in shared memory."""


@triton.jit
def _terms(scales):
    # bf16 [8, 64] in the order of N -> -(128 + 8) and s as float32 in the halves of 64 bits [8, 64, 1]
    both = (scales.to(tl.uint16, bitcast=True).to(tl.uint64) << 16) | tl.full((8, 64), 0xC308000000000000, tl.uint64)
    return tl.reshape(tl.permute(tl.reshape(both, (8, 8, 8)), (0, 2, 1)), (8, 64, 1))


@triton.jit
def int4_experts_small_m_kernel(
    X, Q, SCALE, CHOSEN, FACTORS, OUT, M, CHOICES,
    EXPERTS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, EACH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    tile, choice = tl.program_id(1), tl.program_id(2)
    m, t = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_T)[None, :]
    at, here = m * TOP_K + t, (m < M) & (t < TOP_K)
    expert = tl.load(CHOSEN + choice)
    tl.device_assert((expert >= 0) & (expert < EXPERTS), "there is no such expert")
    first, mine = choices_of(expert, tl.load(CHOSEN + at, mask=here, other=-1), at, here, CHOICES)
    if first < choice:
        return  # that choice's program computes the expert

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
    """Return the experts' gated outputs with an ``activation``, otherwise their outputs times ``factors``."""
    check(x, codes, scale, chosen, factors)
    check_contiguous(codes, scale)
    x, chosen, factors = x.contiguous(), chosen.contiguous(), factors.contiguous()
    (m, top_k), (experts, n, half_k) = chosen.shape, codes.shape

    def run(count: Any, constants: dict[str, Any], out: Tensor) -> None:
        kernel[(count, triton.cdiv(n, TILE), m * top_k)](
            x, codes, scale, chosen, factors, out, m, m * top_k, EXPERTS=experts, N=n, K=2 * half_k, BLOCK_N=TILE,
            BLOCK_K=BLOCK, STAGES=STAGES, ACTIVATION=activation, num_warps=WARPS, **constants,
        )  # fmt: skip

    return launch(x, chosen, n // 2 if activation else n, run)


def check(x: Tensor, codes: Tensor, scale: Tensor, chosen: Tensor, factors: Tensor) -> None:
    """Raise ValueError for shapes that do not agree."""
    experts, n, half_k = codes.shape
    if factors.shape != chosen.shape:
        raise ValueError(f"factors are {tuple(factors.shape)}, choices {tuple(chosen.shape)}: they must agree")
    if x.shape[1] != 2 * half_k:
        raise ValueError(f"x has K = {x.shape[1]}, codes {2 * half_k}: they must agree")
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
    check(x, gate_up, gate_up_scale, chosen, factors)
    of, factors = chosen.flatten(), factors.flatten()
    x = x.repeat_interleave(of.shape[0] // x.shape[0], 0)

    def product(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        return torch.einsum("ck,cnk->cn", x.float(), dequantized(codes[of], scale[of]))

    inner = gated(product(x, gate_up, gate_up_scale).to(x.dtype), activation)
    return (product(inner, down, down_scale) * factors[:, None]).to(x.dtype)


def dequantized(codes: Tensor, scale: Tensor) -> Tensor:
    """Map int8 [experts, N, K / 2] and bfloat16 [experts, K / 32, N] to float32 [experts, N, K]."""
    q = torch.stack([codes & 0xF, (codes >> 4) & 0xF], dim=-1).flatten(2).float()
    return (q - ZERO) * scale.float().transpose(1, 2).repeat_interleave(GROUP, 2)
