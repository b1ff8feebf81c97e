"""Requests to L2 for weights, by which memory works while a matmul's programs wait or end.

Only weights that no kernel writes are asked for. A request changes no result. A kernel that makes one needs sm_90 or
later.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3.export.lowering.cuda.kernels.int4.records.layout import RECORD
from eagle3.export.lowering.cuda.kernels.small_m import check_contiguous

NEXT_BYTES = 20 << 20
"""The most bytes of the next weight that the programs of a launch ask L2 for."""
AT_ONCE = 16
"""Requests to L2 have a multiple of this number of bytes."""


@triton.jit
def ask_l2(address, BYTES: tl.constexpr):
    # Asks L2 for BYTES (a multiple of 16) from an address on, by one thread
    tl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; "
        "@p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,n", [address.to(tl.uint64), BYTES], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def ask_l2_by_all(addresses, BYTES: tl.constexpr):
    # Asks L2 for BYTES (a multiple of 16) from each address on: [threads], one for each thread of the program
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r", [addresses.to(tl.uint64), BYTES], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


def of_next(following: Tensor | None, programs: int) -> int:
    """Return the bytes of the next matmul's weight that each of ``programs`` programs asks L2 for; 0 for None. Together
    they ask for no more than the weight has, and ``NEXT_BYTES``.

    Raises ValueError for a weight that is neither records (uint8 [N / 32, K / 256, 4736]) nor bfloat16 [N, K], or that
    is not contiguous.
    """
    if following is None:
        return 0
    check_contiguous(following)
    is_records = following.dtype == torch.uint8 and following.shape[-1] == RECORD
    if not is_records and (following.dtype != torch.bfloat16 or following.ndim != 2):
        what = f"{following.dtype} {tuple(following.shape)}"
        raise ValueError(f"the next weight is {what}: it must be records or a matrix in bfloat16")
    return min(NEXT_BYTES, following.numel() * following.itemsize) // programs // AT_ONCE * AT_ONCE
