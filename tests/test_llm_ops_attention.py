"""Attention on the CPU, lowered and run: softcaps and sinks as the eager reference has them, rings and rewrites too."""

import pytest
import torch
from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.exir.passes import MemoryPlanningPass
from executorch.runtime import Runtime
from torch import nn
from torch.export import Dim

from eagle3.export.lowering.xnnpack.attention import LlmOpsAttention
from eagle3.export.lowering.xnnpack.shortcuts import LinearsKept
from eagle3.targets.attention import EagerAttention, KVCacheShape

HEADS, KV_HEADS, DIM, SLOTS = 4, 2, 16, 48
SCALE = 0.3


class Layer(nn.Module):
    def __init__(self, kind, window: int, chunked: bool, softcap: float | None, sinks: bool):
        super().__init__()
        self.attention = kind(KVCacheShape(KV_HEADS, DIM, SLOTS, window, sinks=sinks, chunked=chunked))
        self.softcap = softcap
        self.sinks = nn.Parameter(torch.tensor([0.5, -2.0, 3.0, 1.0]), requires_grad=False) if sinks else None

    def forward(self, query, key, value, input_pos):
        rows = self.attention.rows(input_pos)
        return self.attention(query, key, value, rows, SCALE, softcap=self.softcap, sinks=self.sinks)


def inputs(start: int, length: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, length, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return *(torch.randn(shape, generator=generator) for shape in shapes), torch.arange(start, start + length)


@pytest.mark.parametrize(
    ("window", "chunked", "softcap", "sinks"),
    [(0, False, None, True), (8, False, None, True), (8, True, 2.0, True)],
)
def test_softcaps_and_sinks_are_those_of_the_eager_reference(window, chunked, softcap, sinks, tmp_path):
    arguments = window, chunked, softcap, sinks
    rows = Dim("rows", min=1, max=8)
    dynamic = ({1: rows}, {1: rows}, {1: rows}, {0: rows})
    program = torch.export.export(
        Layer(LlmOpsAttention, *arguments), inputs(0, 5, 0), dynamic_shapes=dynamic, strict=False
    )
    lowered = to_edge_transform_and_lower(program, partitioner=[LinearsKept()]).to_executorch(
        ExecutorchBackendConfig(memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False))
    )
    (tmp_path / "layer.pte").write_bytes(lowered.buffer)
    method = Runtime.get().load_program(tmp_path / "layer.pte").load_method("forward")
    eager = Layer(EagerAttention, *arguments)
    walk = [(0, 8), (8, 8), (16, 1), (17, 8), (25, 4), (26, 2), (28, 8), (36, 8)]  # 26: some of 25 to 28 were wrong
    for seed, (start, length) in enumerate(walk):
        given = inputs(start, length, seed)
        torch.testing.assert_close(method.execute(given)[0], eager(*given), atol=1e-5, rtol=1e-5)
