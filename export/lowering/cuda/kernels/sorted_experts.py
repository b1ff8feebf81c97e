"""The experts of many rows: the rows are sorted by expert and multiplied by the kernel of ExecuTorch's
``fused_moe_batched_gemm``.

That operator computes SiLU in a second kernel, and adds the outputs of a row's experts with one program for each
number. Here any activation may stand between two launches of its first kernel, and the addition is left to Inductor.
The weights are those of ``int4_experts.py``.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from executorch.backends.cuda.triton.kernels.fused_moe import (
    _BATCHED_BLOCK_M,
    _fused_moe_batched_kernel,
    moe_align_block_size,
)
from torch import Tensor
from torch.library import triton_op, wrap_triton

from eagle3.export.lowering.cuda.kernels.int4_experts import GROUP, dequantized


@triton_op("eagle3::sorted_experts_matmul", mutates_args={})
def sorted_experts_matmul(x: Tensor, codes: Tensor, scale: Tensor, order: Tensor, owners: Tensor, each: int) -> Tensor:
    """Return bfloat16 [64 * blocks, N]. Place i holds row ``order[i] // each`` of ``x`` (bfloat16 [rows, K]; ``order``
    int64, 64 for each block or more) times the weight of its block's expert (``owners``, int64 [blocks]), whose parts
    are as in ``int4_experts.py``."""
    outputs, blocks = codes.shape[1], owners.shape[0]
    out = x.new_empty(blocks * _BATCHED_BLOCK_M, outputs)
    of = {"am": (x, 0), "ak": (x, 1), "be": (codes, 0), "bk": (codes, 2), "bn": (codes, 1)}
    of |= {"cm": (out, 0), "cn": (out, 1), "bse": (scale, 0), "bsk": (scale, 1), "bsn": (scale, 2)}

    def grid(meta: dict[str, Any]) -> tuple[int]:
        return (blocks * triton.cdiv(outputs, meta["BLOCK_SIZE_N"]),)

    wrap_triton(_fused_moe_batched_kernel)[grid](
        *(x, codes, out, scale, order, owners),
        **{f"stride_{name}": tensor.stride(dim) for name, (tensor, dim) in of.items()},
        **{"N": outputs, "K": x.shape[1], "top_k": each, "group_size": GROUP, "compute_type": tl.bfloat16},
        BLOCK_SIZE_M=_BATCHED_BLOCK_M,
    )
    return out


@sorted_experts_matmul.register_kernel("cpu")
def matmul_reference(x: Tensor, codes: Tensor, scale: Tensor, order: Tensor, owners: Tensor, each: int) -> Tensor:
    """``sorted_experts_matmul`` in plain PyTorch, any floating dtype of ``x``."""
    blocks = (order[: owners.shape[0] * _BATCHED_BLOCK_M] // each).view(owners.shape[0], -1)
    products = [
        x[rows].float() @ dequantized(codes[expert][None], scale[expert][None])[0].to(x.dtype).float().t()
        for rows, expert in zip(blocks, owners, strict=True)
    ]
    return torch.cat(products).to(x.dtype)


def most_rows_of(experts: int, top_k: int, outputs: int) -> int:
    """Return the most rows for which all offsets in the output stay below 2**31, where each expert's choices fill whole
    blocks."""
    blocks = 2**31 // (_BATCHED_BLOCK_M * outputs)
    return ((blocks + 1 - experts) * _BATCHED_BLOCK_M - 1) // top_k


def sorted_experts(
    x: Tensor,
    gate_up: tuple[Tensor, Tensor],
    down: tuple[Tensor, Tensor],
    chosen: Tensor,
    factors: Tensor,
    gate: Callable[[Tensor], Tensor],
    most: int,
) -> Tensor:
    """Return for each choice its expert's output times its factor, as ``int4_experts_small_m`` does.

    ``gate`` is the gated activation, [..., 2 * width] -> [..., width]; ``most`` is the upper bound of ``x``'s rows.
    Raises ValueError if the kernel's offsets are too small for so many rows.
    """
    takes = most_rows_of(gate_up[0].shape[0], chosen.shape[1], max(gate_up[0].shape[1], down[0].shape[1]))
    if most > takes:
        raise ValueError(
            f"{most} rows that choose {chosen.shape[1]} experts each, but ExecuTorch's kernel, whose offsets have 32 "
            f"bits, takes {takes} of them: type --max-prefill {takes} or less"
        )
    count, choices = gate_up[0].shape[0], chosen.numel()
    # Each expert's choices are padded to whole blocks with an index past the last choice, which refers to a row of
    # zeros.
    order, owners, _ = moe_align_block_size(chosen, _BATCHED_BLOCK_M, count)
    filled = torch.cat([x, torch.zeros_like(x[:1])])
    inner = gate(sorted_experts_matmul(filled, *gate_up, order, owners, choices // x.shape[0]))
    out = sorted_experts_matmul(inner, *down, torch.arange(inner.shape[0], device=x.device), owners, 1)
    places = torch.arange(order.shape[0], device=x.device)
    to = torch.where(order < choices, order, choices + places)  # places without a choice get targets of their own
    place = torch.zeros(choices + order.shape[0], dtype=torch.int64, device=x.device)
    # index_put, since scatter calls a function that some runtimes lack
    place = place.index_put((to,), places)[:choices]
    return (out[place] * factors.reshape(-1, 1)).to(x.dtype)
