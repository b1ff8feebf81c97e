"""What Inductor is told of Triton kernels as it lowers to CUDA.

For each call of a Triton kernel Inductor compiles the kernel to Triton's IR, to see which tensors it writes: twice a
linear, a tenth of a second and more each time, though a model calls a few kernels with a few shapes. And of what a
kernel writes and sets back it would make a copy for each call.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import sympy
import torch
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor.ir import TensorBox
from torch.utils._ordered_set import OrderedSet


@contextmanager
def analyzed_once() -> Iterator[None]:
    """Within it, calls of one kernel that differ in nothing but tensors of the same dtypes are analyzed once."""
    analyze = triton_kernel_wrap.identify_accessed_tensors
    known: dict[Any, Any] = {}

    def analyze_once(kernel: Any, kwargs: dict[str, Any], tma_descriptor_metadata: dict[str, Any]) -> Any:
        if tma_descriptor_metadata:
            return analyze(kernel, kwargs, tma_descriptor_metadata)
        key = kernel, tuple((name, _seen_as(value)) for name, value in kwargs.items())
        if key not in known:
            known[key] = analyze(kernel, kwargs, tma_descriptor_metadata)
        return known[key]

    with patch.object(triton_kernel_wrap, "identify_accessed_tensors", analyze_once):
        yield


@contextmanager
def counters_unchanged() -> Iterator[None]:
    """Within it, kernels only read the counters of products (``kernels/sums.py``): they are zeros before and after."""
    analyze = triton_kernel_wrap.identify_accessed_tensors

    def analyze_without(*args: Any) -> Any:
        found = analyze(*args)
        writes = OrderedSet(dep for dep in found.read_writes.writes if dep.name != "ARRIVED")
        return replace(found, read_writes=replace(found.read_writes, writes=writes))

    with patch.object(triton_kernel_wrap, "identify_accessed_tensors", analyze_without):
        yield


def _seen_as(value: Any) -> Any:
    """What the analysis sees of an argument: of a tensor its dtype, of a symbol that it is one."""
    if isinstance(value, torch.Tensor | TensorBox):
        return type(value), value.dtype
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | sympy.Expr):
        return type(value)
    return type(value), value
