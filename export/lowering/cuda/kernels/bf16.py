"""Linear layers of few rows over bfloat16 weights in Triton; each weight byte is read once for 16 rows.

The kernel computes ``y = x @ w.T`` on tensor cores, bf16 to float32, for a draft head and other unquantized weights. It
is limited by reading memory: a draft head of Gemma 4 31B is 1.48 GB, which takes 0.31 ms at 4.8 TB/s. A program has 64
KB of weights in flight (4 blocks of 64 outputs x 128 of K) in 80 KB of shared memory, loaded by 4 warps. Two programs
fit on an SM of sm_80, sm_90 and sm_100, one if a program may have 99 KB. The main loop takes 1.3 instructions per
weight, counted in the machine code; reading 2 bytes per weight leaves time for 12 on an H200.

Each warp takes a quarter of a block of K. The quarters are the batch dimension of a 3D ``tl.dot``, which uses the same
matrix instruction on every architecture and for every number of rows. The quarters are added in pairs; the sums of
programs that divide K are added as ``sums`` says. No order depends on the number of rows, so a row has the same bits in
every call. More than 16 rows use tiles of 32. Tiles that read the same weights start together, so L2 serves all but
one.

A program can ask L2 for its first blocks before it waits for the kernel in front, and for a piece of the next matmul's
weight before it adds sums (``l2.py``). It loads nothing before the wait, since x and weights are loaded together.
"""

from math import prod
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from eagle3.export.lowering.cuda.kernels.l2 import ask_l2, ask_l2_by_all, of_next
from eagle3.export.lowering.cuda.kernels.small_m import Blocks
from eagle3.export.lowering.cuda.kernels.sums import Division, gated, launch, place, run_of_blocks, store

ALIGNED = 8
"""K is a multiple of this, so that every row is aligned for copies of 16 bytes."""
STAGES = {16: 5, 32: 4}
"""One more than the number of blocks in flight in shared memory, by the rows of a tile."""
BLOCK_K = 128
WARPS = 4
BF16 = Blocks(n=64, stages=STAGES[16])
ASKS_NOTHING = {"NEXT": None, "FIRST": 0, "OF_NEXT": 0, "EARLY": False}
"""The arguments of a kernel that waits for nothing and asks L2 for nothing."""


@triton.jit
def _bf16_small_m_kernel(
    X, W, ARRIVED, PARTS, OUT, M, NEXT,
    N: tl.constexpr, K: tl.constexpr, WHOLE: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr, ACTIVATION: tl.constexpr, FIRST: tl.constexpr,
    OF_NEXT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # L2 is asked for FIRST blocks before the wait for x, and by each program for OF_NEXT bytes of the next matmul's
    # weight before it adds sums.
    QUARTER: tl.constexpr = BLOCK_K // 4
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    tile, part, _ = place(WHOLE, SPLITS)
    m0 = tl.program_id(0) * BLOCK_M
    n0 = tile * BLOCK_N
    first, last = run_of_blocks(tile, part, BLOCKS, WHOLE, SPLITS)
    quarter = tl.arange(0, 4)[:, None, None] * QUARTER
    n = tl.arange(0, BLOCK_N)
    m = m0 + tl.arange(0, BLOCK_M)
    # Offsets of 32 bits within the tile, from pointers of 64; outputs past the end read the last one.
    W += n0.to(tl.int64) * K
    X += m0.to(tl.int64) * K
    k_of_w = quarter + tl.arange(0, QUARTER)[None, None, :]
    k_of_x = quarter + tl.arange(0, QUARTER)[None, :, None]
    w_at = tl.minimum(n, N - 1 - n0)[None, :, None] * K + k_of_w
    x_at = tl.arange(0, BLOCK_M)[None, None, :] * K + k_of_x
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if FIRST > 0:  # two requests a row, as many as there are threads
        each = tl.arange(0, 2 * BLOCK_N)
        w_first = tl.minimum(each // 2, N - 1 - n0) * K + each % 2 * (FIRST * BLOCK_K // 2)
        ask_l2_by_all(W + first * BLOCK_K + w_first, FIRST * BLOCK_K)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    acc = tl.full((4, BLOCK_N, BLOCK_M), 0, tl.float32)
    for block in tl.range(first, last, num_stages=STAGES):
        k = block * BLOCK_K
        if K % BLOCK_K == 0:
            w = tl.load(W + k + w_at)
            x = tl.load(X + k + x_at, mask=m[None, None, :] < M, other=0)
        else:
            w = tl.load(W + k + w_at, mask=k + k_of_w < K, other=0)
            x = tl.load(X + k + x_at, mask=(m[None, None, :] < M) & (k + k_of_x < K), other=0)
        acc = tl.dot(w, x, acc)
    if OF_NEXT > 0:
        number = tl.program_id(1) * tl.num_programs(2) + tl.program_id(2)
        ask_l2(NEXT.to(tl.uint64) + number.to(tl.uint64) * OF_NEXT, OF_NEXT)
    # The quarters added in a fixed order, which tl.sum does not promise.
    a, b = tl.split(tl.reshape(tl.permute(acc, (1, 2, 0)), (BLOCK_N, BLOCK_M, 2, 2)))
    a, b = tl.split(a + b)
    store(OUT, PARTS, ARRIVED, a + b, M, m, n0 + n, n0 + n < N, N, WHOLE, SPLITS, ACTIVATION)


def _launch_bf16(
    kernel: Any, x: Tensor, weight: Tensor, arrived: Tensor, activation: str = "", choice: Blocks = BF16,
    following: Tensor | None = None, early: bool = False,
) -> Tensor:  # fmt: skip
    _check(x, weight)
    if not weight.is_contiguous():
        raise ValueError(f"the weight of {tuple(weight.shape)} has strides {weight.stride()}: not contiguous")
    n, k = weight.shape
    tiles = triton.cdiv(n, choice.n)
    divided = choice.division(n, triton.cdiv(k, BLOCK_K))
    asked = ASKS_NOTHING | {"OF_NEXT": of_next(following, prod(divided.programs(tiles))), "EARLY": early}
    x, more = x.contiguous(), ()
    if following is not None:
        more = (following,)
        del asked["NEXT"]

    def run(programs: tuple, rows: int, out: Tensor, parts: Tensor) -> None:
        if early:
            asked["FIRST"] = _first_blocks(k, divided, STAGES[rows])
        kernel[programs](
            x, weight, arrived, parts, out, x.shape[0], *more, N=n, K=k, WHOLE=divided.whole, SPLITS=divided.parts,
            BLOCK_N=choice.n, BLOCK_K=BLOCK_K, BLOCK_M=rows, STAGES=STAGES[rows], ACTIVATION=activation,
            num_warps=WARPS, **asked,
        )  # fmt: skip

    return launch(x, n, choice.n, tiles, divided, tuple(STAGES), arrived, run, activation)


def _first_blocks(k: int, divided: Division, stages: int) -> int:
    """Return the number of blocks at the beginning of its run for which a program asks L2: as many as it has in flight,
    and no more whole blocks than the shortest run has."""
    shortest = triton.cdiv(k, BLOCK_K) // divided.parts
    return min(stages - 1, shortest - (k % BLOCK_K > 0))


@triton_op("eagle3::bf16_small_m", mutates_args={})
def bf16_small_m(
    x: Tensor, weight: Tensor, arrived: Tensor, activation: str = "", following: Tensor | None = None,
    early: bool = False,
) -> Tensor:  # fmt: skip
    """Compute ``x @ weight.T``, ``gated`` by an activation (see ``sums``). On CUDA this is the kernel of this module,
    on the host ``bf16_reference``. ``following`` and ``early`` change no result.

    Args:
        x: bfloat16 [M, K], K a multiple of ``ALIGNED``; M may be dynamic
        weight: bfloat16 [N, K]
        arrived: ``sums.counters()``, zero again when it returns
        activation: applied to the gate, the first half of the outputs; "": the outputs are not gated
        following: the weight of the next matmul, records or bfloat16 [N, K], which L2 is asked for; it must be
            constant, since nothing waits
        early: the kernel may start before the one in front has ended, and asks L2 for its first weights before it
            waits for that; ``weight`` must be constant then

    Returns:
        bfloat16 [M, N], gated [M, N / 2]; a row's bits do not depend on the other rows or their number

    Raises:
        ValueError: shapes that do not agree; on CUDA, another dtype of ``x``, a weight that is not contiguous, a next
            weight that ``of_next`` refuses, more rows than there are counters for, or halves of other than whole tiles
    """
    kernel = wrap_triton(_bf16_small_m_kernel)
    return _launch_bf16(kernel, x, weight, arrived, activation, following=following, early=early)


@bf16_small_m.register_kernel("cpu")
def bf16_reference(
    x: Tensor, weight: Tensor, arrived: Tensor | None = None, activation: str = "", following: Tensor | None = None,
    early: bool = False,
) -> Tensor:  # fmt: skip
    """``bf16_small_m`` in plain PyTorch: float32 sums, any floating dtype of ``x``."""
    _check(x, weight)
    return gated((x.float() @ weight.float().T).to(x.dtype), activation)


def _check(x: Tensor, weight: Tensor) -> None:
    n, k = weight.shape
    if x.shape[1] != k or k % ALIGNED:
        raise ValueError(f"x has K = {x.shape[1]}, the weight {k}: they must agree and be a multiple of {ALIGNED}")
