"""A kernel is analyzed once for each kind of arguments, and the answer is Inductor's own."""

from unittest.mock import patch

import torch
import triton
import triton.language as tl
from torch._higher_order_ops import triton_kernel_wrap
from torch._subclasses.fake_tensor import FakeTensorMode

from eagle3.export.lowering.cuda.named_gpu.compiling import compiling
from eagle3.export.lowering.cuda.named_gpu.gpus import GPUS
from eagle3.export.lowering.cuda.shortcuts import analyzed_once


@triton.jit
def _add(x, y, out, n, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(out + place, tl.load(x + place, mask=place < n) + tl.load(y + place), mask=place < n)


def arguments(dtype=torch.float32, n=3, block=16):
    with FakeTensorMode():
        x, y, out = (torch.empty(16, dtype=dtype) for _ in range(3))
    return {"x": x, "y": y, "out": out, "n": n, "BLOCK": block}


def test_only_calls_that_differ_are_analyzed():
    analyze = triton_kernel_wrap.identify_accessed_tensors
    with (
        compiling(GPUS["sm_90"]),
        patch.object(triton_kernel_wrap, "generate_ttir", wraps=triton_kernel_wrap.generate_ttir) as seen,
    ):
        expected = analyze(_add, arguments(), {})
        assert {dep.name for dep in expected.read_writes.writes} == {"out"}
        with analyzed_once():
            for given in (
                arguments(),
                arguments(),
                arguments(dtype=torch.float16),
                arguments(block=32),
                arguments(n=5),
            ):
                found = triton_kernel_wrap.identify_accessed_tensors(_add, given, {})
                assert found.read_writes.writes == expected.read_writes.writes
                assert found.read_writes.reads == expected.read_writes.reads
    assert seen.call_count == 1 + 4
    assert triton_kernel_wrap.identify_accessed_tensors is analyze
