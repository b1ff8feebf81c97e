"""Gives the used slots of a KV cache as a tensor that shares the cache's memory.

ExecuTorch has no views of a part of a tensor, and a slice copies it. Here the part is a tensor of dynamic length that
the memory plan places at the cache's address. While a program is traced and lowered it is ``used_slots``; in the
finished program it is ``aten::empty``, which sets a tensor's length and writes nothing. All of ExecuTorch's runners can
run that. The contents of such a tensor depend on the order of operations, as for every cache: its node stays after the
write that precedes it in the trace.
"""

from typing import NamedTuple

import torch
from executorch.exir import ExecutorchBackendConfig
from executorch.exir.dialects._ops import ops as exir_ops
from executorch.exir.pass_base import PassBase, PassResult
from executorch.exir.passes import MemoryPlanningPass
from executorch.exir.tensor import TensorSpec
from torch import Tensor
from torch.export.graph_signature import ExportGraphSignature
from torch.fx import GraphModule, Node

PLACE = "eagle3_place"
"""The key in a node's ``meta`` for the name of its cache and the number of the head."""


@torch.library.custom_op("eagle3::used_slots", mutates_args=())
def used_slots(cache: Tensor, head: int, count: int) -> Tensor:
    """Return a copy of the first ``count`` slots of one head of a cache [kv_heads, slots, 1, head_dim], as [1, count,
    head_dim]."""
    return cache[head : head + 1, :count, 0].clone()


@used_slots.register_fake
def _(cache: Tensor, head: int, count: int) -> Tensor:  # noqa: ARG001 - as in the operator
    return cache.new_empty(1, count, cache.shape[-1])


class InPlace(PassBase):
    """Replaces every ``used_slots`` by an empty tensor of the same length, and records the cache and head for the
    memory plan."""

    def call(self, graph_module: GraphModule) -> PassResult:
        graph, changed = graph_module.graph, False
        for node in list(graph.nodes):
            if node.target is not exir_ops.edge.eagle3.used_slots.default:
                continue
            cache, head, count = node.args
            if not isinstance(cache, Node) or cache.op != "placeholder":
                raise RuntimeError(f"{node} reads {cache}, which is not a cache of the program")
            with graph.inserting_before(node):
                sizes = [1, count, node.meta["val"].shape[2]]
                empty = graph.call_function(exir_ops.edge.aten.empty.memory_format, (sizes,))
            empty.meta = node.meta | {PLACE: (cache.name, head)}
            node.replace_all_uses_with(empty)
            graph.erase_node(node)
            changed = True
        graph_module.recompile()
        return PassResult(graph_module, changed)


class Placed(NamedTuple):
    """A tensor that shares the memory of one head of a cache."""

    tensor: TensorSpec
    cache: TensorSpec
    head: int

    def settle(self) -> None:
        """Set the tensor's place in memory, after the cache has got one. Its largest length is set to the cache's,
        since ExecuTorch's bound is larger: the sum of the largest start and the most rows."""
        heads, slots, _, width = self.cache.shape
        self.tensor.shape = [1, min(self.tensor.shape[1], slots), width]
        self.tensor.mem_id = self.cache.mem_id
        self.tensor.mem_offset = self.cache.mem_offset + self.head * self.cache.nbytes() // heads


class CachesInPlace(MemoryPlanningPass):
    """ExecuTorch's memory plan. It places the tensors that ``InPlace`` made inside their caches."""

    def __init__(self) -> None:
        super().__init__(alloc_graph_input=False, share_mutable_buffers=True)
        self.placed: list[Placed] = []

    def run(self, graph_module: GraphModule, graph_signature: ExportGraphSignature | None = None) -> PassResult:
        named = {node.name: node for node in graph_module.graph.nodes}
        placed = [
            Placed(node.meta["spec"], named[cache].meta["spec"], head)
            for node in named.values()
            if PLACE in node.meta and node.op == "call_function" and "spec" in node.meta
            for cache, head in [node.meta[PLACE]]
        ]
        for each in placed:  # a constant gets no memory from the plan
            each.tensor.const = True
        result = super().run(graph_module, graph_signature)
        for each in placed:
            each.tensor.const = False
        self.placed += placed
        return result

    def run_multimethod(self) -> None:
        """Place the caches, which all methods share, and then the tensors inside them."""
        super().run_multimethod()
        for each in self.placed:
            each.settle()


def planned() -> ExecutorchBackendConfig:
    """Return the ``ExecutorchBackendConfig`` for ``to_executorch``."""
    return ExecutorchBackendConfig(
        passes=[InPlace()], memory_planning_pass=CachesInPlace(), emit_mutable_buffer_names=True
    )
