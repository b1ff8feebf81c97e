"""Finds the attention heads that are computed from one matmul of queries, keys and values, in a traced graph.

The heads are outputs of the matmul, with or without a bias. They may be normed, by a weight or by 1 + weight. All, some
or none of their dimensions may have rotary embeddings (RoPE), whose pairs are two halves or adjacent dimensions. Casts
in between are ignored: the kernel keeps in float32 what the graph rounds there.
"""

from dataclasses import dataclass, replace

import torch
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import Argument

from eagle3.export.lowering.cuda.graph.nodes import concatenated, is_, part, uncast, width_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Rotary:
    """A rotary embedding of the first ``dims`` dimensions of each head. The two dimensions of a pair are
    ``pair_distance`` apart. Dimension d uses column d // ``repeat`` of the tables ``cos`` and ``sin`` [1, T, columns],
    modulo the number of columns."""

    cos: Node
    sin: Node
    dims: int
    pair_distance: int
    repeat: int


@dataclass(frozen=True)
class Heads:
    """Heads [1, T, count, head_dim] or, if ``swapped``, [1, count, T, head_dim].

    They are the outputs of the matmul ``product`` [T, N] from ``start`` on, plus ``bias`` [N]. Unless ``eps`` is 0,
    they are normed and multiplied by ``weight`` + ``plus``. Then ``rotary`` is applied.
    """

    product: Node
    bias: Node | None
    start: int
    count: int
    swapped: bool = False
    eps: float = 0.0
    weight: Node | None = None
    plus: float = 0.0
    rotary: Rotary | None = None


def heads_of(node: Argument) -> Heads | None:
    """Return ``node`` as heads of a matmul; None if it is anything else."""
    node = uncast(node)
    if is_(node, aten.transpose.int):
        found = heads_of(node.args[0]) if set(node.args[1:]) == {1, 2} else None
        return found and replace(found, swapped=not found.swapped)
    if is_(node, aten.add.Tensor, aten.cat.default):
        return _with_rotary(node)
    if is_(node, aten.rms_norm.default, aten.mul.Tensor):
        return _normed(node)
    return _sliced(node) if is_(node, aten.unflatten.int, aten.view.default, aten.reshape.default) else None


def _with_rotary(node: Node) -> Heads | None:
    """Return heads with a rotary embedding on all dimensions, or on the first ones only: ``cat(rotary part, rest)``."""
    ahead, rest = _pair(node)
    behind = part(rest)
    rotation = _rotation(uncast(ahead) if behind else node)
    if rotation is None:
        return None
    x, cos, sin, pair_distance = rotation
    dims = width_of(x)
    if behind:
        run = part(x)
        x = uncast(run.whole) if run and run[1:] == (0, dims, 1) else x
        if uncast(behind.whole) is not x or behind[1:] != (dims, width_of(x) - dims, 1):
            return None
    found = heads_of(x)
    if found is None or found.rotary:
        return None
    of_cos, of_sin = _table(cos, found), _table(sin, found)
    if of_cos is None or of_sin is None:
        return None
    (cos, repeat), (sin, repeat_of_sin) = of_cos, of_sin
    if repeat != repeat_of_sin or width_of(cos) != width_of(sin) or repeat > 1 and pair_distance > 1:
        return None
    return replace(found, rotary=Rotary(cos, sin, dims, pair_distance, repeat))


def _pair(node: Argument, kind: OpOverload = aten.cat.default) -> tuple[Argument, Argument]:
    both = concatenated(node, kind)
    return both if len(both) == 2 else (None, None)


def _rotation(node: Argument) -> tuple[Node, Node, Node, int] | None:
    """Return (x, cos, sin, pair distance) of a rotary embedding; None for anything else.

    It recognizes ``x * cos + cat(-second half, first half) * sin``, the same with a stack of adjacent dimensions, and
    the form of ``_rotation_of_halves``.
    """
    if is_(node, aten.cat.default):
        return _rotation_of_halves(*_pair(node))
    if not is_(node, aten.add.Tensor) or node.kwargs or not all(is_(each, aten.mul.Tensor) for each in node.args):
        return None
    (x, cos), (across, sin) = (each.args for each in node.args)
    x, across = uncast(x), uncast(across)
    width, apart, step = width_of(x), width_of(x) // 2, 1
    negative, other = _pair(across)
    if is_(across, aten.flatten.using_ints) and across.meta["val"].shape == x.meta["val"].shape:
        apart, step = 1, 2
        negative, other = _pair(across.args[0], aten.stack.default)
    behind, ahead = part(negative.args[0]) if is_(negative, aten.neg.default) else None, part(other)
    if behind is None or ahead is None or any(uncast(each.whole) is not x for each in (behind, ahead)):
        return None
    if behind[1:] != (apart, width // 2, step) or ahead[1:] != (0, width // 2, step):
        return None
    return (x, cos, sin, apart) if width_of(cos) == width_of(sin) == width else None


def _rotation_of_halves(minus: Argument, plus: Argument) -> tuple[Node, Node, Node, int] | None:
    """Match ``cat(first * cos - second * sin, second * cos + first * sin)``; see ``_rotation``."""
    if not is_(minus, aten.sub.Tensor) or not is_(plus, aten.add.Tensor) or minus.kwargs or plus.kwargs:
        return None
    products = *minus.args, *plus.args
    if not all(is_(each, aten.mul.Tensor) for each in products):
        return None
    (first, cos), (second, sin), *others = (each.args for each in products)
    left, right = part(first), part(second)
    if others != [(second, cos), (first, sin)] or left is None or right is None or left.whole is not right.whole:
        return None
    x, half = uncast(left.whole), width_of(first)
    split = left[1:] == (0, half, 1) and right[1:] == (half, half, 1) and width_of(x) == 2 * half
    return (x, cos, sin, half) if split and width_of(cos) == width_of(sin) == half else None


def _table(node: Node, heads: Heads) -> tuple[Node, int] | None:
    """Return (table [1, T, columns], repeat) if ``node`` is a table broadcast over the heads, otherwise None.

    The table is the one before its rounding to another dtype. ``repeat`` consecutive dimensions use the same column.
    """
    node, repeat = uncast(node), 1
    if is_(node, aten.repeat_interleave.self_int) and node.args[1:] in ((2, -1), (2, 3)):
        node, repeat = uncast(node.args[0]), 2
        run = part(node)
        node = uncast(run.whole) if run and (run.start, run.step) == (0, 1) else node
    if not is_(node, aten.unsqueeze.default) or node.args[1] != (1 if heads.swapped else 2):
        return None
    table = uncast(node.args[0])
    while is_(table, aten.mul.Tensor) and table.args[1] == 1.0:
        table = uncast(table.args[0])
    shape, rows = table.meta["val"].shape, heads.product.meta["val"].shape[0]
    return (table, repeat) if len(shape) == 3 and shape[0] == 1 and statically_known_true(shape[1] == rows) else None


def _normed(node: Node) -> Heads | None:
    """Match ``rms_norm(x, weight)``, or the same written out as ``weight * (x * rsqrt(mean(x^2) + eps))``."""
    if node.target is aten.rms_norm.default:
        x, over, weight, eps = (*node.args, None, None)[:4]
        plus = 0.0
        if len(over) != 1:
            return None
    else:
        scaled, weight, plus = _weighted(node)
        if not is_(scaled, aten.mul.Tensor) or not _is_rsqrt(scaled.args[1]):
            return None
        x, mean = scaled.args[0], scaled.args[1].args[0]
        if not is_(mean, aten.add.Tensor) or mean.kwargs or not is_(mean.args[0], aten.mean.dim):
            return None
        square, eps = mean.args[0].args[0], mean.args[1]
        if mean.args[0].args[1:] != ([-1], True) or not is_(square, aten.pow.Tensor_Scalar) or square.args != (x, 2):
            return None
    found, width = heads_of(x), x.meta["val"].shape[-1:]
    fits = (weight is None or weight.meta["val"].shape == width) and isinstance(eps, float) and eps > 0
    if found is None or found.eps or found.rotary or not fits:
        return None
    return replace(found, eps=eps, weight=weight, plus=plus)


def _is_rsqrt(node: Argument) -> bool:
    return is_(node, aten.rsqrt.default) or is_(node, aten.pow.Tensor_Scalar) and node.args[1] == -0.5


def _weighted(node: Node) -> tuple[Node, Node | None, float]:
    """Return (x, weight, plus) of ``x * weight`` or ``x * (weight + plus)``, and (node, None, 0) of another product."""
    for weight, x in (node.args, node.args[::-1]):
        if isinstance(weight, Node) and weight.meta["val"].ndim == 1:
            weight = uncast(weight)
            if is_(weight, aten.add.Tensor) and isinstance(weight.args[1], float | int) and not weight.kwargs:
                return uncast(x), uncast(weight.args[0]), float(weight.args[1])
            return uncast(x), weight, 0.0
    return node, None, 0.0


def _sliced(node: Node) -> Heads | None:
    """Match outputs of a matmul [T, N], viewed as [1, T, heads, head_dim]."""
    run = part(node.args[0])
    whole, start, bias = run.whole if run else node.args[0], run.start if run else 0, None
    if is_(whole, aten.add.Tensor) and not whole.kwargs:
        whole, bias = whole.args
    product = whole.args[0] if is_(whole, aten.reshape.default) else None
    if not isinstance(product, Node) or getattr(product.target, "namespace", "") != "eagle3" or run and run.step > 1:
        return None
    made, shape = product.meta["val"].shape, node.meta["val"].shape
    if whole.meta["val"].shape != (1, *made) or shape[:-2] != (1, made[0]):
        return None
    if bias is not None and (not isinstance(bias, Node) or bias.meta["val"].shape != made[1:]):
        return None
    return Heads(product, bias, start, shape[2])
