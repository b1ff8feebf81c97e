"""Decomposing node by node gives the same program as PyTorch, or PyTorch decomposes the program."""

import pytest
import torch
from executorch.exir.debug_handle_utils import get_greatest_ancestor_node_identifier
from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401 - llama::update_cache
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.fx.node import map_arg
from torch.nn import functional as F

from eagle3.export.lowering.edge.decompositions import decomposed
from eagle3.export.lowering.edge.operator_traces import description
from eagle3.export.lowering.xnnpack.quantization import Recipe, quantize

ATEN = torch.ops.aten
ASSERTS = (ATEN._assert_scalar.default, ATEN._assert_tensor_metadata.default)
"""Their messages have the names of nodes; ExecuTorch takes them out."""


def table() -> dict:
    """Return ExecuTorch's decomposition table without the operators that XNNPACK's partitioner keeps."""
    decompositions = torch.export.default_decompositions()
    for kept in (ATEN.linear.default, ATEN.silu.default, ATEN.outer.default):
        decompositions.pop(kept, None)
    return decompositions.materialize()


def traced(model: nn.Module, *given: torch.Tensor) -> ExportedProgram:
    """Export with a dynamic first dimension, the rows."""
    rows = Dim("rows", min=2, max=16)
    model = model.eval().requires_grad_(False)
    with torch.no_grad():
        return torch.export.export(model, given, dynamic_shapes=tuple({0: rows} for _ in given), strict=False)


def described(program: ExportedProgram) -> tuple:
    """Return a program's contents except names: each node's operator, inputs and shape, the nodes that share an
    ancestor, and the program's inputs, outputs and weights."""
    nodes = [node for node in program.graph.nodes if node.target not in ASSERTS]
    number = {node: place for place, node in enumerate(nodes)}
    ancestors: dict[str, int] = {}
    lines = []
    for node in nodes:
        call = map_arg((node.args, node.kwargs), number.__getitem__)
        lines.append((node.op, str(node.target) if node.op == "call_function" else "", repr(call), values(node)))
        if node.op == "call_function":
            lines.append(ancestors.setdefault(ancestor(node), len(ancestors)))
    signature = program.graph_signature
    outputs = [(spec.kind, spec.target) for spec in signature.output_specs]
    inputs = [(spec.kind, spec.target, spec.persistent) for spec in signature.input_specs]
    state = {name: (type(weight), weight) for name, weight in program.state_dict.items()}
    return lines, inputs, outputs, sorted(signature.buffers_to_mutate.values()), state


def values(node: torch.fx.Node) -> list:
    found = node.meta.get("val")
    found = found if isinstance(found, tuple | list) else [found]
    return [description(each) if isinstance(each, torch.Tensor) else str(each) for each in found]


def ancestor(node: torch.fx.Node) -> str:
    return get_greatest_ancestor_node_identifier(node) if node.meta.get("from_node") else node.name


def same(found: tuple, wanted: tuple) -> bool:
    *found, state = found
    *wanted, expected = wanted
    alike = state.keys() == expected.keys() and all(
        state[name][0] is expected[name][0] and torch.equal(state[name][1], expected[name][1]) for name in state
    )
    return found == wanted and alike


class Composites(nn.Module):
    """Operators that decompose to one node, to several, to none, or to a node with several results; an operator that is
    kept; and sizes that are computed twice."""

    def forward(self, x):
        halves = x.unflatten(1, (2, 4)).flatten(0, 1)
        left, right = x.chunk(2, dim=-1)
        gate, up, rest = x.split([3, 3, 2], dim=-1)
        flat = left.unflatten(-1, (2, 2)).flatten(1) * torch.outer(right[:, 0], torch.ones(4))
        mask = torch.zeros_like(flat).masked_fill(flat.to(torch.float32) > 0, float("-inf"))
        total = F.softplus(gate) * up.contiguous() + rest.sum(-1, keepdim=True) + torch.arange(3)
        counted = torch.arange(8) + x.new_zeros(x.shape[0] * 2)[: 2 * x.shape[0], None].repeat(1, 8)
        return flat + mask.softmax(-1), total, x.reshape(-1), halves, counted, torch.ger(x[:, 0], x[0])


class Caches(nn.Module):
    """Buffers that change, some of them twice, and are read whole and through views from before and after the
    change."""

    def __init__(self):
        super().__init__()
        for name in ("key", "value", "other"):
            self.register_buffer(name, torch.zeros(1, 32, 2, 4), persistent=name != "value")

    def forward(self, x, positions):
        start = positions[0].item()
        torch._check(start >= 0)
        torch._check(start + positions.shape[0] <= 32)
        before, whole = self.key.transpose(1, 2), self.other.flatten(2)
        row = x.view(1, -1, 2, 4)
        torch.ops.llama.update_cache(row, self.key, start)
        torch.ops.llama.update_cache(row * 2, self.value, start)
        first = before.sum() + self.key.select(1, 0).unsqueeze(0).sum()
        torch.ops.llama.update_cache(row * 3, self.key, start)
        return first + before.sum(), self.key.flatten(2) @ whole.transpose(1, 2), self.value.sum() + 2 * x.shape[0]


class States(nn.Module):
    """Buffers that are written whole, one of them twice, with reads and views from before, between and after."""

    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(1, 4, 8))
        self.register_buffer("saved", torch.zeros(1, 4, 8), persistent=False)
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x, positions):
        start = positions[0].item()
        torch._check(start >= 0)
        before, old = self.state.flatten(1), self.saved * 2
        self.state.copy_(x.sum(0).expand(1, 4, 8) + old)
        self.count.copy_(positions[-1:] + 1)
        between = self.state.flatten(1) + before
        self.state.copy_(torch.where(positions[0] > 0, self.state * 3, self.state))
        self.saved.copy_(self.state.clone())
        self.total.add_(x.sum(0))
        after = self.state.transpose(1, 2).sum(-1)
        return between, after, self.count.to(x.dtype), x * -start, self.saved[:, 1:] * 2, self.total * 2


class Slices(nn.Module):
    """Values of which parts are written, with views from before and after."""

    def forward(self, x):
        y = x * 2
        before = y.view(-1, 2, 4)[:, 1]
        y[..., 1:6:3] = x[..., 1:6:3]
        between = y.sum(-1, keepdim=True)
        y[1:2] = between[1:2]
        freqs = torch.cos(x.expand(3, -1, -1) * 2)
        first = freqs[0]  # as in the rotary embedding of Qwen 3.5
        first[..., 1:5:3] = freqs[1, ..., 1:5:3]
        filled = x.new_empty(x.shape[0], 3, 8)
        filled[..., :5], filled[..., 5:] = y[:, None, :5], x[:, None, :1]
        return before + 1, y * 3, between, filled.transpose(1, 2), torch.cat((first, first), -1)


class InPlace(nn.Module):
    """Values that change in place, with views from before and after the change."""

    def forward(self, x):
        y = x * 3
        before = y[:, 1:].detach()
        y *= x
        after = y.detach()
        y += after.sum(-1, keepdim=True)
        return y, before * 2, y.unflatten(-1, (2, 4)).transpose(1, 2), after


class Linears(nn.Module):
    """Quantized linears with and without a bias, in modules whose order differs from that of their buffers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 32)
        self.second = nn.ModuleDict({"down": nn.Linear(32, 8, bias=False), "norm": nn.LayerNorm(8)})
        self.third = nn.Embedding(4, 8)
        self.second.register_buffer("scale", torch.ones(8))
        self.third.register_buffer("late", torch.ones(1), persistent=False)
        quantize(self, Recipe("8da8w", "none", 0), spare=set())

    def forward(self, x):
        y = self.second["norm"](self.second["down"](F.silu(self.first(x))) * self.second.scale)
        return y + self.third(x[:, 0].to(torch.int64) % 4) * self.third.late


CASES = {
    "composites": (Composites, torch.randn(5, 8)),
    "caches": (Caches, torch.randn(5, 8), torch.arange(5)),
    "states": (States, torch.randn(5, 8), torch.arange(5)),
    "slices": (Slices, torch.randn(5, 8)),
    "in place": (InPlace, torch.randn(5, 8)),
    "linears": (Linears, torch.randn(5, 8)),
}


@pytest.mark.first(1)
@pytest.mark.parametrize("name", CASES)
def test_decomposing_node_by_node_gives_pytorchs_program(name):
    model, *given = CASES[name]
    program = traced(model(), *given)
    found = decomposed(program, table())
    assert found is not None
    assert same(described(found), described(program.run_decompositions(table())))
    for got, wanted in zip(found.module()(*given), model()(*given), strict=True):
        torch.testing.assert_close(got, wanted, equal_nan=True)


class PartChanged(nn.Module):
    def forward(self, x):
        y = x * 2
        y[:, 1] += 1
        return y


class Lifted(nn.Module):
    def forward(self, x):
        return x + torch.ops.aten.lift_fresh_copy(x[0])


class DecomposedInPlace(nn.Module):
    def forward(self, x):
        y = x * 2
        y.masked_fill_(x > 0, 1.0)
        return y


class OfAnotherType(nn.Module):
    def forward(self, x):
        y = x * 2
        y += x.to(torch.float64)
        return y


class InputChanged(nn.Module):
    def forward(self, x):
        x.add_(1)
        return x * 2


class OfHigherOrder(nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))


class Constant(nn.Module):
    def forward(self, x):
        return x + torch.tensor([1.0] * 8)


LEFT = (
    PartChanged,
    Lifted,
    DecomposedInPlace,
    OfAnotherType,
    InputChanged,
    OfHigherOrder,
    Constant,
)


@pytest.mark.first(1)
@pytest.mark.parametrize("model", LEFT)
def test_programs_that_need_a_whole_trace_are_left_to_pytorch(model):
    program = traced(model(), torch.randn(5, 8))
    assert decomposed(program, table()) is None
    assert program.run_decompositions(table()) is not None  # PyTorch accepts the program
