"""The work of a recorded launch: products of a matmul, reads of caches, sums of attention, bytes of states.

They follow from the integers that a kernel is compiled with and called with (``export.json``), by their names. A kernel
that is not known has no such work, and is bounded by its bytes and its instructions alone.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from eagle3.export.lowering.cuda.kernels.int4.tiles.kernel import TILE as INT4_TILE
from eagle3.export.lowering.cuda.kernels.recurrent import CHUNK_WARPS
from eagle3.export.lowering.cuda.kernels.sums import Division
from eagle3.targets.spec import ROLLBACK_ROWS


@dataclass(frozen=True)
class Products:
    """The work of a matmul kernel: the work of one iteration of its main loop, and the number of iterations over the
    whole grid."""

    weights: int
    """Weights per iteration: the outputs of a tile times the block size along K."""
    multiply_adds: int
    """The least multiply-adds of an iteration on the tensor cores. They identify an unrolled loop."""
    iterations: int


@dataclass(frozen=True)
class CacheReads:
    """The work of an attention kernel for each position of its cache that it reads."""

    slots: int
    position_bytes: int
    """Bytes of a position's keys and values in all heads, with their scales."""
    chunk: int
    """The number of positions that a program reads, if positions are divided among programs."""
    equal: int
    """The number of chunks of a whole context that have this size. After them come half as many chunks of twice the
    size, and so on. 0 means that all chunks have this size."""
    sum_bytes: int
    """The bytes of partial sums that a program writes, over all heads; 0 if it writes none."""
    sum_steps: int
    """The steps in which the last program adds the partial sums of a chunk; 0 if another launch adds them."""
    block: int
    """Positions per iteration of its main loop."""
    multiply_adds: int
    """The least multiply-adds of an iteration on the tensor cores."""
    row_tiles: int
    """The number of tiles of rows that a program takes one after the other."""


@dataclass(frozen=True)
class Sums:
    """The work of a kernel that adds the partial sums of attention to a whole context."""

    chunk: int
    equal: int
    part_bytes: int
    """The bytes of a chunk's partial sums, over all heads."""
    ahead: int
    """The number of chunks that are loaded together."""


def work_of(entry: Mapping[str, Any], rows: int) -> tuple[Products | None, CacheReads | None, Sums | None, int]:
    """Return the work of a recorded launch: its products, the caches that it reads, the sums that it adds, and the
    bytes of recurrent states."""
    constants, arguments = entry["constants"], entry["arguments"]
    done = products(entry["kernel"], constants, math.prod(entry["grid"]), arguments.get("M", rows))
    return (
        done or block_products(constants, arguments),
        cache_reads(constants, rows),
        sums_read(constants, rows),
        state_bytes(constants, arguments),
    )


def products(kernel: str, constants: Mapping[str, int], blocks: int, rows: int) -> Products | None:
    """Return the work of a kernel that multiplies by quantized weights, or of a template's kernel; None for any other
    kernel.

    The sizes are found by the names of its constants: ``N`` (or ``N0`` and so on for several weights), ``K``,
    ``BLOCK_N`` and ``BLOCK_K``. Of experts (``TOP_K`` of ``EXPERTS`` a row), as many different ones are assumed to be
    chosen as possible.
    """
    if kernel.startswith("_fused_moe"):  # ExecuTorch's kernel
        constants = {**constants} | {f"BLOCK_{axis}": constants[f"BLOCK_SIZE_{axis}"] for axis in "MNK"}
    outputs = [constants[name] for name in ("N", "N0", "N1", "N2") if name in constants]  # one for each weight
    k, block_n, run_of_k = (constants.get(name) for name in ("K", "BLOCK_N", "BLOCK_K"))
    if run_of_k is None or k is None or block_n is None or not outputs:
        return None
    if experts := constants.get("EXPERTS"):  # a program ends at once if an earlier choice is of the same expert
        choices = rows * constants["TOP_K"]
        blocks = blocks * min(choices, experts) // choices
    tile = max(block_n, INT4_TILE) if "N0" in constants else block_n
    tiles = sum(math.ceil(n / tile) for n in outputs) * (tile // block_n)
    block_m = constants.get("BLOCK_M", 8 if rows <= 8 else 16)
    division = Division(constants.get("WHOLE", 0), constants.get("SPLITS", 1))
    # of records, blocks are shared evenly among any number of programs
    row_tiles = max(1, blocks // (constants.get("PROGRAMS") or math.prod(division.programs(tiles))))
    if "DIVIDED" in constants:  # the number of parts depends on the rows
        row_tiles = math.ceil(rows / block_m)
    if at_a_time := constants.get("ROWS"):  # a program takes its rows in several tiles, in one image of its code
        row_tiles, block_m = row_tiles * (block_m // at_a_time), at_a_time
    weights = block_n * run_of_k
    halves = "_int8_small_m", "_int8_experts_small_m"
    dots = 2 if kernel.startswith(halves) else 1  # two products for each weight, of its low and its high half
    return Products(weights, weights * block_m * dots, tiles * row_tiles * math.ceil(k / run_of_k))


def cache_reads(constants: Mapping[str, int], rows: int) -> CacheReads | None:
    """Return the work of an attention kernel, from the names of its constants; None for any other kernel."""
    if not {"SLOTS", "KV_HEADS", "CODES"} <= constants.keys():
        return None
    width, block, rows_of_program = constants["BLOCK_D"], constants["BLOCK_N"], constants["BLOCK_M"]
    at_a_time, divided = constants.get("ROWS", rows_of_program), "CHUNK" in constants
    head = constants["D"] + torch.float32.itemsize if constants["CODES"] else constants["D"] * torch.bfloat16.itemsize
    return CacheReads(
        slots=constants["SLOTS"],
        position_bytes=2 * constants["KV_HEADS"] * head,
        chunk=constants["CHUNK"] if divided else constants["SLOTS"],
        equal=constants["MOST"] if divided and constants["DOUBLINGS"] >= 0 else 0,
        sum_bytes=4 * rows * constants["KV_HEADS"] * constants["GROUPS"] * constants["D"]
        if divided and not constants["DIRECT"]
        else 0,
        sum_steps=math.ceil(width / constants["COLUMNS"]) if divided and constants["DOUBLINGS"] < 0 else 0,
        block=block,
        multiply_adds=2 * at_a_time * block * width,
        row_tiles=rows_of_program // at_a_time,
    )


def state_bytes(constants: Mapping[str, int], values: Mapping[str, int]) -> int:
    """Return the bytes that a kernel of ``recurrent.py`` reads and writes of a state and of its ring, from its
    arguments; 0 for any other kernel. As many rows are taken to be committed as the call has."""
    if "KEY_HEADS" not in constants:
        return 0
    arguments = {**constants, **values}
    state = constants["HEADS"] * constants["D_K"] * constants["D_V"]
    if "count" in arguments:  # a chunk reads the state, and writes it twice
        return torch.float32.itemsize * (3 * state + ROLLBACK_ROWS * constants["WIDTH"])
    written = arguments["rows"] - arguments["begin"]
    changes = written if arguments["begin"] else 2 * written  # the last rows of a chunk commit nothing
    return torch.float32.itemsize * (2 * state + changes * constants["WIDTH"])


def block_products(constants: Mapping[str, int], values: Mapping[str, int]) -> Products | None:
    """Return the work of a recurrent chunk's kernel, from its arguments; None for any other kernel. An iteration of its
    loop is a block of rows, and its products have three terms each. Decays of channels make a loop within it, which is
    counted once, as in the machine code."""
    if "DOUBLINGS" not in constants or "KEY_HEADS" not in constants:
        return None
    block, width, columns = constants["BLOCK"], constants["BLOCK_K"], constants["COLUMNS"]
    by_keys = block * block * width + 2 * block * width * columns
    by_all_warps = 0
    if constants["DELTA"]:  # keys by keys and by the state, and an inverse
        by_keys += block * block * width + block * width * columns
        by_keys += block * block * width if constants["DECAYS"] > 1 else 0  # decays by ones
        by_all_warps = 2 * (constants["DOUBLINGS"] - 1) * block**3 * CHUNK_WARPS
    programs = constants["HEADS"] * math.ceil(constants["D_V"] / columns)
    blocks = math.ceil(values["count"] / block)
    return Products(width * columns, 3 * (by_keys + by_all_warps), programs * blocks)


def sums_read(constants: Mapping[str, int], rows: int) -> Sums | None:
    """Return the work of a kernel that adds partial sums of attention, from the names of its constants; None for any
    other kernel."""
    if "BLOCK_PARTS" not in constants:
        return None
    part_bytes = torch.float32.itemsize * rows * constants["HEADS"] * constants["D"]
    return Sums(constants["CHUNK"], constants["MOST"], part_bytes, constants["AHEAD"])
