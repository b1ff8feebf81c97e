"""Fused experts read only the chosen ones, and give the numbers of dequantized weights, by the kernels in Triton's
interpreter and by the references."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import triton.experimental.gluon.language  # noqa: F401  (it copies the library while that is not interpreted)
from cuda_lowered import lowered
from machine_code.runtime_symbols import lacking
from random_checkpoints import FAMILIES, SIZE
from torch import nn
from torch.export import Dim
from torch.nn import functional as F
from torchao.quantization import IntxUnpackedToInt8Tensor
from triton.runtime import Autotuner
from triton.runtime.interpreter import InterpretedFunction
from triton_interpreter import interpreted

from eagle3.export.lowering.cuda.kernels import (
    choices,
    int4_experts,
    int8_experts,
    small_m,
    sorted_experts,
    sums,
)
from eagle3.export.lowering.cuda.kernels.int4.tiles import kernel as int4
from eagle3.export.lowering.cuda.kernels.sums import GELU_TANH, SILU
from eagle3.export.lowering.cuda.weights import experts as fused
from eagle3.export.lowering.cuda.weights.quantization import check_recipe, fitted_recipe, quantize
from eagle3.runner.artifact.cuda_library import read_library
from eagle3.targets.decoder_layers import skeleton
from eagle3.targets.experts import Experts

FUSED = {"qwen3-30B-A3B": 6, "llama4-scout": 6, "llama4-maverick": 3, "gpt-oss-20b": 0, "gemma4-26B-A4B": 6}
"""The layers with such experts."""
NAMES = [name for name, count in FUSED.items() if count]


def by_interpreter(kernel):
    """Return a replacement for ``wrap_triton`` that runs a kernel on host tensors, with the first configuration if it
    is autotuned."""
    if not isinstance(kernel, Autotuner):
        return kernel  # interpreted already
    run, chosen = InterpretedFunction(kernel.fn.fn), kernel.configs[0].kwargs

    class Grids:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: run[grid](*args, **kwargs, **chosen)

    return Grids()


@contextmanager
def by_kernels():
    """Compute experts by the kernels, in Triton's interpreter, instead of the references."""
    few, many = int4_experts.int4_experts_small_m._init_fn, sorted_experts.sorted_experts_matmul._init_fn
    int8 = int8_experts.int8_experts_small_m._init_fn
    with (
        interpreted(sums, small_m, int4, choices, int4_experts, int8_experts),
        mock.patch.object(int8_experts, "wrap_triton", by_interpreter),
        mock.patch.object(fused, "int8_experts_small_m", int8),
        mock.patch.object(int4_experts, "wrap_triton", by_interpreter),
        mock.patch.object(sorted_experts, "wrap_triton", by_interpreter),
        mock.patch.object(fused, "int4_experts_small_m", few),
        mock.patch.object(sorted_experts, "sorted_experts_matmul", many),
    ):
        yield


def random_experts(family: str) -> tuple[Experts, Experts]:
    """Return the experts of a family's layer with random weights in the recipe's INT4, and with these weights
    dequantized."""
    torch.manual_seed(3)
    config = FAMILIES[family](SIZE | {"num_hidden_layers": 2}).config
    made = []
    for _ in range(2):
        model = skeleton(config, 64).model
        made.append(next(module for module in model.modules() if isinstance(module, Experts)).to_empty(device="cpu"))
    packed, plain = made
    holder = nn.ModuleDict({"experts": packed})
    for parameter in packed.parameters():
        parameter.data = (torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5).to(torch.bfloat16)
    quantize(holder, fitted_recipe("default", config, holder))
    for name in ("gate_up", "down"):
        weight = getattr(packed, name).weight
        int8 = isinstance(weight, IntxUnpackedToInt8Tensor)
        weight = weight.dequantize().float() if int8 else weight.dequantize(torch.float32)
        getattr(plain, name).weight = nn.Parameter(weight, requires_grad=False)
    if not FUSED[family]:
        plain.gate_up.bias.data, plain.down_bias.data = (packed.gate_up.bias.float(), packed.down_bias.float())
    fused.use_fused_experts(holder)
    return holder["experts"], plain


@pytest.mark.first(7)
@pytest.mark.parametrize(
    ("how", "rows", "name"),
    [(nullcontext, 3, name) for name in (*NAMES, "gpt-oss-20b")]
    + [(nullcontext, 20, "qwen3-30B-A3B"), (by_kernels, 3, "qwen3-30B-A3B"), (by_kernels, 20, "llama4-scout")]
    + [(by_kernels, 3, "gpt-oss-20b"), (by_kernels, 20, "gemma4-26B-A4B")],
)
def test_fused_experts_give_the_numbers_of_dequantized_weights(how, rows, name):
    module, plain = random_experts(name)
    assert isinstance(module, fused.FusedExperts if name in NAMES else fused.Int8Experts)
    x = torch.randn(rows, 64).to(torch.bfloat16)
    weights, chosen = torch.randn(rows, plain.count).softmax(-1).topk(2)
    with how(), torch.no_grad():
        found = module(x, chosen, weights)
    expected = plain(x.float(), chosen, weights)
    assert (found.float() - expected).norm() <= 2**-7 * expected.norm()  # bf16 of inputs, products and results


@pytest.mark.parametrize("rows", [3, 20])
def test_choices_and_weights_of_experts_may_have_any_strides(rows):
    module, plain = random_experts("qwen3-30B-A3B")
    x, (weights, chosen) = torch.randn(rows, 64).bfloat16(), torch.randn(rows, plain.count).softmax(-1).topk(2)
    turned = chosen.t().contiguous().t(), weights.t().contiguous().t()
    assert torch.equal(module(x, *turned), module(x, chosen, weights))


def test_experts_with_biases_and_weighted_inputs_are_not_fused():
    """The INT8 kernel applies the routing weight to an expert's output."""
    module, _ = random_experts("gpt-oss-20b")
    holder = nn.ModuleDict({"experts": module.all})
    module.all.weighs_inputs = True
    fused.use_fused_experts(holder)
    assert type(holder["experts"]) is Experts


FEW, MANY = ["int4_experts_small_m"], ["sorted_experts_matmul"] * 2


@pytest.mark.parametrize(("longest", "ops"), [(4, FEW), (16, FEW), (64, MANY)])
def test_a_verify_window_reads_each_expert_once_and_a_chunk_is_sorted_by_expert(longest, ops):
    module, _ = random_experts("qwen3-30B-A3B")
    program = exported(module, 2 if longest <= 16 else 9, longest)
    called = [str(node.target) for node in program.graph.nodes]
    assert [op for op in called if op.startswith("eagle3.")] == [f"eagle3.{op}.default" for op in ops]


def test_a_chunk_beyond_the_expert_kernels_offsets_is_refused():
    module, _ = random_experts("qwen3-30B-A3B")
    most, blocks = 5_592_255, 2**31 // (64 * 128)  # of 64 rows and 128 outputs
    assert [(3 * rows + 64 * 8) // 64 for rows in (most, most + 1)] == [blocks, blocks + 1]
    exported(module, 17, most)
    with pytest.raises(ValueError, match=f"{most + 1} rows that choose 3 .* type --max-prefill {most} or less"):
        exported(module, 17, most + 1)


def inputs(shortest: int, longest: int) -> tuple[tuple, dict]:
    rows, length = Dim("rows", min=shortest, max=longest), min(longest, 64) - 1 | 1
    given = torch.randn(length, 64).bfloat16(), torch.zeros(length, 3, dtype=torch.int64), torch.ones(length, 3)
    return given, {"dynamic_shapes": ({0: rows},) * 3}


def exported(module: nn.Module, shortest: int, longest: int):
    given, dynamic = inputs(shortest, longest)
    return torch.export.export(module, given, strict=False, **dynamic)


@pytest.mark.parametrize("name", FUSED)
def test_experts_are_recognized_by_their_gate(name):
    model = skeleton(FAMILIES[name](SIZE).config, 64).model
    rules = [rule.pattern for rule in fused.expert_rules(model)]
    assert sum("gate_up" in pattern for pattern in rules) == FUSED[name]


@pytest.mark.parametrize("name", NAMES)
def test_experts_of_any_whole_number_of_groups_are_fused(name):
    """The rows of other INT4 weights must be whole blocks of 256."""
    config = FAMILIES[name](SIZE | {"hidden_size": 288, "num_hidden_layers": 2}).config
    model = skeleton(config, 64).model
    check_recipe("--qlinear", "default", model, config)
    recipe = fitted_recipe("default", config, model)
    bits = {linear: recipe.get_config(f"{linear}.weight").bits for linear in fused.fused_linears(model)}
    assert set(bits.values()) == {4}
    assert recipe.get_config("model.layers.0.self_attn.q_proj.weight").bits == 8


GATES = {
    "SiLU": (lambda gate, up: F.silu(gate) * up, SILU),
    "GELU": (lambda gate, up: F.gelu(gate, approximate="tanh") * up, GELU_TANH),
    "exact GELU": (lambda gate, up: F.gelu(gate) * up, None),
    "a gate with a limit": (lambda gate, up: F.silu(gate.clamp(max=7)) * up, None),
    "an up with a limit": (lambda gate, up: F.silu(gate) * up.clamp(min=-7, max=7), None),
    "an up with a high limit": (lambda gate, up: F.silu(gate) * up.clamp(max=900), None),
    "up and gate": (lambda gate, up: F.silu(up) * gate, None),
}


@pytest.mark.parametrize("name", GATES)
def test_an_experts_activation_is_recognized_and_one_with_a_limit_is_distinct(name):
    gate, activation = GATES[name]
    experts = SimpleNamespace(width=32, gate=lambda gate_up: gate(*gate_up.chunk(2, -1)))
    assert fused.activation_of(experts) == activation


@pytest.mark.whole
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: nothing is substituted")
@pytest.mark.parametrize("longest", [16, 64])
def test_fused_experts_compile_without_a_gpu_and_the_bytes_of_a_window_are_counted(longest):
    module, plain = random_experts("gemma4-26B-A4B")
    given, dynamic = inputs(2 if longest <= 16 else 9, longest)
    _, graph = lowered(module, given, rows=1, longest=longest, library=True, **dynamic)
    calls = [str(node.target) for node in graph.edge.exported_program().graph.nodes if node.op == "call_function"]
    assert any("executorch_call_delegate" in call for call in calls)
    assert not any("triton" in call or "eagle3" in call for call in calls)
    library = read_library(graph.library)
    assert lacking(library.needs, library.asks_for) == []
    if longest <= 16:  # one row, which chose three
        held = sum(tensor.nbytes for tensor in module.buffers())
        assert graph.recorded["weight_bytes"] == held * 3 // plain.count
