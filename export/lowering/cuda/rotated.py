"""The norms and the rotation of queries and keys, and the writing of keys and values, in the launch of their attention.

Found in a traced graph by what is computed, whatever a family calls it: heads of one product, normed or not, whose two
halves turn by one table of angles, and a cache that an attention of few rows reads. A family that does it otherwise (a
bias, a part of the head that does not turn, a norm over all heads) has a launch for it, of Inductor's.
"""

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

import eagle3.export.lowering.cuda.kernels.attention_of_product  # noqa: F401  (registers the op)

aten = torch.ops.aten
OP = torch.ops.eagle3.attention_of_product.default
ATTENTION = "eagle3.attention.default"
DIVIDED_ROWS = 8
"""The place of that argument of the op."""


@dataclass(frozen=True)
class Heads:
    """Heads as attention takes them, [1, T, heads, head_dim] or, ``swapped``, [1, heads, T, head_dim]: of the outputs
    of ``product`` [T, N] from ``start``, normed unless ``eps`` is 0, turned by ``angles``, cos and sin [1, T,
    head_dim]."""

    product: Node
    start: int
    count: int
    swapped: bool = False
    eps: float = 0.0
    weight: Node | None = None
    angles: tuple[Node, Node] | None = None


def rotate_in_attention(program: ExportedProgram) -> None:
    """Put what is between a product and its attention into the attention, in place, where it is of few rows."""
    for node in list(program.graph.nodes):
        if str(node.target) == ATTENTION and node.args[DIVIDED_ROWS]:
            _replace(node)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()


def _replace(node: Node) -> None:
    written, last = node.args[1:3], node.args[4]
    if not all(_is(each, aten.index_copy_.default) and _at(each, last) for each in written):
        return
    if any(user < node for each in written for user in each.users):
        return
    caches = [each.args[0] for each in written]
    query, key, value = (_heads(each) for each in (node.args[0], *(each.args[3] for each in written)))
    if None in (query, key, value) or not query.product is key.product is value.product:
        return
    turned = query.angles is not None and query.angles == key.angles and value.angles is value.weight is None
    kv_heads = caches[0].meta["val"].shape[1]
    if not turned or query.swapped or not key.swapped or not value.swapped or {key.count, value.count} != {kv_heads}:
        return
    graph, parts = node.graph, (query, key, value)
    with graph.inserting_before(node):
        shapes = query.count, [each.start for each in parts], [each.eps for each in parts]
        made = (query.product, *caches, *node.args[3:6], *query.angles, query.weight, key.weight, *shapes)
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
    in_ring = _is(at, aten.remainder.Scalar) and at.args == (last, slots)
    return dim == 2 and (at is last or in_ring)


def _is(node: Any, *targets: Any) -> bool:
    return isinstance(node, Node) and node.target in targets


def _heads(node: Any) -> Heads | None:
    if _is(node, aten.transpose.int):
        found = _heads(node.args[0]) if set(node.args[1:]) == {1, 2} else None
        return found and replace(found, swapped=not found.swapped)
    if _is(node, aten.add.Tensor):
        return _turned(node)
    if _is(node, aten.rms_norm.default, aten.mul.Tensor):
        return _normed(node)
    return _sliced(node) if _is(node, aten.unflatten.int, aten.view.default, aten.reshape.default) else None


def _turned(node: Node) -> Heads | None:
    """``x * cos + cat(-second half, first half) * sin``."""
    if not all(_is(each, aten.mul.Tensor) for each in node.args):
        return None
    (x, cos), (across, sin) = (each.args for each in node.args)
    found = _heads(x)
    if found is None or found.angles or node.kwargs or not _is(across, aten.cat.default):
        return None
    if len(across.args[0]) != 2 or across.args[1] not in (-1, 3):
        return None
    second, first = across.args[0]
    halves = _is(second, aten.neg.default) and _half(second.args[0], 1) is x and _half(first, 0) is x
    angles = [_angles(each, 1 if found.swapped else 2) for each in (cos, sin)]
    return replace(found, angles=tuple(angles)) if halves and all(angles) else None


def _half(node: Any, which: int) -> Node | None:
    """What ``node`` is the first (0) or the second (1) half of, along its last dimension of four."""
    if not _is(node, aten.slice.Tensor) or len(node.args) != 4:
        return None
    (whole, dim, start, _), width = node.args, node.meta["val"].shape[-1]
    return whole if (dim, start, whole.meta["val"].shape[-1]) == (3, which * width, 2 * width) else None


def _angles(node: Any, heads: int) -> Node | None:
    """A table [1, T, head_dim], as it was before it was rounded, where ``node`` is one for each head."""
    if not _is(node, aten.unsqueeze.default) or node.args[1] != heads:
        return None
    table = node.args[0]
    while _is(table, aten.to.dtype) or _is(table, aten.mul.Tensor) and table.args[1] == 1.0:
        table = table.args[0]
    return table


def _normed(node: Node) -> Heads | None:
    """``rms_norm(x, weight)``, or the same written out as ``weight * (x * rsqrt(mean(x^2) + eps))``."""
    if node.target is aten.rms_norm.default:
        x, over, weight, eps = (*node.args, None, None)[:4]
        if len(over) != 1:
            return None
    else:
        weight, rounded = node.args
        scaled = rounded.args[0] if _is(rounded, aten.to.dtype) else None
        if not _is(scaled, aten.mul.Tensor) or not _is(scaled.args[1], aten.rsqrt.default):
            return None
        wide, mean = scaled.args[0], scaled.args[1].args[0]
        if not _is(mean, aten.add.Tensor) or not _is(mean.args[0], aten.mean.dim) or not _is(wide, aten.to.dtype):
            return None
        square, eps, x = mean.args[0].args[0], mean.args[1], wide.args[0]
        if mean.args[0].args[1:] != ([-1], True) or not _is(square, aten.pow.Tensor_Scalar) or square.args != (wide, 2):
            return None
    found, width = _heads(x), x.meta["val"].shape[-1:]
    fits = weight is None or weight.meta["val"].shape == width
    if found is None or found.eps or found.angles or not eps or not fits:
        return None
    return replace(found, eps=eps, weight=weight)


def _sliced(node: Node) -> Heads | None:
    """Outputs of a product [T, N], as [1, T, heads, head_dim]."""
    part, start = node.args[0], 0
    if _is(part, aten.slice.Tensor) and len(part.args) == 4 and part.args[1] == 2:
        part, start = part.args[0], part.args[2]
    product = part.args[0] if _is(part, aten.reshape.default) else None
    if not isinstance(product, Node) or getattr(product.target, "namespace", "") != "eagle3":
        return None
    (rows, outputs), shape = product.meta["val"].shape, node.meta["val"].shape
    if part.meta["val"].shape != (1, rows, outputs) or shape[:2] != (1, rows) or len(shape) != 4:
        return None
    return Heads(product, start, shape[2])
