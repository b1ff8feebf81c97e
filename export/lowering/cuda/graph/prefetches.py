"""Lets each matmul over records ask L2 for the weight of the next one, and begin with its own weight before it waits.

A matmul's programs end at slightly different times, and memory is idle between two matmuls: in that time the first
bytes of the next weight can come nearer. Only parameters are asked for, since no kernel writes them. A prefetch can
change no result.

The next matmul is the next one in the graph. Inductor may order kernels that do not depend on each other in another
way. The stand-in for a GPU (``tests/helpers/stand_in_kernels.py``) names a launch whose weight is not the one that was
asked for.
"""

from itertools import zip_longest

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.node import Argument

PART = torch.ops.export.access_subclass_inner_tensor.default
"""Reads a part of a quantized weight in a traced graph."""


def prefetch_weights(program: ExportedProgram, early: bool) -> int:
    """Give each small-M matmul over records the weight of the next one, in place, and return the number of matmuls that
    ask for one. ``early`` is True if launches begin early: then each loads its first weights before it waits.

    Neither is done with a weight that is not a parameter.
    """
    operator = torch.ops.eagle3.int4_records_small_m.default
    products = program.graph.find_nodes(op="call_function", target=operator)
    asking = 0
    for product, after in zip_longest(products, products[1:]):
        if early and _is_constant(product.args[1], program):
            product.kwargs = product.kwargs | {"early": True}
        if after is not None and _is_constant(after.args[1], program):
            product.kwargs = product.kwargs | {"following": _before(product, after.args[1])}
            asking += 1
    program.graph_module.recompile()
    return asking


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
