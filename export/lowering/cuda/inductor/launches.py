"""Records the launches of each method from Inductor's code generation: kernels, grids, and the bytes that they read.

A library (``.so``) holds the kernels' machine code. How often each kernel is launched, over which grid and with which
weights, is in generated C++ that is compiled into the library, so it is recorded here while the C++ is written. A
runner checks the size of blocks and the workspace, and ``scripts/gpu/gpu_cost.py`` computes bounds for the time of a
call. Kernels of other libraries, such as cuBLAS, would be missing; ExecuTorch's backend uses none.
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

from eagle3.export.lowering.cuda.inductor.card_launches import CARDS, CardLaunch
from eagle3.export.lowering.cuda.kernels.sums import GIVEN_UP
from eagle3.export.patching.patches import all_replaced
from eagle3.runner.contract import WORKSPACE

WARP = 32
VIEW = re.compile(r".*\breinterpret_tensor_wrapper\((\w+),.*")
"""Matches a view of a buffer as a kernel's argument; group 1 is the buffer."""
ONLY_ASKED_FOR = "NEXT"
"""The name of a weight that a kernel does not read: the kernel asks L2 for it, and the next launch reads it."""
COUNTERS = "ARRIVED"
"""The name of the counters that all kernels share (``kernels/sums.py``), of which a launch uses a few. Without partial
sums a kernel takes them as ``PARTS`` too."""


@dataclass(frozen=True)
class Launch:
    """One launch. ``weight_bytes``: bytes of the weights that it reads; ``buffer_bytes``: those of each other tensor,
    the largest first. KV caches are left out, since how much of them is read depends on the number of tokens.
    ``shared_bytes``: the dynamic shared memory of a block. ``constants`` and ``arguments``: (name, value) of the
    integers that the kernel is compiled with and called with. ``cards``: the threads and shared memory by GPU, if they
    differ (``card_launches``); ``threads`` and ``shared_bytes`` are then those of the first of them."""

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    weight_bytes: int
    buffer_bytes: tuple[int, ...]
    constants: tuple[tuple[str, int], ...]
    arguments: tuple[tuple[str, int], ...]
    cards: tuple[CardLaunch, ...] = ()

    def record(self, count: int) -> dict[str, Any]:
        named = {"constants": dict(self.constants), "arguments": dict(self.arguments)}
        recorded = asdict(self) | named | {"count": count}
        recorded.pop(CARDS)
        return recorded | ({CARDS: [each.record() for each in self.cards]} if self.cards else {})


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
        GIVEN_UP.clear()
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
        if GIVEN_UP:
            recorded[method]["given_up"] = dict(GIVEN_UP)

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
    launches = [launch.record(count) for launch, count in counted.items()]
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
    weights, buffers = {}, {}
    tensors = {
        name: VIEW.sub(r"\1", argument)
        for name, argument in zip(known["def_args"], arguments, strict=True)
        if isinstance(argument, str)
    }
    for name in {tensors[each] for each in tensors.keys() - {ONLY_ASKED_FOR}} - {tensors.get(COUNTERS)}:
        if name in V.graph.constants:
            constant = V.graph.constants[name]
            if name in V.graph.mutated_buffers or constants.get("SLOTS") in constant.shape:
                continue  # a cache; the draft step of an assistant reads caches that it does not write
            weights[name] = _bytes(constant.shape, constant.dtype, elements)
            if experts := constants.get("EXPERTS"):  # no more experts are read than choices are made
                weights[name] = weights[name] * min(values["CHOICES"], experts) // experts
        elif (buffer := V.graph.try_get_buffer(name)) is not None:
            shape = [_counted(size, rows) for size in buffer.get_size()]
            buffers[name] = _bytes(shape, buffer.get_dtype(), elements)
    cards = known.get(CARDS, ())
    warps, shared, own, parts, _ = cards[0][1:] if cards else (known["num_warps"], known["shared_mem"], (), 0, 0)
    launch = Launch(
        kernel,
        (int(x), int(y), parts or int(z)),
        warps * WARP,
        shared,
        sum(weights.values()),
        tuple(sorted(buffers.values(), reverse=True)),
        tuple(sorted({**constants, **dict(own)}.items())),
        tuple(sorted(values.items())),
        cards,
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
