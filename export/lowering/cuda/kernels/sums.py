"""The common parts of the small-M kernels: the programs that a call starts, the addition of partial sums along K, and
the gate of an MLP, whose two halves are one matmul.

A call starts a kernel for each size of row tiles that its number of rows may need. If that number is known only at run
time, the kernels of the other sizes have a grid of 0 programs and are not launched.

Each program writes its float32 partial sums, then increments its tile's counter. The last one to arrive adds all sums
in the order of K, whatever the order of arrival, and sets the counter back to 0 for the next call. The increment
releases the program's writes and acquires those of the others (PTX ISA, memory consistency model; a barrier before it
covers all threads of the program). The following loads bypass L1, because the others' sums are in L2.

A gated matmul computes ``act(gate) * up`` from the first and second half of its outputs. Corresponding tiles of the two
halves share a counter, so the last program of both has all sums of both. Matmul, activation and result are each rounded
to bfloat16, as PyTorch and Inductor's kernel do, with the same instructions as the latter.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F
from triton.language.extra import libdevice

COUNTERS = 1 << 16
"""The most tiles of a matmul that is divided along K."""
SILU, GELU_TANH = "silu", "gelu_tanh"
"""The activations of a gate."""


def counters(device: torch.device | str = "cpu") -> Tensor:
    """Return int32 [COUNTERS] zeros. A call leaves them zero. Calls that share them must be on one stream."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def splits(n: int, blocks: int, block_n: int) -> int:
    """Return the number of programs that divide ``blocks`` blocks of K. It depends on the weight's shape alone, so that
    the order of the sum is fixed.

    It minimizes the time, summed over GPUs with 108 (A100), 132 (H100, H200) and 148 SMs (B200), if two programs run on
    an SM and starting one costs as much as three blocks.
    """
    tiles = triton.cdiv(n, block_n)

    def cost(count: int) -> int:
        steps = triton.cdiv(blocks, count) + 3
        return sum(slots * triton.cdiv(tiles * count, slots) * steps for slots in (216, 264, 296))

    return min(range(1, min(blocks, 8) + 1), key=cost)


def row_tiles(m: Any, sizes: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """Yield ``(size, tiles)`` for the sizes of row tiles that ``m`` rows (1 or more) may use.

    The smallest size that holds all rows in one tile is used, or tiles of the last size; all other sizes have 0 tiles.
    If ``m`` is symbolic, so are the numbers, and sizes that no ``m`` in its range uses are left out.
    """
    left = 1
    for size in sizes:
        tiles = (m + size - 1) // size
        fits = 1 // tiles
        count = left * (tiles if size == sizes[-1] else fits)
        if not statically_known_true(count == 0):
            yield size, count
        left = left * (1 - fits)


def launch(
    x: Tensor,
    n: int,
    tile: int,
    tiles: int,
    count: int,
    sizes: Sequence[int],
    arrived: Tensor,
    run: Callable[[tuple, int, Tensor, Tensor], None],
    activation: str = "",
) -> Tensor:
    """Return bfloat16 [M, N], or [M, N / 2] with an ``activation``. ``run(grid, rows of a tile, out, parts)`` writes it
    and is called once for each size of row tiles that is needed.

    The grid is tiles of rows, ``tiles`` of ``tile`` outputs, and ``count`` programs along K. ``parts`` is float32
    [count, M, N], or ``arrived`` if K is not divided. Raises ValueError for another dtype of ``x``, for more tiles than
    there are counters, and for halves that are not whole tiles.
    """
    if x.dtype != torch.bfloat16:
        raise ValueError(f"x is {x.dtype}: the kernel takes torch.bfloat16")
    m = x.shape[0]
    if activation and (tiles % 2 or n != tiles * tile):
        raise ValueError(f"{n} outputs: those of a gate and as many must be multiples of {tile}")
    out = torch.empty(m, n // 2 if activation else n, dtype=x.dtype, device=x.device)
    if statically_known_true(m == 0):
        return out
    shared = count > 1 or activation
    if shared and not statically_known_true(tiles * ((m + sizes[-1] - 1) // sizes[-1]) <= COUNTERS):
        most = COUNTERS // tiles * sizes[-1]
        raise ValueError(f"{m} rows of {n} outputs: the kernel takes {most} rows of them, or split them")
    parts = torch.empty(count, m, n, dtype=torch.float32, device=x.device) if shared else arrived
    for rows, row_count in row_tiles(m, sizes):
        run((row_count, tiles, count), rows, out, parts)
    return out


@triton.jit
def arrive(counter):
    """Return how many programs arrived before. The last one can read what they wrote, by loads that bypass L1."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")


@triton.jit
def _sums(PARTS, at, here, part, SPLITS: tl.constexpr):
    total = tl.load(PARTS + at, mask=here, other=0, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        total += tl.load(PARTS + split * part + at, mask=here, other=0, cache_modifier=".cg")
    return total


@triton.jit
def gate_of(gate, up, ACTIVATION: tl.constexpr):
    # float32, both -> float32, to be rounded; add_rn, so that nothing is fused here that Inductor does not fuse
    tl.static_assert(ACTIVATION == "silu" or ACTIVATION == "gelu_tanh", "there is no such activation")
    gate = gate.to(tl.bfloat16).to(tl.float32)
    if ACTIVATION == "silu":
        gate = gate / libdevice.add_rn(libdevice.exp(-gate), tl.full(gate.shape, 1, tl.float32))
    else:
        inner = 0.7978845608028654 * libdevice.add_rn(gate, 0.044715 * (gate * gate * gate))
        gate = 0.5 * gate * (1 + libdevice.tanh(inner))
    return gate.to(tl.bfloat16).to(tl.float32) * up.to(tl.bfloat16).to(tl.float32)


@triton.jit
def store(
    OUT, PARTS, ARRIVED, total, M, m, n, there, N: tl.constexpr, SPLITS: tl.constexpr, ACTIVATION: tl.constexpr = ""
):  # fmt: skip
    # total: float32 [outputs, rows], of the outputs n and the rows m of this program's tile, as far as they are there
    here = (m[None, :] < M) & there[:, None]
    HALVES: tl.constexpr = 1 if ACTIVATION == "" else 2
    row = m.to(tl.int64)[None, :]
    at = row * N + n[:, None]
    if HALVES * SPLITS == 1:
        tl.store(OUT + at, total.to(OUT.dtype.element_ty), mask=here)
    else:
        part = tl.full((), N, tl.int64) * M
        tl.store(PARTS + tl.program_id(2) * part + at, total, mask=here)
        tile, tiles = tl.program_id(1), tl.num_programs(1)
        if HALVES == 2:
            tiles //= 2
            n -= tile // tiles * (N // 2)
            at = row * N + n[:, None]
            tile %= tiles
        counter = ARRIVED + tl.program_id(0) * tiles + tile
        if arrive(counter) == HALVES * SPLITS - 1:
            total = _sums(PARTS, at, here, part, SPLITS)
            if HALVES == 2:
                total = gate_of(total, _sums(PARTS, at + N // 2, here, part, SPLITS), ACTIVATION)
            tl.store(OUT + row * (N // HALVES) + n[:, None], total.to(OUT.dtype.element_ty), mask=here)
            tl.store(counter, 0)


def gated(product: Tensor, activation: str) -> Tensor:
    """Compute ``act(gate) * up`` of the two halves: [M, N] -> [M, N / 2]. Without an ``activation``, return the product
    unchanged. This is the kernels' computation in plain PyTorch, bit for bit except for CUDA's own exp and tanh."""
    if not activation:
        return product
    gate, up = product.chunk(2, -1)
    if activation == SILU:
        return F.silu(gate) * up
    x = gate.float()  # F.gelu has a tanh of its own on a CPU
    return (0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * (x * x * x))))).to(gate.dtype) * up
