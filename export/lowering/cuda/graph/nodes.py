"""Finds relations between nodes of a traced graph: a part of another node's last dimension, or a cast of another node.

It also holds the registry of matmuls, which dispatch, checks, gates and requests to L2 read.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.node import Argument
from torchao.quantization import IntxUnpackedToInt8Tensor

from eagle3.export.lowering.cuda.kernels.bf16 import bf16_small_m
from eagle3.export.lowering.cuda.kernels.int4.layouts import LAYOUTS
from eagle3.export.lowering.cuda.kernels.int8_experts import int8_experts_small_m
from eagle3.export.lowering.cuda.kernels.int8_matmul import int8_matmul
from eagle3.export.lowering.cuda.kernels.k_quant_matmul import k_quant_matmul
from eagle3.export.lowering.cuda.kernels.k_quants import k_quant_small_m
from eagle3.export.lowering.cuda.kernels.product import Product
from eagle3.export.lowering.cuda.kernels.small_m import int8_small_m
from eagle3.export.lowering.cuda.weights.k_quants import KQuantTensor

aten = torch.ops.aten
CASTS = (aten.alias.default, aten.to.dtype, aten.to.dtype_layout, aten.type_as.default)


class Part(NamedTuple):
    """A slice of the last dimension of ``whole``: ``width`` elements, ``step`` apart, from ``start`` on."""

    whole: Node
    start: int
    width: int
    step: int = 1


def is_(node: Argument, *targets: Callable[..., Any]) -> bool:
    return isinstance(node, Node) and node.target in targets


def width_of(node: Argument) -> int:
    """Return the size of the last dimension; 0 if there is none."""
    shape = node.meta["val"].shape if isinstance(node, Node) else ()
    return shape[-1] if shape else 0


def part(node: Argument) -> Part | None:
    """Return ``node`` as a slice or a chunk along the last dimension of another node; None if it is neither."""
    if is_(node, aten.slice.Tensor) and len(node.args) >= 4:
        whole, dim, start, _, *step = node.args
    elif is_(node, operator.getitem) and is_(node.args[0], aten.chunk.default):
        chunked, number = node.args
        whole, dim = chunked.args[0], (*chunked.args, 0)[2]
        start, step = number * chunked.meta["val"][0].shape[-1], []
    else:
        return None
    known = isinstance(start, int) and start >= 0
    return Part(whole, start, width_of(node), *step) if known and _is_last(dim, whole) else None


def concatenated(node: Argument, kind: OpOverload = aten.cat.default) -> tuple[Node, ...]:
    """Return the nodes that ``node`` concatenates (or stacks, by ``kind``) along its last dimension; () if it does
    neither."""
    return tuple(node.args[0]) if is_(node, kind) and _is_last((*node.args, 0)[1], node) else ()


def uncast(node: Argument) -> Argument:
    """Return the node of which ``node`` is a cast, through any number of casts between floating dtypes."""
    while is_(node, *CASTS) and all(each.meta["val"].is_floating_point() for each in (node, node.args[0])):
        node = node.args[0]
    return node


def _is_last(dim: int, node: Node) -> bool:
    return dim in (-1, node.meta["val"].ndim - 1)


BF16 = Product(None, bf16_small_m, None, lambda weight: (weight,), gate="tile", asks_l2=True)
QUANTIZED = (
    *(layout.product for layout in LAYOUTS.values()),
    Product(
        IntxUnpackedToInt8Tensor,
        int8_small_m,
        int8_matmul,
        lambda weight: (weight.qdata, weight.scale, weight.zero_point),
    ),
    Product(KQuantTensor, k_quant_small_m, k_quant_matmul, lambda weight: weight.parts),
)
PRODUCTS = (BF16, *QUANTIZED)
OF_EXPERTS = (int8_experts_small_m,)
"""Operators over the quantized weights of experts, which the experts' modules call themselves."""


def targets(products: tuple[Product, ...]) -> dict[str, Product]:
    """Map the target of each product's node of few rows, as a traced graph names it, to the product."""
    return {f"{product.few_name.replace('::', '.')}.default": product for product in products}
