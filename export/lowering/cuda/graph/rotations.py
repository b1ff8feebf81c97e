"""Moves norms and rotary embeddings of queries and keys, and the cache writes, into the launch of their attention.

The pattern is found in a traced graph by its computation, whatever a family calls it: heads of one matmul (see
``heads``), the same rotary embedding for queries and keys, and a cache that an attention over few rows reads. For a
family with another computation (a norm over all heads or after RoPE, queries scaled by position), the graph stays
unchanged and Inductor makes a separate launch.

Attention on CUDA is one operator for every kind of layer and every length. It reads only the positions that its rows
attend to.
"""

import operator

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

import eagle3.export.lowering.cuda.kernels.attention_of_product  # noqa: F401  (registers the op)
from eagle3.export.lowering.cuda.graph.heads import heads_of
from eagle3.export.lowering.cuda.graph.nodes import is_
from eagle3.export.lowering.cuda.kernels.attention import attention
from eagle3.export.lowering.cuda.kernels.attention_sums import FEW
from eagle3.export.lowering.cuda.kernels.product import shared_counters
from eagle3.export.lowering.cuda.weights.traced_rows import from_one_row, most_rows
from eagle3.targets.attention import Block, EagerAttention, KVCacheShape

aten = torch.ops.aten
OP = torch.ops.eagle3.attention_of_product.default
ATTENTION = "eagle3.attention.default"
DIVIDED_ROWS = 8
"""The index of the argument ``divided_rows`` of the attention op."""
SCALES = 11
"""The index of the first of the attention operator's scales, which it has for an INT8 cache."""


def rotate_in_attention(program: ExportedProgram) -> None:
    """Move the operations between a matmul and its attention into the attention, in place, for attention over few
    rows."""
    for node in list(program.graph.nodes):
        if str(node.target) == ATTENTION and node.args[DIVIDED_ROWS]:
            _replace(node)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()


def _replace(node: Node) -> None:
    written, last = [*node.args[1:3], *node.args[SCALES:]], node.args[4]
    if not all(is_(each, aten.index_copy_.default) and _at(each, last) for each in written):
        return
    if any(user < node for each in written for user in each.users):
        return
    caches, new = [each.args[0] for each in written], [each.args[3] for each in written]
    if len(new) > 2:
        new = [_coded(*pair) for pair in zip(new[:2], new[2:], strict=True)]
    query, key, value = (each and heads_of(each) for each in (node.args[0], *new))
    if query is None or key is None or value is None or not query.product is key.product is value.product:
        return
    alike = query.bias is key.bias is value.bias and (query.rotary, query.plus) == (key.rotary, key.plus)
    kv_heads = caches[0].meta["val"].shape[1]
    if not alike or query.swapped or not key.swapped or not value.swapped or {key.count, value.count} != {kv_heads}:
        return
    if value.rotary or value.weight:
        return
    graph, parts, rotary = node.graph, (query, key, value), query.rotary
    with graph.inserting_before(node):
        tables = (rotary.cos, rotary.sin) if rotary else (None, None)
        rotary_sizes = [rotary.dims, rotary.pair_distance, rotary.repeat] if rotary else []
        shapes = query.count, [each.start for each in parts], [each.eps for each in parts], query.plus, rotary_sizes
        made = (query.product, query.bias, *caches[:2], *node.args[3:6], *tables, query.weight, key.weight, *shapes)
        call = graph.call_function(OP, (*made, *node.args[6:SCALES], *caches[2:]))
        values = [node.meta["val"], *(cache.meta["val"] for cache in caches)]
        call.meta["val"] = values
        outputs = [graph.call_function(operator.getitem, (call, index)) for index in range(len(values))]
        for output, found in zip(outputs, values, strict=True):
            output.meta["val"] = found
        for cache, output in zip(caches, outputs[1:], strict=True):
            graph.call_function(aten.copy_.default, (cache, output)).meta["val"] = cache.meta["val"]
    node.replace_all_uses_with(outputs[0])
    graph.erase_node(node)
    for each, cache in zip(written, caches, strict=True):
        each.replace_all_uses_with(cache)
        graph.erase_node(each)


def _coded(codes: Node, scales: Node) -> Node | None:
    """Return the heads that ``int8_codes`` quantizes to these codes and scales; None for anything else."""
    steps = [codes]
    for kind in (aten.to.dtype, aten.floor.default, aten.add.Tensor, aten.div.Tensor):
        if not is_(steps[-1], kind):
            return None
        steps.append(steps[-1].args[0])
    *_, added, divided, heads = steps
    by = divided.args[1]
    return heads if added.args[1] == 0.5 and is_(by, aten.unsqueeze.default) and by.args[0] is scales else None


def _at(written: Node, last: Node) -> bool:
    """Return True if ``written`` writes rows into a cache at the slots of the positions ``last``."""
    cache, dim, at = written.args[:3]
    slots = cache.meta["val"].shape[2]
    in_ring = is_(at, aten.remainder.Scalar) and at.args == (last, slots)
    return dim == 2 and (at is last or in_ring)


class CudaAttention(EagerAttention):
    """Attention by the CUDA kernel, with the caches of ``EagerAttention``."""

    def __init__(self, shape: KVCacheShape):
        super().__init__(shape)
        self.longest = shape.window or shape.slots

    def rows(self, input_pos: Tensor, block: Block | None = None) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """Return for each row its position, and the first and the last position that it attends to, [T] each."""
        window = self.shape.window
        if block is not None:
            first, last = block.bounds(input_pos)
            return input_pos, first.contiguous(), last.contiguous()  # the kernel reads an entry for each row
        if not window:
            return input_pos, torch.zeros_like(input_pos), input_pos
        if self.shape.chunked:
            return input_pos, input_pos - input_pos % window, input_pos
        return input_pos, (input_pos - window + 1).clamp_min(0), input_pos

    def write(self, key: Tensor, value: Tensor, rows: tuple[Tensor, Tensor, Tensor]) -> None:  # type: ignore[override]
        self.written(rows[0], key, value)

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        rows: tuple[Tensor, Tensor, Tensor],
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        input_pos, first, last = rows
        keys, values, *scales = self.written(input_pos, key, value)
        length = query.shape[1]
        most = most_rows(length)
        few = min(most, FEW) if from_one_row(length) or most <= FEW else 0
        arrived = shared_counters(query)
        given = query, keys, values, first, last, arrived, scale, self.longest, few, softcap or 0.0, sinks
        return attention(*given, *scales)
