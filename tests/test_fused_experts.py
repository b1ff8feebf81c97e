"""Experts by ExecuTorch's fused kernels: the numbers of their dequantized weights, run by Triton's interpreter."""

from contextlib import contextmanager
from importlib import import_module
from unittest import mock

import pytest
import torch
import triton.experimental.gluon.language  # noqa: F401  (it copies the library while that is not interpreted)
import triton.language as tl
from executorch.backends.cuda.cuda_backend import CudaBackend
from executorch.backends.cuda.cuda_partitioner import CudaPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.exir.backend.compile_spec_schema import CompileSpec
from random_checkpoints import FAMILIES, SIZE
from torch import nn
from torch._inductor import config as inductor
from torch.export import Dim
from triton.runtime import JITFunction
from triton.runtime.interpreter import InterpretedFunction
from triton_interpreter import mended

from eagle3.export.lowering.cuda.backend import OPTIONS
from eagle3.export.lowering.cuda.inductor.fusion import fused_further
from eagle3.export.lowering.cuda.named_gpu import named_gpu
from eagle3.export.lowering.cuda.weights.experts import FusedExperts, expert_rules, use_fused_experts
from eagle3.export.lowering.cuda.weights.quantization import fitted_recipe, quantize
from eagle3.targets.decoder_layers import skeleton
from eagle3.targets.experts import Experts

fused_moe = import_module("executorch.backends.cuda.triton.kernels.fused_moe")
FUSED = {"qwen3-30B-A3B": 6, "llama4-scout": 6, "llama4-maverick": 3, "gpt-oss-20b": 0, "gemma4-26B-A4B": 0}
"""The layers with such experts."""


def by_interpreter(kernel):
    """``wrap_triton`` of an autotuned kernel: its first configuration, on host tensors."""
    run, chosen = InterpretedFunction(kernel.fn.fn), kernel.configs[0].kwargs

    class Grids:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: run[grid](*args, **kwargs, **chosen)

    return Grids()


@contextmanager
def interpreted():
    """Triton's own library was made for compiling: its functions are interpreted like the kernels that call them. The
    interpreter leaves the language changed after such a call."""
    ops = {name: getattr(fused_moe, name)._init_fn for name in ("fused_moe", "fused_moe_batched_gemm")}
    before = {owner: dict(vars(owner)) for owner in (tl, tl.core, tl.math, tl.standard, tl.tensor)}
    try:
        for module in (tl, tl.standard):
            for name, value in before[module].items():
                if isinstance(value, JITFunction):
                    setattr(module, name, InterpretedFunction(value.fn))
        with (
            mended(),
            mock.patch.object(fused_moe, "wrap_triton", by_interpreter),
            mock.patch.multiple(torch.ops.triton, **ops),
        ):
            yield
    finally:
        for owner, names in before.items():
            for name, value in names.items():
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)


def random_experts(name: str) -> tuple[Experts, Experts]:
    """The experts of a family's layer with random weights, in INT4 as the recipe says, and with those dequantized."""
    torch.manual_seed(3)
    config = FAMILIES[name](SIZE | {"num_hidden_layers": 2}).config
    made = []
    for _ in range(2):
        model = skeleton(config, 64).model
        made.append(next(module for module in model.modules() if isinstance(module, Experts)).to_empty(device="cpu"))
    packed, plain = made
    holder = nn.ModuleDict({"experts": packed})
    for parameter in packed.parameters():
        parameter.data = (torch.randn(parameter.shape) / parameter.shape[1] ** 0.5).to(torch.bfloat16)
    quantize(holder, fitted_recipe("default", config, holder))
    for name in ("gate_up", "down"):
        weight = getattr(packed, name).weight.dequantize(torch.float32)
        getattr(plain, name).weight = nn.Parameter(weight, requires_grad=False)
    use_fused_experts(holder)
    return holder["experts"], plain


@pytest.mark.parametrize("name", ["qwen3-30B-A3B", "llama4-scout"])
@pytest.mark.parametrize("rows", [3, 20])
def test_the_kernels_compute_the_experts_of_dequantized_weights(name, rows):
    fused, plain = random_experts(name)
    assert isinstance(fused, FusedExperts)
    x = torch.randn(rows, 64).to(torch.bfloat16)
    weights, chosen = torch.randn(rows, plain.count).softmax(-1).topk(2)
    with interpreted():
        found = fused(x, chosen, weights)
    expected = plain(x.float(), chosen, weights)
    assert (found.float() - expected).norm() <= 2**-7 * expected.norm()  # bf16 of inputs, products and results


@pytest.mark.parametrize(("longest", "op"), [(4, "fused_moe"), (16, "fused_moe"), (64, "fused_moe_batched_gemm")])
def test_a_window_goes_row_by_row_and_a_chunk_sorted(longest, op):
    fused, _ = random_experts("qwen3-30B-A3B")
    rows = Dim("rows", min=2 if longest <= 16 else 9, max=longest)
    length = longest - 1 | 1
    given = (
        torch.randn(length, 64, dtype=torch.bfloat16),
        torch.zeros(length, 3, dtype=torch.int64),
        torch.ones(length, 3),
    )
    program = torch.export.export(fused, given, dynamic_shapes=({0: rows},) * 3, strict=False)
    called = [node.target for node in program.graph.nodes if "triton" in str(node.target)]
    assert called == [getattr(torch.ops.triton, op).default]


@pytest.mark.parametrize("name", FUSED)
def test_experts_are_known_by_what_their_gate_computes(name):
    model = skeleton(FAMILIES[name](SIZE).config, 64).model
    rules = [rule.pattern for rule in expert_rules(model)]
    assert sum("gate_up" in pattern for pattern in rules) == FUSED[name]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: nothing is substituted")
def test_a_chunk_is_compiled_without_a_gpu():
    fused, _ = random_experts("qwen3-30B-A3B")
    given = torch.randn(63, 64, dtype=torch.bfloat16), torch.zeros(63, 3, dtype=torch.int64), torch.ones(63, 3)
    rows = Dim("rows", min=9, max=64)
    program = torch.export.export(fused, given, dynamic_shapes=({0: rows},) * 3, strict=False)
    specs = [CudaBackend.generate_method_name_compile_spec("forward"), CompileSpec("low_memory_mode", b"ON")]
    with named_gpu("sm_90"), inductor.patch(OPTIONS), fused_further():
        lowered = to_edge_transform_and_lower(program, partitioner=[CudaPartitioner(specs)])
    calls = [node.target for node in lowered.exported_program().graph.nodes if node.op == "call_function"]
    assert torch.ops.higher_order.executorch_call_delegate in calls
    assert not any("triton" in str(call) for call in calls)
