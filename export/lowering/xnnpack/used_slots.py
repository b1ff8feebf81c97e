"""The slots of a KV cache that hold something, as a tensor without a copy.

ExecuTorch has no views of a part of a tensor, and a slice is a copy of it. Here the part is a tensor of a dynamic
length that the memory plan puts where the cache lies: ``used_slots`` while a program is traced and lowered, and in the
program ``aten::empty``, which sets a tensor's length and writes nothing. Any runner of ExecuTorch's runs that.

The order of the program decides what such a tensor holds, as it does for every cache: its node stays behind the write
that it was traced behind.
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
"""The key in a node's ``meta`` of its cache's name and of the head."""


@torch.library.custom_op("eagle3::used_slots", mutates_args=())
def used_slots(cache: Tensor, head: int, count: int) -> Tensor:
    """Return the first ``count`` slots of a head of a cache [kv_heads, slots, 1, head_dim]: [1, count, head_dim]."""
    return cache[head : head + 1, :count, 0].clone()


@used_slots.register_fake
def _(cache: Tensor, head: int, count: int) -> Tensor:  # noqa: ARG001 - as the operator's
    return cache.new_empty(1, count, cache.shape[-1])


class InPlace(PassBase):
    """Makes every ``used_slots`` a tensor of its length that nothing writes, and notes where it is to lie."""

    def call(self, graph_module: GraphModule) -> PassResult:
        graph, changed = graph_module.graph, False
        for node in list(graph.nodes):
            if node.target is not exir_ops.edge.eagle3.used_slots.default:
                continue
            cache, head, count = node.args
            if not isinstance(cache, Node) or cache.op != "placeholder":
                raise RuntimeError(f"{node} is of {cache}, which is no cache of the program's")
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
    """A tensor's place: a head of a cache."""

    tensor: TensorSpec
    cache: TensorSpec
    head: int

    def settle(self) -> None:
        """Give the tensor its place, once the cache has one. Its longest is the cache's length: the sum of the largest
        start and the most rows, which ExecuTorch takes for it, is more."""
        heads, slots, _, width = self.cache.shape
        self.tensor.shape = [1, min(self.tensor.shape[1], slots), width]
        self.tensor.mem_id = self.cache.mem_id
        self.tensor.mem_offset = self.cache.mem_offset + self.head * self.cache.nbytes() // heads


class CachesInPlace(MemoryPlanningPass):
    """ExecuTorch's memory plan, in which the tensors that ``InPlace`` made lie in their caches."""

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
        for each in placed:  # a constant gets no memory of its own
            each.tensor.const = True
        result = super().run(graph_module, graph_signature)
        for each in placed:
            each.tensor.const = False
        self.placed += placed
        return result

    def run_multimethod(self) -> None:
        """Place the caches, which all methods share, then what lies in them."""
        super().run_multimethod()
        for each in self.placed:
            each.settle()


def planned() -> ExecutorchBackendConfig:
    """Return how a program is finished, for ``to_executorch``."""
    return ExecutorchBackendConfig(
        passes=[InPlace()], memory_planning_pass=CachesInPlace(), emit_mutable_buffer_names=True
    )
