"""The partitioner, which chooses the operations of each delegate: as few delegates as the operations between them
allow.

ExecuTorch 1.5 merges what XNNPACK can take pair by pair, and looks for a cycle through what it cannot take, not through
other delegates: of one row of attention with a softcap two delegates come to wait for each other, and the lowering ends
with "Invalid partition, found dependency cycles". Here a delegate is a level: the operations that as many alternations
lie before. None waits for a later one, and there are as many as the longest chain of alternations has.

It also leaves out every slice of a tensor with a dynamic dimension, which ends a delegate. XNNPACK takes it: a
dimension's upper bound, which is what ExecuTorch writes as the size of a slice, is cut to what there is when the
delegate runs. It leaves out what has a dimension that a number of the program's decides, such as the slots of a cache
that are used; XNNPACK takes that as well.
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
    """Slices without a step, along a dimension that is fixed, of which something is left."""

    def check_constraints(self, node: Node, ep: ExportedProgram) -> bool:
        (source, dim), step = node.args[:2], node.args[4] if len(node.args) > 4 else 1
        shapes = source.meta["val"].shape, node.meta["val"].shape
        fixed = all(isinstance(shape[dim], int) for shape in shapes)
        filled = all(size for shape in shapes for size in shape if isinstance(size, int))
        return self.check_common_constraints(node, ep) and fixed and filled and step == 1


CONFIGS = [SliceConfig if config is SliceCopyConfig else config for config in ALL_PARTITIONER_CONFIGS]


class LevelPartitioner(XnnpackPartitioner):
    """Keeps every linear whole without asking of each whether it may: one decomposition of the graph less."""

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
    """Return the level of each group of operations that form a delegate: even; odd levels are for what lies between.

    Raises RuntimeError for a group that waits for what waits for it.
    """
    group_of = {node: index for index, group in enumerate(groups) for node in group}
    found, level = [0] * len(groups), dict.fromkeys(graph.nodes, -1)
    settled = False
    while not settled:  # a group's operations need not be next to each other: all wait for the last one's inputs
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
