"""XNNPACK's delegates compute repeated values once, and leave out operations without effect."""

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.exir.lowered_backend_module import get_lowered_backend_modules
from executorch.runtime import Runtime
from torch import nn
from transformers.models.llama import modeling_llama
from xnnpack_graph import node_counts

from eagle3.export.lowering.xnnpack.forms import rows_before_heads
from eagle3.export.lowering.xnnpack.lowering import lower, remove_no_ops
from eagle3.export.lowering.xnnpack.quantization import Recipe, quantize
from eagle3.runner.artifact.pte import read_pte
from eagle3.runner.contract import DRAFT_DECODE, METHODS, MODEL_FILE


def nodes_of(pte, method):
    return node_counts(map(pte.delegate_blob, pte.plan(method).delegates))


class Shared(nn.Module):
    """Three linears with one input, after a linear that is called twice, the second time on its own output."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.again, self.q, self.k, self.v = (nn.Linear(64, 64, bias=False) for _ in range(4))

    def forward(self, x):
        x = self.again(self.again(x).cumsum(1))  # no delegate computes this
        return self.q(x) + self.k(x) * self.v(x)


def test_an_input_is_quantized_once_for_all_of_its_linears(tmp_path):
    model, x = Shared().requires_grad_(False), torch.randn(1, 3, 64)
    quantize(model, Recipe("8da8w", "8w", 0), spare=set())
    program = torch.export.export(model, (x,), strict=False)
    lowered = lower({"forward": program}, {})
    file = tmp_path / "model.pte"
    file.write_bytes(lowered.buffer)
    nodes = nodes_of(read_pte(file), "forward")
    assert nodes["FullyConnected"] == 5 and nodes["Convert"] == 3
    (found,) = Runtime.get().load_program(file).load_method("forward").execute((x,))
    torch.testing.assert_close(found, model(x), atol=1e-5, rtol=1e-5)


def test_heads_are_not_transposed_before_rows_and_back(family_exports):
    """The remaining transpositions belong to attention: of queries, keys, values, the scores of two key heads, and the
    result."""
    pte, layers = read_pte(family_exports / "llama3.1-8B" / "out" / MODEL_FILE), 3
    for method in METHODS:
        count = nodes_of(pte, method)["StaticTranspose"]
        assert count <= 6 * (1 if method == DRAFT_DECODE else layers)


def test_rotary_embedding_by_rows_equals_transformers():
    own, (cos, sin) = modeling_llama.apply_rotary_pos_emb, torch.randn(2, 1, 5, 8)
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    with rows_before_heads(nn.Module()):
        for given, dim in (((q, k), 1), ((q.transpose(1, 2), k.transpose(1, 2)), 2)):
            found, expected = modeling_llama.apply_rotary_pos_emb(*given, cos, sin, dim), own(*given, cos, sin, dim)
            assert all(map(torch.equal, found, expected))
    assert modeling_llama.apply_rotary_pos_emb is own


def test_operations_with_an_effect_are_not_removed():
    class Model(nn.Module):
        def forward(self, x, count):
            gone = x.transpose(1, 2).transpose(0, 1) * 1.0
            gone = gone.transpose(-2, -3).transpose(1, 2)
            return gone.transpose(0, 1).transpose(1, 2) * 2.0, count * 1.0, x * x, x * 1.0

    given = torch.randn(2, 3, 4), torch.arange(3)
    program = torch.export.export(Model(), given)
    remove_no_ops(program)
    kept = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert kept == ["aten.transpose.int"] * 2 + ["aten.mul.Tensor"] * 4
    assert all(map(torch.equal, program.module()(*given), Model()(*given)))


class Clamped(nn.Module):
    """A clamp at one end, as gpt-oss clamps its gates."""

    def forward(self, x):
        return x.clamp(max=7.0) * x


def test_an_xnnpack_clamp_with_one_bound_is_read():
    program = torch.export.export(Clamped(), (torch.ones(1, 8),))
    edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    (delegate,) = get_lowered_backend_modules(edge.exported_program().graph_module)
    assert node_counts([delegate.processed_bytes]) == {"Clamp": 1, "Multiply": 1}
