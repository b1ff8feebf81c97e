"""The steps that an export skips in ExecuTorch's lowering to save time change no bit of the program."""

from contextlib import nullcontext
from typing import final

import pytest
import torch
import torch._export.utils as _export_utils
from executorch.backends.aoti.aoti_partitioner import AotiPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.passes.remove_mixed_type_operators import RemoveMixedTypeOperators
from executorch.exir.passes.replace_aten_with_edge_pass import OpReplacePass
from executorch.exir.passes.scalar_to_tensor_pass import ScalarToTensorPass
from executorch.runtime import Runtime
from torch import nn
from torch.export import Dim, decomp_utils, exported_program
from torch.nn import functional as F

from eagle3.export.lowering.edge import replays
from eagle3.export.lowering.xnnpack import lowering, shortcuts, weight_names
from eagle3.export.lowering.xnnpack.bookkeeping import code_on_call
from eagle3.export.lowering.xnnpack.quantization import Recipe, quantize

ROWS = Dim("rows", min=1, max=16)


class Attention(nn.Module):
    """A module with the operations that occur in methods and that passes change: caches, views, casts, masks, scalars,
    an activation after a linear, a long concatenation, a sum of two dtypes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.out = (nn.Linear(64, 64, bias=False) for _ in range(3))
        self.register_buffer("cache", torch.zeros(1, 32, 4, 16))

    def forward(self, x, positions):
        start = positions[0].item()
        torch._check(start >= 0)
        torch._check(start + positions.shape[0] <= 32)
        key = self.k(x * 2).view(1, -1, 4, 16)
        torch.ops.llama.update_cache(key, self.cache, start)
        scores = self.q(x).view(1, -1, 4, 16).transpose(1, 2) @ self.cache.permute(0, 2, 3, 1) / 4
        masked = torch.arange(32)[None] > positions[:, None]
        mask = torch.zeros_like(masked, dtype=torch.float32).masked_fill(masked, float("-inf"))
        read = (scores + mask).softmax(-1) @ self.cache.transpose(1, 2)
        out = F.relu(self.out(read.transpose(1, 2).flatten(2)))
        angles = torch.outer(positions.float(), torch.arange(8).to(torch.float32)) + positions[:, None]
        return torch.cat([out, x, out, x, out, x, angles.cos()[None]], dim=-1), out + positions[None, :, None]


def programs(recipe: Recipe) -> dict[str, torch.export.ExportedProgram]:
    """Export a program of many rows and one of one row, with the same weights."""
    model = Attention().eval().requires_grad_(False)
    quantize(model, recipe, spare=set())
    given = torch.randn(1, 5, 64), torch.arange(5)
    dynamic = ({1: ROWS}, {0: ROWS})
    return {
        "many": torch.export.export(model, given, dynamic_shapes=dynamic, strict=False),
        "one": torch.export.export(model, (given[0][:, :1], given[1][:1]), strict=False),
    }


@pytest.mark.whole
def test_the_lowered_program_is_the_same_without_any_shortcut(monkeypatch):
    recipe = Recipe("8da4w", "none", 32)
    found = lowering.lower(programs(recipe), {}).buffer
    for name in ("repeated_alone", "code_on_call", "collected_rarely"):
        monkeypatch.setattr(lowering, name, lambda **_: nullcontext())
    monkeypatch.setattr(shortcuts, "_may_change", lambda *_: True)
    monkeypatch.setattr(weight_names, "_memory", lambda weight: object())
    assert lowering.lower(programs(recipe), {}).buffer == found


@pytest.mark.whole
def test_a_weight_shared_by_two_methods_is_packed_once(monkeypatch):
    packed = []
    naming = weight_names.original(weight_names.NAMING)

    def counted(*given):
        packed.append(given)
        return naming(*given)

    monkeypatch.setattr(weight_names, "original", lambda name: counted)
    lowering.lower(programs(Recipe("8da8w", "none", 0)), {})
    weights = [given for given in packed if getattr(given[6], "scale", None) is not None and not given[6].is_dynamic]
    assert len(weights) == 3


class Related(nn.Module):
    """Linears with equal scales and different codes, and with equal codes in the same memory and different scales."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.turned, self.doubled = (nn.Linear(64, 32, bias=False) for _ in range(3))
        self.first.weight.data = torch.randint(-100, 100, (32, 64)).float()  # so that sums are exact in any order
        self.turned.weight.data = self.first.weight.data.flip(1)
        self.requires_grad_(False)
        quantize(self, Recipe("8da8w", "none", 0), spare=set())
        weight = self.first.weight
        parts = [getattr(weight, name) for name in (*weight.tensor_data_names, *weight.tensor_attribute_names)]
        self.doubled.weight = nn.Parameter(type(weight)(parts[0], 2 * parts[1], *parts[2:]), requires_grad=False)

    def forward(self, x):
        return self.first(x) + self.turned(x) * self.doubled(x)


def test_weights_with_equal_codes_or_scales_are_packed_separately(monkeypatch):
    model, x = Related(), torch.randn(1, 3, 64)
    assert torch.equal(model.first.weight.scale, model.turned.weight.scale)
    found = lowering.lower({"forward": torch.export.export(model, (x,), strict=False)}, {}).buffer
    (ran,) = Runtime.get().load_program(found).load_method("forward").execute((x,))
    torch.testing.assert_close(ran, model(x), rtol=1e-3, atol=1e-2)
    monkeypatch.setattr(weight_names, "_memory", lambda weight: object())  # no weight counts as already packed
    assert lowering.lower({"forward": torch.export.export(model, (x,), strict=False)}, {}).buffer == found


@final
class TakesEverything(BackendDetails):
    """A backend that delegates a whole program with the buffers that it changes, as CUDA's does."""

    @staticmethod
    def preprocess(_program, _specs) -> PreprocessResult:
        return PreprocessResult(processed_bytes=b"")


class Running(nn.Module):
    """Two running sums that persist between calls, and three outputs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(8))
        self.register_buffer("squares", torch.zeros(8))

    def forward(self, x):
        self.total.add_(x)
        self.squares.add_(x * x)
        return x * self.total, self.squares.sum(), x + 1


@pytest.mark.parametrize("context", [nullcontext, lambda: replays.repeated_alone(decompose_by_node=False)])
def test_a_delegate_returns_no_buffer_that_it_changes(context):
    with context():
        program = torch.export.export(Running(), (torch.ones(8),), strict=False)
        partitioner = [AotiPartitioner("TakesEverything", [CompileSpec("method", b"forward")])]
        lowered = to_edge_transform_and_lower(program, partitioner=partitioner)
        plan = lowered.to_executorch().executorch_program.execution_plan[0]
    (call,) = plan.chains[0].instructions
    assert len(call.instr_args.args) == 1 + 3
    assert [plan.values[place].val.sizes for place in plan.outputs] == [[8], [], [8]]


class Sum(nn.Module):
    def forward(self, x, y):
        return (x + y) * x


class Joined(nn.Module):
    def forward(self, x):
        return torch.cat([x, x]).exp()


def decomposed(model: nn.Module, *given: torch.Tensor) -> torch.fx.GraphModule:
    return torch.export.export(model, given).run_decompositions().graph_module


def shapes(graph_module: torch.fx.GraphModule) -> list[list[int]]:
    return [list(node.meta["val"].shape) for node in graph_module.graph.nodes if node.op == "call_function"]


def test_a_pass_without_changes_returns_the_same_graph_and_one_with_changes_a_new_graph():
    with replays.repeated_alone(decompose_by_node=True):
        graph_module = decomposed(Sum(), torch.ones(2), torch.ones(2))
        assert RemoveMixedTypeOperators()(graph_module).graph_module is graph_module
        graph_module = decomposed(Sum(), torch.ones(2), torch.ones(2, dtype=torch.int32))
        found = RemoveMixedTypeOperators()(graph_module).graph_module
    assert found is not graph_module
    assert [node.target for node in found.graph.nodes].count(torch.ops.aten._to_copy.default) == 1


def test_a_node_edited_in_place_and_its_successors_are_computed_again():
    with replays.repeated_alone(decompose_by_node=True):
        graph_module = decomposed(Joined(), torch.ones(2))
        (cat,) = (node for node in graph_module.graph.nodes if node.target is torch.ops.aten.cat.default)
        cat.args = ([cat.args[0][0]] * 3,)  # its value keeps the shape [4], as after ExecuTorch's passes
        found = ScalarToTensorPass()(graph_module).graph_module
        assert shapes(graph_module) == [[4], [4]] and shapes(found) == [[6], [6]]
        assert ScalarToTensorPass()(found).graph_module is found


def test_values_are_reused_if_a_pass_repeats_their_computation(monkeypatch):
    monkeypatch.setattr(replays, "_is_alike", lambda *_: False)
    with replays.repeated_alone(decompose_by_node=True):
        graph_module = decomposed(Joined(), torch.ones(2))
        found = OpReplacePass()(graph_module).graph_module
    values = [[node.meta.get("val") for node in each.graph.nodes][:-1] for each in (graph_module, found)]
    assert len(values[0]) == 3 and all(before is after for before, after in zip(*values, strict=True))
    assert [node.target for node in found.graph.nodes] != [node.target for node in graph_module.graph.nodes]


def test_a_graphs_code_is_generated_at_its_first_call_and_after_each_change():
    with code_on_call():
        graph_module = decomposed(Joined(), torch.ones(2))
        assert torch.equal(graph_module(torch.zeros(2))[0], torch.ones(4))
        (cat,) = (node for node in graph_module.graph.nodes if node.target is torch.ops.aten.cat.default)
        cat.args = ([cat.args[0][0]] * 3,)
        graph_module.recompile()
        assert torch.equal(graph_module(torch.zeros(2))[0], torch.ones(6))
        cat.args = ([cat.args[0][0]] * 4,)
        graph_module.recompile()
    assert torch.equal(graph_module(torch.zeros(2))[0], torch.ones(8))


def test_the_operators_that_a_decomposition_may_keep_are_those_of_pytorch_and_listed_anew_by_each_call(monkeypatch):
    queries, query = [], torch._C._dispatch_get_registrations_for_dispatch_key
    monkeypatch.setattr(
        torch._C, "_dispatch_get_registrations_for_dispatch_key", lambda key: queries.append(key) or query(key)
    )
    with torch.library._scoped_library("eagle3_listed", "DEF") as library:
        for name in ("first", "second"):  # the second is defined after a list was made
            library.define(f"{name}(Tensor x) -> Tensor")
            library.impl(name, lambda x: x + 1, "CompositeImplicitAutograd")
            expected = _export_utils._collect_all_valid_cia_ops()
            with replays.repeated_alone(decompose_by_node=True):
                for module in (exported_program, decomp_utils):
                    queries.clear()
                    assert module._collect_all_valid_cia_ops() == expected
                    assert len(queries) == 1
            assert getattr(torch.ops.eagle3_listed, name).default in expected
    assert exported_program._collect_all_valid_cia_ops is _export_utils._collect_all_valid_cia_ops
