"""XNNPACK delegates are levels of the graph: none depends on a later one, and there are as few as possible."""

import pytest
import torch
from commands import run_command
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.exir.passes import MemoryPlanningPass
from executorch.runtime import Runtime
from family_configs import family_config
from random_checkpoints import save_random_draft
from torch import nn
from torch.fx import Graph
from transformers import AutoModelForCausalLM

from eagle3.export.cli import main as export_main
from eagle3.export.lowering.xnnpack.llm_ops_attention import LlmOpsAttention
from eagle3.export.lowering.xnnpack.lowering import lower
from eagle3.export.lowering.xnnpack.partition import LevelPartitioner, levels
from eagle3.targets.attention import EagerAttention, KVCacheShape

HIDDEN, HEADS, DIM, SLOTS = 32, 2, 16, 24


class SoftcappedLayer(nn.Module):
    """A simplified attention of Gemma 2, in which a product with one constant rotates queries and keys."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.projections = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.register_buffer("rotation", torch.randn(DIM, DIM))
        self.attention = kind(KVCacheShape(HEADS, DIM, SLOTS, 8))
        self.requires_grad_(False)

    def forward(self, x, input_pos):
        query, key, value = (linear(x).unflatten(-1, (HEADS, DIM)) for linear in self.projections[:3])
        query, key = (each + nn.functional.linear(each, self.rotation) for each in (query, key))
        out = self.attention(query, key, value, self.attention.rows(input_pos), 0.25, softcap=2.0)
        return x + self.projections[3](out.flatten(2))


def a_step(partitioner: XnnpackPartitioner):
    given = torch.randn(1, 1, HIDDEN), torch.tensor([0])
    program = torch.export.export(SoftcappedLayer(LlmOpsAttention), given, strict=False)
    return to_edge_transform_and_lower(program, partitioner=[partitioner])


def test_executorchs_own_delegates_of_softcapped_attention_depend_on_each_other():
    """LevelPartitioner can be removed when ExecuTorch's own delegates no longer do this."""
    with pytest.raises(AssertionError, match="dependency cycles"):
        a_step(XnnpackPartitioner())


@pytest.mark.whole
def test_a_lowered_step_of_softcapped_attention_equals_the_eager_one(tmp_path):
    edge = a_step(LevelPartitioner())
    plan, file = MemoryPlanningPass(alloc_graph_input=False), tmp_path / "step.pte"
    file.write_bytes(edge.to_executorch(ExecutorchBackendConfig(memory_planning_pass=plan)).buffer)
    method, eager = Runtime.get().load_program(file).load_method("forward"), SoftcappedLayer(EagerAttention)
    for position in range(SLOTS):
        given = torch.randn(1, 1, HIDDEN), torch.tensor([position])
        torch.testing.assert_close(method.execute(given)[0], eager(*given), atol=1e-5, rtol=1e-5)


def test_softcapped_attention_is_lowered_with_and_without_decode(tmp_path):
    model = AutoModelForCausalLM.from_config(family_config("gemma2"))
    model.save_pretrained(tmp_path / "target")
    save_random_draft(tmp_path / "draft", model.config, (0, 1, 2))
    paths = ("--checkpoint", tmp_path / "target", "--draft", tmp_path / "draft", "--output-dir", tmp_path / "out")
    asked = ("--target-model", "auto", "--backend", "xnnpack", "--dry-run", *paths)
    assert run_command(export_main, *asked)
    assert run_command(export_main, *asked, "--with-decode")


def test_a_group_of_operations_is_at_the_level_of_its_last_input():
    graph = Graph()
    x = graph.placeholder("x")
    left_out = graph.call_function(torch.sin, (x,))
    first = graph.call_function(torch.relu, (x,))
    alone = graph.call_function(torch.relu, (left_out,))
    between = graph.call_function(torch.sin, (first,))
    second = graph.call_function(torch.relu, (between,))
    with_second = graph.call_function(torch.relu, (alone,))
    behind = graph.call_function(torch.relu, (with_second,))
    graph.output((behind, second))
    assert levels(graph, [[first], [alone], [second], [with_second], [behind]]) == [0, 0, 2, 0, 0]
    assert levels(graph, [[first], [alone], [second, with_second], [behind]]) == [0, 0, 2, 2]


def test_a_group_that_depends_on_itself_causes_no_endless_loop():
    graph = Graph()
    first = graph.call_function(torch.relu, (graph.placeholder("x"),))
    second = graph.call_function(torch.relu, (graph.call_function(torch.sin, (first,)),))
    graph.output(second)
    with pytest.raises(RuntimeError, match="relu.* waits for itself"):
        levels(graph, [[first, second]])


class Sliced(nn.Module):
    """Returns [1, T, 4] from slices of x [1, T, 12] at the front, the middle and the end, and its last row [1, 1,
    12]."""

    def forward(self, x):
        x = x * x
        return x[..., :4] * x[..., 5:9] + x[..., -4:], 2 * x[:, -1:]


def test_slices_of_columns_with_dynamic_rows_stay_in_a_delegate_and_slices_of_rows_do_not():
    given = torch.randn(1, 5, 12)
    rows = {1: torch.export.Dim("rows", min=2, max=9)}
    program = torch.export.export(Sliced(), (given,), dynamic_shapes=(rows,), strict=False)
    made = lower({"forward": program}, {})
    left = [str(node.target) for node in made.exported_program().graph.nodes if node.op == "call_function"]
    assert sum("slice" in target for target in left) == 1
    loaded = Runtime.get().load_program(made.buffer)  # ``loaded`` holds the method's bytes
    method = loaded.load_method("forward")
    for count in (5, 2, 9, 3):
        given = torch.randn(1, count, 12)
        for found, expected in zip(method.execute((given,)), Sliced()(given), strict=True):
            assert torch.allclose(found, expected, atol=1e-6)
