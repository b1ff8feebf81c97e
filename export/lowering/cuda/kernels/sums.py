"""The common parts of the small-M kernels: the programs of a call, the addition of partial sums along K, and the gate
of an MLP, whose two halves are one matmul.

The programs of a call are tiles of rows (axis 0) and tiles of outputs, which may be divided along K (axes 1 and 2). As
many tiles as fill the GPU a whole number of times may have one program each. The remaining tiles then have several
programs each, so that the last programs end at the same time (see ``division``).

A call starts a kernel for each size of row tiles that its number of rows may need. If that number is known only at run
time, the kernels of the sizes that are not needed have a grid of 0 programs and are not launched.

Each program writes its float32 partial sums, then increments its tile's counter. The last one to arrive adds all sums
in the order of K, whatever the order of arrival, and sets the counter back to 0 for the next call. The increment
releases the program's writes and acquires those of the others (PTX ISA, memory consistency model; a barrier before it
covers all threads of the program). The following loads bypass L1, because the others' sums are in L2.

A gated matmul computes ``act(gate) * up`` from the first and second half of its outputs. Corresponding tiles of the two
halves share a counter, so the last program of both has all sums of both. The results of the matmul, of the activation
and of the product are each rounded to bfloat16, as PyTorch and Inductor's kernel do, with the same instructions as the
latter.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F
from triton.language.extra import libdevice

from eagle3.export.lowering.cuda.kernels.local_gpu import local_arch, local_multiprocessors
from eagle3.runner.system.gpus import BY_ARCH, archs_of

COUNTERS = 1 << 16
"""The most tiles of a matmul that is divided along K."""
SILU, GELU_TANH = "silu", "gelu_tanh"
"""The activations of a gate."""


def counters(device: torch.device | str = "cpu") -> Tensor:
    """Return counters, int32 [COUNTERS], that are zero before and after each call. Calls that share counters must be on
    one stream."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


class Division(NamedTuple):
    """The programs of a matmul's tiles: one for each of the first ``whole`` tiles, ``parts`` along K for every other
    tile."""

    whole: int
    parts: int

    def programs(self, tiles: int) -> tuple[int, int]:
        """Return the two grid axes after that of the tiles of rows. With whole tiles, all programs are on the first of
        them."""
        return (self.whole + (tiles - self.whole) * self.parts, 1) if self.whole else (tiles, self.parts)


class MadeFor(NamedTuple):
    """The GPUs that matmuls are divided for: their numbers of multiprocessors, by architecture. ``whole_tiles`` names
    those that may have whole tiles next to divided ones. ``wgmma``: one of the GPUs has these instructions."""

    counts: dict[str, int]
    whole_tiles: tuple[str, ...]
    wgmma: bool


_MADE_FOR = [MadeFor({"": 132}, ("",), True)]  # an H100 or an H200, until ``made_for`` adds another GPU
MOST_PARTS, STARTING, TOGETHER = 8, 2, 2
"""``MOST_PARTS`` is the largest number of programs of a tile. ``STARTING`` blocks of K cost as much as a wave of
programs. ``TOGETHER`` programs run on a multiprocessor at a time. On an H200 an INT4 matmul
takes 1.5 us for each block of a wave and 5.8 us in addition. About 3 us of these belong to each wave (its first loads,
its sums over groups, its skew); the rest occurs once a launch, however K is divided."""
GAIN = 1.03
"""The smallest gain for which K is divided, since partial sums must be written and read."""

WHOLE_TILES_ON = ("sm_90",)
"""The architectures on which whole tiles next to divided tiles were timed (on an H200). On sm_80 and sm_100 such a
program takes more than 128 registers a thread, so that one fits on a multiprocessor instead of two."""
WGMMA_ON = ("sm_90",)
"""The architectures whose warp groups multiply with ``wgmma``."""


@contextmanager
def _divided_for(gpus: MadeFor) -> Iterator[None]:
    _MADE_FOR.append(gpus)
    try:
        yield
    finally:
        _MADE_FOR.pop()


def made_for(count: int, whole_tiles: bool, wgmma: bool = False) -> AbstractContextManager[None]:
    """Divide matmuls for a GPU with this number of multiprocessors; see ``MadeFor``."""
    return _divided_for(MadeFor({"": count}, ("",) if whole_tiles else (), wgmma))


def made_for_named(arch: str) -> AbstractContextManager[None]:
    """Divide matmuls for the GPUs that code for ``arch`` is compiled for, which may be a list."""
    archs = archs_of(arch)
    counts = {arch: BY_ARCH[arch].multiprocessors for arch in archs}
    return _divided_for(MadeFor(counts, WHOLE_TILES_ON, any(arch in WGMMA_ON for arch in archs)))


def made_for_here() -> AbstractContextManager[None]:
    """Divide matmuls for the GPU of this machine."""
    return made_for(local_multiprocessors(), local_arch() in WHOLE_TILES_ON, local_arch() in WGMMA_ON)


def multiprocessors() -> int:
    """Return the most multiprocessors of a GPU that matmuls are divided for."""
    return max(_MADE_FOR[-1].counts.values())


def even_programs(together: int, matmul: str) -> int:
    """Return the number of programs among which a matmul is shared evenly, ``together`` on each multiprocessor. Of
    several GPUs it fills the one with which all together lose the least. ``matmul`` names it in notes."""
    at_a_time = {arch: together * count for arch, count in _MADE_FOR[-1].counts.items()}

    def times(programs: int) -> dict[str, float]:
        return {arch: triton.cdiv(programs, most) * most / programs for arch, most in at_a_time.items()}

    found = min(sorted(set(at_a_time.values()), reverse=True), key=lambda programs: sum(times(programs).values()))
    note_given_up(f"even shares of {matmul}", times(found))
    return found


def has_wgmma() -> bool:
    """Return True if one of the GPUs that matmuls are divided for has ``wgmma``."""
    return _MADE_FOR[-1].wgmma


def division(n: int, blocks: int, block_n: int, whole: bool = True) -> Division:
    """Return how ``blocks`` blocks of K are divided. The division depends only on the weight's shape and the GPU, so
    that the order of the sum is fixed. Unless ``whole``, there are no whole tiles on any GPU.

    It minimizes the time if ``TOGETHER`` programs run on a multiprocessor, all programs that fit start together, and a
    wave of them costs as much as ``STARTING`` blocks. K is divided only if that gains more than ``GAIN``. Of several
    GPUs each has a division of its own (``own_division``); the result has the most parts of any, for which there is
    memory, and no whole tiles.
    """
    counts, whole_on, _ = _MADE_FOR[-1]
    own = {
        arch: best_division(triton.cdiv(n, block_n), blocks, TOGETHER * count, whole and arch in whole_on)
        for arch, count in counts.items()
    }
    if len(own) == 1:
        return next(iter(own.values()))
    most = max(found.parts for found in own.values())
    _OWN[OwnDivisions(n, blocks, block_n, whole, most)] = own
    return Division(0, most)


def best_division(tiles: int, blocks: int, at_a_time: int, whole_tiles: bool) -> Division:
    """Return the division that costs the least if ``at_a_time`` programs run at a time."""

    def cost(division: Division) -> float:
        rest = triton.cdiv((tiles - division.whole) * division.parts, at_a_time)
        rounds = division.whole // at_a_time
        blocks_long = rounds * (blocks + STARTING) + rest * (triton.cdiv(blocks, division.parts) + STARTING)
        return blocks_long * (GAIN if division.parts > 1 else 1)

    wholes = dict.fromkeys((0, tiles // at_a_time * at_a_time if whole_tiles else 0))
    counts = range(1, min(blocks, MOST_PARTS) + 1)
    return min((Division(whole, parts) for whole in wholes for parts in counts), key=cost)


class OwnDivisions(NamedTuple):
    """A matmul that each of several GPUs divides in its own way: its outputs, its blocks of K, the outputs of a tile,
    whether a tile may be whole, and the most parts of a tile."""

    n: int
    blocks: int
    block_n: int
    whole: bool
    most: int


_OWN: dict[OwnDivisions, dict[str, Division]] = {}
"""The divisions of a matmul by GPU."""


def own_division(arch: str, constants: Mapping[str, Any]) -> Division | None:
    """Return how one of several GPUs divides a matmul, by the constants of its kernel: programs as ``Division`` says,
    in the kernel's tiles. None if it is as the constants say."""
    if not constants.get("SPLITS") or constants.get("WHOLE") != 0 or "BLOCK_K" not in constants:
        return None
    widths = [constants["N"]] if constants.get("N") else [constants.get(name, 0) for name in ("N0", "N1", "N2")]
    blocks = triton.cdiv(constants["K"], constants["BLOCK_K"])
    may_be_whole = len(widths) == 1 or takes_whole_tiles(*widths)
    for matmul, own in _OWN.items():
        same = matmul[1:] == (blocks, matmul.block_n, may_be_whole, constants["SPLITS"])
        if same and sum(widths) <= matmul.n < sum(widths) + 128 and arch in own:
            whole, parts = own[arch]
            return Division(whole * (matmul.block_n // constants["BLOCK_N"]), parts)
    return None


def takes_whole_tiles(n0: int, n1: int, n2: int) -> bool:
    """Return True if a program of a whole tile of up to three INT4 weights of these outputs fits in 128 registers a
    thread."""
    return not n2 and n0 % 128 == n1 % 128 == 0


GIVEN_UP: dict[str, dict[str, float]] = {}
"""The decisions for a list of GPUs together, while one method was compiled: by decision and architecture, the share of
time that it costs by the estimate, 0.03 for 3%, against the decision for that GPU alone."""


def note_given_up(decision: str, times: dict[str, float]) -> None:
    """Note a decision in ``GIVEN_UP``. ``times``: its estimated time on each GPU, in multiples of the shortest."""
    if lost := {arch: round(time - 1, 4) for arch, time in times.items() if len(times) > 1 and time > 1}:
        GIVEN_UP[decision] = lost


def row_tiles(m: Any, sizes: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """Yield ``(size, tiles)`` for the sizes of row tiles that ``m`` rows (1 or more) may use.

    If one tile of some size holds all rows, the smallest such size is used, otherwise tiles of the last size; all other
    sizes have 0 tiles. If ``m`` is symbolic, so are the numbers, and sizes that no ``m`` in its range uses are left
    out.
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
    division: Division,
    sizes: Sequence[int],
    arrived: Tensor,
    run: Callable[[tuple, int, Tensor, Tensor], None],
    activation: str = "",
    programs: int = 1,
) -> Tensor:
    """Return bfloat16 [M, N], or [M, N / 2] with an ``activation``. ``run(grid, rows of a tile, out, parts)`` writes
    the result and is called once for each size of row tiles that is needed.

    The grid has the tiles of rows, and the programs of ``tiles`` tiles of ``tile`` outputs each. ``parts`` is memory
    for partial sums, float32 [parts of a tile, M, N], or ``arrived`` if there are no partial sums. ``programs`` is the
    number of programs of a tile of outputs for the most rows. Raises ValueError for another dtype of ``x``, for more
    tiles than there are counters, and for a gate and an up whose outputs are not whole tiles.
    """
    if x.dtype != torch.bfloat16:
        raise ValueError(f"x is {x.dtype}: the kernel takes torch.bfloat16")
    m = x.shape[0]
    if activation and (tiles % 2 or n != tiles * tile):
        raise ValueError(f"{n} outputs: those of a gate and as many must be multiples of {tile}")
    out = torch.empty(m, n // 2 if activation else n, dtype=x.dtype, device=x.device)
    if statically_known_true(m == 0):
        return out
    shared = division.parts > 1 or activation
    counted = programs * tiles // (2 if activation else 1)  # the two halves of a gate share a counter
    if shared and not statically_known_true(counted * ((m + sizes[-1] - 1) // sizes[-1]) <= COUNTERS):
        most = COUNTERS // counted * sizes[-1]
        raise ValueError(f"{m} rows of {n} outputs: the kernel takes {most} rows at most, so split them")
    parts = torch.empty(division.parts, m, n, dtype=torch.float32, device=x.device) if shared else arrived
    for rows, row_count in row_tiles(m, sizes):
        run((row_count, *division.programs(tiles)), rows, out, parts)
    return out


@triton.jit
def arrive(counter):
    """Return how many programs arrived before. The last one can read what they wrote, by loads that bypass L1."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")


@triton.jit
def place(WHOLE: tl.constexpr, SPLITS: tl.constexpr):
    # Returns this program's tile, which part of K it takes, and the number of tiles.
    tile, part, tiles = tl.program_id(1), tl.program_id(2), tl.num_programs(1)
    if WHOLE > 0:
        rest = (tiles - WHOLE) // SPLITS  # tiles that are divided
        if tile >= WHOLE:
            tile, part = WHOLE + (tile - WHOLE) % rest, (tile - WHOLE) // rest
        tiles = WHOLE + rest
    return tile, part, tiles


@triton.jit
def run_of_blocks(tile, part, BLOCKS: tl.constexpr, WHOLE: tl.constexpr, SPLITS: tl.constexpr):
    # Returns the first block of K that a program takes, and the first behind.
    first, last = part * BLOCKS // SPLITS, (part + 1) * BLOCKS // SPLITS
    if WHOLE > 0:  # noqa: SIM102  (of the two conditions one is the compiler's)
        if tile < WHOLE:
            last = tl.full((), BLOCKS, tl.int32)
    return first, last


@triton.jit
def _parts_of(tile, WHOLE: tl.constexpr, SPLITS: tl.constexpr):
    parts = tl.full((), SPLITS, tl.int32)
    if WHOLE > 0:  # noqa: SIM102
        if tile < WHOLE:
            parts = tl.full((), 1, tl.int32)
    return parts


@triton.jit
def _sums(PARTS, at, here, size, parts, WHOLE: tl.constexpr, SPLITS: tl.constexpr):
    # The sum of the ``parts`` partial sums; ``size`` elements are between two of them. What is not there adds 0.
    total = tl.load(PARTS + at, mask=here, other=0, cache_modifier=".cg")
    for part in tl.static_range(1, SPLITS):
        there = here
        if WHOLE > 0:
            there = here & (part < parts)
        total += tl.load(PARTS + part * size + at, mask=there, other=0, cache_modifier=".cg")
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
    OUT, PARTS, ARRIVED, total, M, m, n, there, N: tl.constexpr, WHOLE: tl.constexpr, SPLITS: tl.constexpr,
    ACTIVATION: tl.constexpr = "",
):  # fmt: skip
    # total: float32 [outputs, rows], of the outputs n and the rows m of this program's tile, as far as they are there
    here = (m[None, :] < M) & there[:, None]
    at = m.to(tl.int64)[None, :] * N + n[:, None]
    if SPLITS == 1 and ACTIVATION == "":
        tl.store(OUT + at, total.to(OUT.dtype.element_ty), mask=here)
    elif WHOLE == 0 or ACTIVATION != "":
        _share(OUT, PARTS, ARRIVED, total, M, m, n, at, here, N, WHOLE, SPLITS, ACTIVATION)
    else:
        if tl.program_id(1) < WHOLE:  # noqa: PLR5501  (of the two conditions one is the compiler's)
            tl.store(OUT + at, total.to(OUT.dtype.element_ty), mask=here)
        else:
            _share(OUT, PARTS, ARRIVED, total, M, m, n, at, here, N, WHOLE, SPLITS, ACTIVATION)


@triton.jit
def _share(
    OUT, PARTS, ARRIVED, total, M, m, n, at, here, N: tl.constexpr, WHOLE: tl.constexpr, SPLITS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    # Writes this program's sums for the last program of a tile, or of a gate's two tiles, which adds them all.
    tile, part, tiles = place(WHOLE, SPLITS)
    size = tl.full((), N, tl.int64) * M
    tl.store(PARTS + part * size + at, total, mask=here)
    if ACTIVATION == "":
        counter = ARRIVED + tl.program_id(0) * tiles + tile
        if arrive(counter) == SPLITS - 1:
            total = _sums(PARTS, at, here, size, SPLITS, WHOLE, SPLITS)
            tl.store(OUT + at, total.to(OUT.dtype.element_ty), mask=here)
            tl.store(counter, 0)
    else:
        half = tiles // 2
        n -= tile // half * (N // 2)
        row = m.to(tl.int64)[None, :]
        at = row * N + n[:, None]
        tile %= half
        gates, ups = _parts_of(tile, WHOLE, SPLITS), _parts_of(tile + half, WHOLE, SPLITS)
        counter = ARRIVED + tl.program_id(0) * half + tile
        if arrive(counter) == gates + ups - 1:
            gate = _sums(PARTS, at, here, size, gates, WHOLE, SPLITS)
            total = gate_of(gate, _sums(PARTS, at + N // 2, here, size, ups, WHOLE, SPLITS), ACTIVATION)
            tl.store(OUT + row * (N // 2) + n[:, None], total.to(OUT.dtype.element_ty), mask=here)
            tl.store(counter, 0)


def gated(product: Tensor, activation: str) -> Tensor:
    """Compute ``act(gate) * up`` of the two halves: [M, N] -> [M, N / 2]. Without an ``activation``, return the product
    unchanged. This is the kernels' computation in plain PyTorch, bit for bit except for CUDA's own exp and tanh."""
    if not activation:
        return product
    gate, up = product.chunk(2, -1)
    if activation == SILU:
        return F.silu(gate) * up
    x = gate.float()  # F.gelu uses another tanh on a CPU
    return (0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * (x * x * x))))).to(gate.dtype) * up
