"""Removes redundant operations from a graph before it is divided into delegates.

XNNPACK does not remove such nodes itself. transformers' layers transpose heads before rows between projections and
attention, where neither needs it; torchao quantizes the input of each linear again, although q, k and v share theirs;
and a rotary embedding without scaling is multiplied by 1.
"""

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.passes.dialect.common.cse_pass import CSEPass
from torch.fx.passes.infra.pass_base import PassBase


def computed_once() -> PassBase:
    """Return a pass that merges equal nodes of the edge dialect; a cache counts as a new value after each write. The
    weight of a linear that is called twice keeps two nodes. With one node the two calls would be put into one delegate,
    although the second depends on the first."""
    return CSEPass(banned_ops={torch.ops.torchao.dequantize_affine})


def remove_no_ops(program: ExportedProgram) -> None:
    """Remove transpositions that undo each other and products with 1 from a traced program, in place. Output nodes are
    kept, since the program's signature has their names."""
    outputs = program.graph.output_node().all_input_nodes
    for node in program.graph.nodes:
        same = None if node in outputs else _without_effect(node)
        if same is not None:
            node.replace_all_uses_with(same)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()


def _without_effect(node: Node) -> Node | None:
    """Return the input that a node passes on unchanged; None if the node computes something."""
    if node.target is torch.ops.aten.transpose.int:
        before = node.args[0]
        if before.target is node.target and _axes(before) == _axes(node):
            return before.args[0]
    if node.target is torch.ops.aten.mul.Tensor:
        factor, other = node.args
        if isinstance(other, float | int) and other == 1 and factor.meta["val"].dtype == node.meta["val"].dtype:
            return factor
    return None


def _axes(transpose: Node) -> set[int]:
    source, *dims = transpose.args
    return {dim % source.meta["val"].dim() for dim in dims}
