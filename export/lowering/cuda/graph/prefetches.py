"""Lets each matmul over records or bfloat16 ask L2 for the weight of the next one, and begin with its own weight before
it waits.

A matmul's programs end at slightly different times, and memory is idle between two matmuls: in that time the first
bytes of the next weight can come nearer. Only parameters are asked for, since no kernel writes them. A prefetch can
change no result.

Inductor chooses the order of launches later, and may launch matmuls that do not depend on each other in another order
than the graph's: in a round the draft's first matmul, which depends on the taps alone, comes in front of the target's
LM head. So a matmul asks only if the next one is the same in every order that the graph allows. The stand-in for a GPU
(``tests/gpu_stand_in/stand_in_kernels.py``) names a launch whose weight is not the one that was asked for.
"""

from itertools import zip_longest

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.node import Argument

from eagle3.export.lowering.cuda.graph.nodes import PRODUCTS, targets

PART = torch.ops.export.access_subclass_inner_tensor.default
"""Reads a part of a quantized weight in a traced graph."""
ASKING = targets(tuple(product for product in PRODUCTS if product.asks_l2))
"""The matmuls that ask L2 for weights, and whose weights are asked for."""
FEW_ROWS = "_small_m.default"
"""The ending of the names of all matmuls of few rows."""


def prefetch_weights(program: ExportedProgram) -> int:
    """Give each matmul of ``ASKING`` the weight of the next matmul, if that is one too, in place, and let it begin with
    its own weight before it waits. Return the number of matmuls that ask for a next weight.

    Neither is done with a weight that is not a parameter.
    """
    asking = 0
    for product, after in _with_next(program):
        if str(product.target) not in ASKING:
            continue
        if _is_constant(product.args[1], program):
            product.kwargs = product.kwargs | {"early": True}
        if after is not None and str(after.target) in ASKING and _is_constant(after.args[1], program):
            product.kwargs = product.kwargs | {"following": _before(product, after.args[1])}
            asking += 1
    program.graph_module.recompile()
    return asking


def _with_next(program: ExportedProgram) -> list[tuple[Node, Node | None]]:
    """Return each matmul of few rows with the next one, None if there is none or not the same one in every order."""
    products = [node for node in program.graph.nodes if str(node.target).endswith(FEW_ROWS)]
    numbers = {node: number for number, node in enumerate(products)}
    needs: dict[Node, int] = {}
    """The matmuls that a node depends on, itself among them: the bits of their numbers."""
    for node in program.graph.nodes:
        needs[node] = 1 << numbers[node] if node in numbers else 0
        for given in node.all_input_nodes:
            needs[node] |= needs[given]
    found: list[tuple[Node, Node | None]] = []
    for product, after in zip_longest(products, products[1:]):
        others = [node for node in products if not needs[product] >> numbers[node] & 1]  # not in front of it
        certain = after is not None and all(needs[node] >> numbers[after] & 1 for node in others)
        follows = certain and needs[after] >> numbers[product] & 1
        found.append((product, after if follows else None))
    return found


def _is_constant(weight: Argument, program: ExportedProgram) -> bool:
    while isinstance(weight, Node) and weight.target is PART:
        weight = weight.args[0]
    return isinstance(weight, Node) and weight.name in program.graph_signature.inputs_to_parameters


def _before(product: Node, weight: Node) -> Node:
    """Return ``weight``, a parameter or a part of one, as a node in front of ``product``."""
    if weight.target is not PART:
        return weight
    home = _before(product, weight.args[0])
    with product.graph.inserting_before(product):
        found = product.graph.call_function(PART, (home, *weight.args[1:]))
    found.meta = dict(weight.meta)
    return found
