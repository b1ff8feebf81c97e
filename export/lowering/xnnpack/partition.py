"""The partitioner, which chooses the operations of each delegate so that there are as few delegates as possible.

ExecuTorch 1.5 merges the operations that XNNPACK takes pair by pair. It looks for cycles through operations that
XNNPACK does not take, but not for cycles through other delegates. With one row of attention with a softcap, two
delegates would wait for each other, and the lowering would end with "Invalid partition, found dependency cycles". Here,
the delegates are levels: an operation's level is the number of alternations, on the longest path before it, between
operations that XNNPACK takes and others. So no delegate waits for a later one, and the number of delegates is that of
the longest chain of alternations.

ExecuTorch's partitioner also leaves out every slice of a tensor with a dynamic dimension, which ends a delegate.
XNNPACK takes such a slice: ExecuTorch writes the dimension's upper bound as the size of the slice, and XNNPACK cuts it
to the actual size when the delegate runs. The partitioner also leaves out operations with a data-dependent dimension,
such as the number of used slots of a cache, although XNNPACK takes those as well.
"""

from collections import defaultdict

from executorch.backends.xnnpack.partition.config import ALL_PARTITIONER_CONFIGS
from executorch.backends.xnnpack.partition.config.generic_node_configs import SliceCopyConfig
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.fx.passes.infra.partitioner import Partition

from eagle3.export.patching.patches import replaced

_UNBACKED = "executorch.backends.xnnpack.partition.config.xnnpack_config.has_free_unbacked_symbols"


class SliceConfig(SliceCopyConfig):
    """Accepts slices with step 1 along a fixed dimension whose result is not empty."""

    def check_constraints(self, node: Node, ep: ExportedProgram) -> bool:
        (source, dim), step = node.args[:2], node.args[4] if len(node.args) > 4 else 1
        shapes = source.meta["val"].shape, node.meta["val"].shape
        fixed = all(isinstance(shape[dim], int) for shape in shapes)
        filled = all(size for shape in shapes for size in shape if isinstance(size, int))
        return self.check_common_constraints(node, ep) and fixed and filled and step == 1


CONFIGS = [SliceConfig if config is SliceCopyConfig else config for config in ALL_PARTITIONER_CONFIGS]


class LevelPartitioner(XnnpackPartitioner):
    """XNNPACK's partitioner with levels. It keeps all linears undecomposed without a check of each, which saves one
    decomposition of the graph."""

    def __init__(self) -> None:
        super().__init__(configs=CONFIGS)

    def ops_to_not_decompose(self, ep: ExportedProgram) -> tuple[list[OpOverload], None]:
        ops, _ = super().ops_to_not_decompose(ep)
        return ops, None

    def generate_partitions(self, ep: ExportedProgram) -> list[Partition]:
        with replaced(_UNBACKED, lambda _value: False):
            groups = self.get_matched_nodes_from_configs(ep)
        delegates: dict[int, list[Node]] = defaultdict(list)
        for group, level in zip(groups, levels(ep.graph, groups), strict=True):
            delegates[level] += group
        return [Partition(id=level, nodes=nodes) for level, nodes in delegates.items()]


def levels(graph: Graph, groups: list[list[Node]]) -> list[int]:
    """Return the level of each group of operations. Groups are parts of delegates and have even levels; operations
    outside delegates have odd levels.

    Raises RuntimeError for a group that waits for itself.
    """
    group_of = {node: index for index, group in enumerate(groups) for node in group}
    found, level = [0] * len(groups), dict.fromkeys(graph.nodes, -1)
    settled = False
    # the operations of a group need not be adjacent, and all of them wait for the inputs of the last one
    while not settled:
        settled = True
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                continue
            before, index = max((level[each] for each in node.all_input_nodes), default=-1), group_of.get(node)
            if index is None:
                level[node] = before + (before % 2 == 0)
                continue
            level[node] = max(before + before % 2, found[index])
            if level[node] > 2 * len(groups):
                raise RuntimeError(f"{node} would be in a delegate that waits for itself")
            settled = settled and level[node] == found[index]
            found[index] = level[node]
    return found
