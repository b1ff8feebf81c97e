"""The norms and the rotation of queries and keys, and the writing of keys and values, in the launch of their attention.

Found in a traced graph by what is computed, whatever a family calls it: heads of one product (see ``heads``), queries
and keys turned alike, and a cache that an attention of few rows reads. A family that does it otherwise (a norm over all
heads or behind the rotation, queries scaled by their positions) has a launch for it, of Inductor's.
"""

import operator

import torch
from torch.export import ExportedProgram
from torch.fx import Node

import eagle3.export.lowering.cuda.kernels.attention_of_product  # noqa: F401  (registers the op)
from eagle3.export.lowering.cuda.graph.heads import heads_of
from eagle3.export.lowering.cuda.graph.nodes import is_

aten = torch.ops.aten
OP = torch.ops.eagle3.attention_of_product.default
ATTENTION = "eagle3.attention.default"
DIVIDED_ROWS = 8
"""The place of that argument of the op."""


def rotate_in_attention(program: ExportedProgram) -> None:
    """Put what is between a product and its attention into the attention, in place, where it is of few rows."""
    for node in list(program.graph.nodes):
        if str(node.target) == ATTENTION and node.args[DIVIDED_ROWS]:
            _replace(node)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()


def _replace(node: Node) -> None:
    written, last = node.args[1:3], node.args[4]
    if not all(is_(each, aten.index_copy_.default) and _at(each, last) for each in written):
        return
    if any(user < node for each in written for user in each.users):
        return
    caches = [each.args[0] for each in written]
    query, key, value = (heads_of(each) for each in (node.args[0], *(each.args[3] for each in written)))
    if query is None or key is None or value is None or not query.product is key.product is value.product:
        return
    alike = query.bias is key.bias is value.bias and (query.turn, query.plus) == (key.turn, key.plus)
    kv_heads = caches[0].meta["val"].shape[1]
    if not alike or query.swapped or not key.swapped or not value.swapped or {key.count, value.count} != {kv_heads}:
        return
    if value.turn or value.weight:
        return
    graph, parts, turn = node.graph, (query, key, value), query.turn
    with graph.inserting_before(node):
        tables, turns = ((turn.cos, turn.sin), [turn.count, turn.apart, turn.repeated]) if turn else ((None, None), [])
        shapes = query.count, [each.start for each in parts], [each.eps for each in parts], query.plus, turns
        made = (query.product, query.bias, *caches, *node.args[3:6], *tables, query.weight, key.weight, *shapes)
        call = graph.call_function(OP, (*made, *node.args[6:]))
        values = node.meta["val"], *(cache.meta["val"] for cache in caches)
        call.meta["val"] = values
        outputs = [graph.call_function(operator.getitem, (call, index)) for index in range(3)]
        for output, found in zip(outputs, values, strict=True):
            output.meta["val"] = found
        for cache, output in zip(caches, outputs[1:], strict=True):
            graph.call_function(aten.copy_.default, (cache, output)).meta["val"] = cache.meta["val"]
    node.replace_all_uses_with(outputs[0])
    graph.erase_node(node)
    for each, cache in zip(written, caches, strict=True):
        each.replace_all_uses_with(cache)
        graph.erase_node(each)


def _at(written: Node, last: Node) -> bool:
    """Whether rows go into a cache at the slots of the positions ``last``."""
    cache, dim, at = written.args[:3]
    slots = cache.meta["val"].shape[2]
    in_ring = is_(at, aten.remainder.Scalar) and at.args == (last, slots)
    return dim == 2 and (at is last or in_ring)
