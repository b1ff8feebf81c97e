"""A kernel is analyzed once for each kind of arguments, as Inductor would; the garbage collector runs rarely."""

import gc
from unittest.mock import patch

import pytest
import torch
import triton
import triton.language as tl
from torch._higher_order_ops import triton_kernel_wrap
from torch._subclasses.fake_tensor import FakeTensorMode

from eagle3.export.lowering.cuda.graph.shortcuts import analyzed_once, counters_unchanged
from eagle3.export.lowering.cuda.kernels import bf16, sums
from eagle3.export.lowering.cuda.named_gpu.compiling import compiling
from eagle3.export.lowering.gc_tuning import THRESHOLDS, collected_rarely
from eagle3.runner.system.gpus import BY_ARCH


@triton.jit
def _add(x, y, out, n, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(out + place, tl.load(x + place, mask=place < n) + tl.load(y + place), mask=place < n)


def arguments(dtype=torch.float32, n=3, block=16):
    with FakeTensorMode():
        x, y, out = (torch.empty(16, dtype=dtype) for _ in range(3))
    return {"x": x, "y": y, "out": out, "n": n, "BLOCK": block}


def test_only_kernel_calls_with_different_arguments_are_analyzed():
    analyze = triton_kernel_wrap.identify_accessed_tensors
    with (
        compiling(BY_ARCH["sm_90"]),
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


def test_kernel_calls_with_a_given_number_of_warps_are_analyzed_once():
    """Each call has an autotuner of its own for the same kernel."""

    def writes(block, warps):
        tuned = triton.autotune([triton.Config({"BLOCK": block}, num_warps=warps)], key=[])(_add)
        given = {name: value for name, value in arguments().items() if name != "BLOCK"}
        return {dep.name for dep in triton_kernel_wrap.identify_accessed_tensors(tuned, given, {}).read_writes.writes}

    with (
        compiling(BY_ARCH["sm_90"]),
        patch.object(triton_kernel_wrap, "generate_ttir", wraps=triton_kernel_wrap.generate_ttir) as seen,
        analyzed_once(),
    ):
        assert [writes(16, 4), writes(16, 4), writes(16, 8), writes(32, 4)] == [{"out"}] * 4
    assert seen.call_count == 2


@pytest.mark.parametrize(("whole", "activation"), [(0, ""), (4, ""), (4, "silu")])
def test_the_analysis_finds_that_a_product_writes_sums_and_output_but_no_counter(whole, activation):
    with FakeTensorMode():
        x, weight, out = (torch.empty(16, 16, dtype=torch.bfloat16) for _ in range(3))
        parts, arrived = torch.empty(2, 16, 16), sums.counters()
    given = {"X": x, "W": weight, "ARRIVED": arrived, "PARTS": parts, "OUT": out, "M": 16, "N": 16, "K": 256}
    given |= {"WHOLE": whole, "SPLITS": 2, "BLOCK_N": 64, "BLOCK_K": 128, "BLOCK_M": 16, "STAGES": 5}
    given |= {"ACTIVATION": activation} | bf16.ASKS_NOTHING

    def written() -> set[str]:
        found = triton_kernel_wrap.identify_accessed_tensors(bf16._bf16_small_m_kernel, given, {})
        assert "X" in {dep.name for dep in found.read_writes.reads}
        return {dep.name for dep in found.read_writes.writes}

    with compiling(BY_ARCH["sm_90"]):
        assert written() >= {"ARRIVED", "PARTS", "OUT"}
        with counters_unchanged():
            assert written() == {"PARTS", "OUT"}


def test_the_garbage_collectors_thresholds_are_restored():
    earlier, frozen = gc.get_threshold(), gc.get_freeze_count()
    with pytest.raises(ValueError, match="lowering"), collected_rarely():
        assert gc.get_threshold() == THRESHOLDS and gc.get_freeze_count() > frozen
        raise ValueError("lowering")
    assert gc.get_threshold() == earlier and gc.get_freeze_count() == 0
