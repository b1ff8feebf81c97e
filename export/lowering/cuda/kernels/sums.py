"""What small-M products have in common: which programs a call starts, who adds what they made of K, and the gate of an
MLP, whose two halves are one product.

A call starts a kernel for each size of row tiles that its number of rows may need; where that number is known when it
runs alone, the others have a grid of 0 programs, which nobody launches.

Each program writes its float32 sums, then takes a number from its tile's counter. Whoever takes the last one adds all
sums in the order of K, whatever the order of arrival, and sets the counter back to 0 for the next call. Taking a number
releases what the program wrote and acquires what the others did (PTX ISA, memory consistency model: by the barrier
before it that holds for all threads of the program); what is then read comes from L2, where the others' sums are.

Of a gated product, ``act(gate) * up`` of its first and second half of outputs, a tile of the one and its like of the
other share a counter: whoever comes last of both has all sums of both. Products, activation and result are rounded to
bfloat16 one after the other, as by PyTorch and by Inductor's kernel for it, whose instructions they are made with.
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
"""Tiles of a product that is divided along K, at most."""
SILU, GELU_TANH = "silu", "gelu_tanh"
"""The activations of a gate."""


def counters(device: torch.device | str = "cpu") -> Tensor:
    """int32 [COUNTERS], zeros: what a call takes and gives back as it was. Calls that share them are on one stream."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def splits(n: int, blocks: int, block_n: int) -> int:
    """Programs among which ``blocks`` blocks of K are divided: of the weight's shape alone, for sums of one order.

    The least time when two programs run on an SM and starting one costs three blocks, summed over GPUs of 108 (A100),
    132 (H100, H200) and 148 SMs (B200), whichever it runs on.
    """
    tiles = triton.cdiv(n, block_n)

    def cost(count: int) -> int:
        steps = triton.cdiv(blocks, count) + 3
        return sum(slots * triton.cdiv(tiles * count, slots) * steps for slots in (216, 264, 296))

    return min(range(1, min(blocks, 8) + 1), key=cost)


def row_tiles(m: Any, sizes: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """``(size, tiles)`` of those sizes of row tiles that ``m`` rows, 1 or more, may take.

    The least that holds all rows in one tile takes them, more go in tiles of the last; all others have 0 tiles. Where
    ``m`` is symbolic the numbers are, and sizes that no ``m`` in its range takes are left out.
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
    """bfloat16 [M, N], with an ``activation`` [M, N / 2]: what ``run(grid, rows of a tile, out, parts)`` writes, called
    once for each size that is needed.

    The grid is tiles of rows, ``tiles`` of ``tile`` outputs and ``count`` programs along K; ``parts`` is float32
    [count, M, N], or ``arrived`` where one program has all that it needs. Raises ValueError for another dtype of ``x``,
    for more tiles than there are counters, and for halves of other than whole tiles.
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
    """How many programs were here before; what they wrote can be read, past L1, by whoever comes last."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")


@triton.jit
def _sums(PARTS, at, here, part, SPLITS: tl.constexpr):
    total = tl.load(PARTS + at, mask=here, other=0, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        total += tl.load(PARTS + split * part + at, mask=here, other=0, cache_modifier=".cg")
    return total


@triton.jit
def _gated(gate, up, ACTIVATION: tl.constexpr):
    # float32, both -> float32, to be rounded; add_rn, so that nothing is fused here that Inductor does not fuse
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
                total = _gated(total, _sums(PARTS, at + N // 2, here, part, SPLITS), ACTIVATION)
            tl.store(OUT + row * (N // HALVES) + n[:, None], total.to(OUT.dtype.element_ty), mask=here)
            tl.store(counter, 0)


def gated(product: Tensor, activation: str) -> Tensor:
    """[M, N] -> [M, N / 2]: ``act(gate) * up`` of the two halves; without an ``activation`` [M, N] as it is. What the
    kernels do, in plain PyTorch, bit for bit but for CUDA's own exp and tanh."""
    if not activation:
        return product
    gate, up = product.chunk(2, -1)
    if activation == SILU:
        return F.silu(gate) * up
    x = gate.float()  # F.gelu has a tanh of its own on a CPU
    return (0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * (x * x * x))))).to(gate.dtype) * up
