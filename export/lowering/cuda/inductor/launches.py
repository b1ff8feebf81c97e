"""Records the launches of each method from Inductor's code generation: kernels, grids, and the bytes that they read.

A library (``.so``) holds the kernels' machine code. How often each kernel is launched, over which grid and with which
weights, is in generated C++ that is compiled into the library, so it is recorded here while the C++ is written. With
both, ``eagle3-inspect --cost`` computes lower bounds for the time of a call (``runner/inspect/cost/bound.py``). Kernels
of other libraries, such as cuBLAS, would be missing; ExecuTorch's backend uses none.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import sympy
import torch
from executorch.backends.cuda.cuda_backend import CudaBackend
from torch._inductor.codecache import CudaKernelParamCache
from torch._inductor.codegen.cpp_wrapper_gpu import CppWrapperGpu
from torch._inductor.codegen.wrapper import (
    AllocateLine,
    FreeIfNotReusedLine,
    FreeLine,
    ReuseLine,
    SymbolicCallArg,
)
from torch._inductor.ir import Buffer
from torch._inductor.runtime.triton_heuristics import GridExpr
from torch._inductor.virtualized import V

from eagle3.export.lowering.cuda.kernels.int4 import TILE as INT4_TILE
from eagle3.export.lowering.cuda.kernels.recurrent import CHUNK_WARPS
from eagle3.export.lowering.cuda.kernels.sums import Division
from eagle3.export.patching.patches import all_replaced
from eagle3.runner.contract import WORKSPACE
from eagle3.targets.spec import ROLLBACK_ROWS

WARP = 32
VIEW = re.compile(r".*\breinterpret_tensor_wrapper\((\w+),.*")
"""Matches a view of a buffer as a kernel's argument; group 1 is the buffer."""
ONLY_ASKED_FOR = "NEXT"
"""The argument of which a kernel reads nothing: it asks L2 for what the next launch reads."""


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


@dataclass(frozen=True)
class Launch:
    """One launch. ``weight_bytes`` is the number of bytes of weights that it reads. ``buffer_bytes`` has the bytes of
    each other tensor. Caches and partial sums are left out, since how much of them is read depends on the number of
    tokens; see ``cache`` and ``sums``. ``shared_bytes`` is the dynamic shared memory of a block."""

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    weight_bytes: int
    buffer_bytes: tuple[int, ...]
    products: Products | None
    cache: CacheReads | None = None
    sums: Sums | None = None
    state_bytes: int = 0
    """The bytes that it reads and writes of a recurrent state and of the ring of its changes."""


@contextmanager
def recorded_launches(rows: Mapping[str, int], longest: Mapping[str, int]) -> Iterator[dict[str, dict[str, Any]]]:
    """Record the launches that ExecuTorch's CUDA backend compiles, by method, in the form of ``export.json``.

    ``rows`` gives for each method the number of rows (the value of every dynamic size) for which grids and bytes are
    computed; ``longest`` gives the number of rows for the workspace. Methods with static sizes may be left out.
    """
    recorded: dict[str, dict[str, Any]] = {}
    compiling: list[str] = []
    calls: list[tuple[str, list[Any]]] = []
    around = CudaBackend.get_extra_aoti_compile_context_manager
    call, finish = CppWrapperGpu._generate_kernel_call_helper, CppWrapperGpu.finalize_prefix

    @contextmanager
    def around_one(cls: type[CudaBackend], specs: list[Any]) -> Iterator[Any]:
        compiling[:] = [cls.method_name_from_compile_specs(specs)]
        calls.clear()
        with around(specs) as entered:
            yield entered

    def note_call(self: CppWrapperGpu, kernel_name: str, call_args: list[Any], **kwargs: Any) -> None:
        if kwargs.get("triton", True):
            calls.append((kernel_name, list(call_args)))
        call(self, kernel_name, call_args, **kwargs)

    def record(self: CppWrapperGpu) -> None:
        finish(self)  # every kernel has been compiled by now
        (method,) = compiling
        recorded[method] = _method(calls, self._kernel_name_to_body, rows.get(method, 1))
        recorded[method][WORKSPACE] = workspace(self.lines, longest.get(method, 1))

    wrapper = "torch._inductor.codegen.cpp_wrapper_gpu.CppWrapperGpu."
    with all_replaced(
        {
            "executorch.backends.cuda.cuda_backend.CudaBackend.get_extra_aoti_compile_context_manager": classmethod(
                around_one
            ),
            f"{wrapper}_generate_kernel_call_helper": note_call,
            f"{wrapper}finalize_prefix": record,
        }
    ):
        yield recorded


def _method(calls: list[tuple[str, list[Any]]], sources: Mapping[str, str], rows: int) -> dict[str, Any]:
    """Return the record of a method. ``weight_bytes`` counts every weight once. Equal launches are one entry with a
    ``count``."""
    read: dict[str, int] = {}
    counted: Counter[Launch] = Counter()
    for kernel, arguments in calls:
        launch, weights = _launch(kernel, arguments, sources.get(kernel, ""), rows)
        if not all(launch.grid):
            continue  # a kernel for another number of rows, which AOTInductor's code skips
        counted[launch] += 1
        for name, size in weights.items():
            read[name] = max(size, read.get(name, 0))
    launches = [asdict(launch) | {"count": count} for launch, count in counted.items()]
    return {"rows": rows, "weight_bytes": sum(read.values()), "launches": launches}


def _launch(kernel: str, arguments: list[Any], source: str, rows: int) -> tuple[Launch, dict[str, int]]:
    """Return the launch, and by name the bytes that it reads of each weight."""
    known = CudaKernelParamCache.get(kernel)
    meta = known["inductor_meta"]
    values = {
        name: number
        for name, argument in zip(known["def_args"], arguments, strict=True)
        if (number := _number(argument, rows)) is not None
    }
    x, y, z = GridExpr.from_meta(meta, known["config"], mode="python").eval_slow(values)
    elements = _elements(meta, values)
    constants = _constants(known, source)
    reads, added = cache_reads(constants, rows), sums_read(constants, rows)
    weights, buffers = {}, {}
    read = [argument for name, argument in zip(known["def_args"], arguments, strict=True) if name != ONLY_ASKED_FOR]
    for name in {VIEW.sub(r"\1", argument) for argument in read if isinstance(argument, str)}:
        if name in V.graph.constants:
            constant = V.graph.constants[name]
            if name in V.graph.mutated_buffers or reads and reads.slots in constant.shape:
                continue  # a cache; the draft step of an assistant reads caches that it does not write
            weights[name] = _bytes(constant.shape, constant.dtype, elements)
            if experts := constants.get("EXPERTS"):  # no more experts are read than choices are made
                weights[name] = weights[name] * min(values["CHOICES"], experts) // experts
        elif (buffer := V.graph.try_get_buffer(name)) is not None:
            shape = [_counted(size, rows) for size in buffer.get_size()]
            buffers[name] = _bytes(shape, buffer.get_dtype(), elements)
    left = sorted(buffers.values(), reverse=True)
    launch = Launch(
        kernel,
        (int(x), int(y), int(z)),
        known["num_warps"] * WARP,
        known["shared_mem"],
        sum(weights.values()),
        # the largest tensor holds the sums of all chunks
        tuple(left[1:] if added or reads and reads.sum_bytes else left),
        products(known["mangled_name"], constants, x * y * z, values.get("M", rows))
        or block_products(constants, values),
        reads,
        added,
        state_bytes(constants, values),
    )
    return launch, weights


def workspace(lines: Iterable[Any], rows: int) -> int:
    """Return the peak GPU memory, in bytes, of a method's intermediate tensors for ``rows`` rows. It follows the
    generated code's allocations, reuses and frees."""
    held: dict[str, int] = {}
    now = most = 0
    for line in lines:
        if isinstance(line, AllocateLine):
            now += _hold(held, line.node, rows)
        elif isinstance(line, ReuseLine):
            held[line.reused_as.get_name()] = held.pop(line.node.get_name(), 0)
        elif isinstance(line, FreeLine) or isinstance(line, FreeIfNotReusedLine) and not line.is_reused:
            now -= held.pop(line.node.get_name(), 0)
        most = max(most, now)
    return most


def _hold(held: dict[str, int], node: Buffer, rows: int) -> int:
    on_gpu = node.get_device().type == "cuda"
    size = _bytes([_counted(extent, rows) for extent in node.get_size()], node.get_dtype(), None) if on_gpu else 0
    held[node.get_name()] = size
    return size


def _number(argument: str | SymbolicCallArg | sympy.Expr | int, rows: int) -> int | None:
    """Return an argument as a number; None for a tensor."""
    if isinstance(argument, SymbolicCallArg):
        argument = argument.inner_expr
    return None if isinstance(argument, str) else _counted(argument, rows)


def _counted(expression: sympy.Expr | int, rows: int) -> int:
    value = sympy.sympify(expression)
    return int(value.subs(dict.fromkeys(value.free_symbols, rows)))


def _elements(meta: Mapping[str, Any], values: Mapping[str, int]) -> int | None:
    """Return the number of elements that a kernel covers; None if it is not known. For a combined kernel it is that of
    the largest part, with loops rounded up to powers of 2."""
    combined = meta.get("combo_grid_meta")
    if combined is None:
        spaces = [value for name, value in values.items() if "numel" in name]
        return math.prod(spaces) if spaces else None
    found = []
    for number in range(combined["num_kernels"]):
        sizes = {axis: combined.get(f"{axis}numel_{number}", 0) for axis in ("x", "y")}
        exact = {axis: values[f"{axis}numel_{number}"] if size is None else size for axis, size in sizes.items()}
        hints = combined[f"size_hints_{number}"]
        found.append(math.prod(exact.get(axis, size) for axis, size in hints.items()))
    return max(found)


def _bytes(shape: Iterable[int], dtype: torch.dtype, elements: int | None) -> int:
    """Return the bytes that a kernel reads of a tensor: no more than ``elements`` elements, since it may read only a
    few rows of a table."""
    size = math.prod(shape)
    return (size if elements is None else min(size, elements)) * dtype.itemsize


def _constants(known: Mapping[str, Any], source: str) -> dict[str, int]:
    """Return a kernel's compile-time integers. The integers of a template's kernel are found in its source only."""
    found = re.findall(r"^\s*(\w+)(?: : tl\.constexpr)? = (\d+)$", source, re.MULTILINE)
    numbers = {name: int(value) for name, value in found}
    given = known["triton_meta"].get("constants", {}) | known["config"]
    return numbers | {name: value for name, value in given.items() if isinstance(value, int)}


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
