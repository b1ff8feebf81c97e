"""Saves work that Inductor repeats for every call of a Triton kernel while it lowers to CUDA.

For each call of a Triton kernel, Inductor compiles the kernel to Triton's IR to see which tensors it writes. That takes
a tenth of a second or more, twice per linear, although a model calls few kernels with few shapes. Inductor would also
copy a tensor that a kernel writes and then restores, for each call. It would also write a program that reproduces the
compilation, with every kernel's source once per call, into a log that nobody reads.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import sympy
import torch
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor.ir import TensorBox
from torch.utils._ordered_set import OrderedSet
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from eagle3.export.patching.patches import original, replaced

_NAMES = ("identify_accessed_tensors", "identify_mutated_tensors")
ANALYSIS = triton_kernel_wrap.__name__ + "." + next(name for name in _NAMES if hasattr(triton_kernel_wrap, name))
"""PyTorch's analysis of the tensors that a kernel reads and writes. In 2.11 it has another name and returns only the
tensors that are written."""
COUNTERS = "ARRIVED"
OF_NEXT = "OF_NEXT"
"""The constant that only the kernels with prefetches have."""
PREFETCHES = (OF_NEXT, "FIRST", "AHEAD", "EARLY")
"""The constants that, if they are not 0, add instructions that no analysis of memory needs: prefetches and waits."""
Kernel: TypeAlias = JITFunction | Autotuner


@contextmanager
def analyzed_once() -> Iterator[None]:
    """Analyze a kernel only once for all calls that differ only in the tensors, not in their dtypes."""
    analyze = original(ANALYSIS)
    known: dict[Any, Any] = {}

    def analyze_once(kernel: Kernel, kwargs: dict[str, Any], tma_descriptor_metadata: dict[str, Any]) -> object:
        if tma_descriptor_metadata:
            return analyze(kernel, kwargs, tma_descriptor_metadata)
        key = _source(kernel), tuple((name, _seen_as(value)) for name, value in kwargs.items())
        if key not in known:
            known[key] = analyze(kernel, kwargs, tma_descriptor_metadata)
        return known[key]

    with replaced(ANALYSIS, analyze_once):
        yield


@contextmanager
def counters_unchanged() -> Iterator[None]:
    """Make the analysis say that kernels do not write the counters (``kernels/sums.py``), because the counters are zero
    before and after each call."""
    analyze = original(ANALYSIS)

    def analyze_without(*args: Any) -> object:
        found = analyze(*args)
        if isinstance(found, list):
            return [name for name in found if name != COUNTERS]
        writes = OrderedSet(dep for dep in found.read_writes.writes if dep.name != COUNTERS)
        return replace(found, read_writes=replace(found.read_writes, writes=writes))

    with replaced(ANALYSIS, analyze_without):
        yield


@contextmanager
def prefetches_unseen() -> Iterator[None]:
    """Analyze kernels without their prefetches into L2 (``kernels/l2.py``), which write nothing: the analysis does not
    know their instructions, and would take every tensor as written."""
    analyze = original(ANALYSIS)

    def analyze_without(kernel: Kernel, kwargs: dict[str, Any], *rest: Any) -> object:
        unseen = {name: 0 for name in PREFETCHES if name in kwargs and OF_NEXT in kwargs}
        return analyze(kernel, kwargs | unseen, *rest)

    with replaced(ANALYSIS, analyze_without):
        yield


@contextmanager
def no_repro() -> Iterator[None]:
    """Keep PyTorch from writing a program that reproduces each compilation."""
    with replaced("torch._dynamo.repro.after_aot.save_graph_repro", lambda *_args, **_kwargs: None):
        yield


def _source(kernel: Kernel) -> object:
    """Return the part of a kernel that the analysis depends on. An autotuner is left out of it, since each number of
    warps has its own."""
    if not isinstance(kernel, Autotuner):
        return kernel
    return kernel.fn, tuple(kernel.configs[0].kwargs.items()) if kernel.configs else ()


def _seen_as(value: object) -> object:
    """Return the part of an argument that the analysis depends on: a tensor's dtype, or the type of a symbol."""
    if isinstance(value, torch.Tensor | TensorBox):
        return type(value), value.dtype
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | sympy.Expr):
        return type(value)
    return type(value), value
