"""Kernels that may start early wait for the kernel in front before they touch memory that a kernel writes."""

import ast
import re
from pathlib import Path

import pytest
import torch
from cuda_lowered import lowered
from torch import nn
from torch._inductor.codecache import CudaKernelParamCache
from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides

from eagle3.export.lowering.cuda.inductor.early_launches import (
    RELEASE,
    WAIT,
    can_start_early,
    early_launches,
    launching_early,
    waiting,
)
from eagle3.runner.system.gpus import BY_ARCH

POINTWISE = """async_compile.triton('triton_poi_fused_add_0', '''
import triton
import triton.language as tl

@triton_heuristics.pointwise(size_hints={'x': 64}, triton_meta={})
@triton.jit
def triton_(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xnumel = 64
    tl.store(out_ptr0, tl.load(in_ptr0))
''', device_str='cuda')"""
HELPER = "@triton.jit\ndef helper(x):\n    xnumel = 64\n    return x\n\n"
HELPER_FIRST = POINTWISE.replace("@triton_heuristics", f"{HELPER}@triton_heuristics")
OWN_WAIT = POINTWISE.replace("    xnumel = 64", "    if EARLY:\n        tl.extra.cuda.gdc_wait()")


RECORDS = OWN_WAIT.replace("triton_meta={}", "triton_meta={'constants': {'EARLY': True}}")


def body_of(kernel: str) -> list[str]:
    tree = ast.parse(ast.literal_eval(re.search(r", ('''.*''')", kernel, re.DOTALL)[1]))
    return [ast.unparse(line) for line in tree.body[-1].body]


@pytest.mark.parametrize("kernel", [POINTWISE, HELPER_FIRST, OWN_WAIT])
def test_a_kernel_releases_the_next_one_and_waits_before_anything_else(kernel):
    found = waiting(kernel)
    assert body_of(found) == [RELEASE, WAIT, *body_of(kernel)]


def test_a_kernel_that_waits_itself_is_left_as_it_is():
    assert waiting(RECORDS) == RECORDS


@pytest.mark.parametrize(
    "kernel",
    [
        RECORDS.replace("True", "False"),
        RECORDS.replace("'EARLY'", "'LATE'"),
        RECORDS.replace("tl.extra.cuda.gdc_wait()", "pass"),
        RECORDS.replace("'constants': {'EARLY': True}", "'signature': {'EARLY': 'constexpr'}"),
    ],
)
def test_a_kernel_that_only_could_wait_itself_waits_first(kernel):
    assert body_of(waiting(kernel))[:2] == [RELEASE, WAIT]


@pytest.mark.parametrize("kernel", ["", POINTWISE.replace("@triton_heuristics", "@other")])
def test_a_definition_without_a_kernel_is_refused(kernel):
    with pytest.raises(ValueError, match="0 kernels"):
        waiting(kernel)


def test_every_launch_of_the_wrapper_has_the_attribute():
    helpers = CUDADeviceOpOverrides().kernel_driver()
    early = launching_early(helpers)
    assert "cuLaunchKernel(" in helpers and "cuLaunchKernel(" not in early and early.count("cuLaunchKernelEx(") == 1
    with pytest.raises(ValueError, match="launchKernel is not the one"):
        launching_early(early)


def test_kernels_start_early_from_sm_90_on():
    assert [arch for arch in BY_ARCH if not can_start_early(arch)] == ["sm_80", "sm_86", "sm_87", "sm_89"]


class Softmax(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64).bfloat16())

    def forward(self, x):
        y = torch.softmax(x @ self.weight, -1)
        return y.sum(-1), (y * 2).cumsum(0)


def test_compiled_kernels_wait_before_they_access_memory():
    """The kernels are a template's and Inductor's own."""
    with early_launches():
        called, graph = lowered(Softmax(), (torch.randn(4, 64).bfloat16(),))
    assert len(graph.sources) == 3 and all(WAIT in source for source in graph.sources.values())
    for name, _ in called:
        ptx = Path(CudaKernelParamCache.get(name)["asm"]).read_text()
        wait = ptx.index("griddepcontrol.wait")
        assert wait < min(ptx.index(access) for access in ("ld.global", "st.global"))
