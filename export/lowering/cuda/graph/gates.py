"""Moves the gate of an MLP, ``act(gate) * up``, into the launch of the matmul that computes gate and up.

The pattern is found in a traced graph by its computation, whatever a family calls it: a small-M matmul, its two halves,
an activation of the first half, and the product with the second. The graph stays unchanged if another node, such as the
addition of a bias, reads one of these values. It also stays unchanged for INT8 and K-quants, whose kernels spill
registers on sm_90 and sm_120 with a gate.
"""

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.node import Argument

from eagle3.export.lowering.cuda.graph.nodes import PRODUCTS, part, targets
from eagle3.export.lowering.cuda.kernels.sums import GELU_TANH, SILU

aten = torch.ops.aten
WHOLE = 128
"""The outputs of each half and of each weight must be a multiple of this, so that no tile spans both halves."""
GATED = targets(tuple(product for product in PRODUCTS if product.gate))


def gate_in_products(program: ExportedProgram) -> None:
    """Move the gates of a program into their matmuls, in place."""
    for node in program.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        for activated, up in (node.args, node.args[::-1]):
            wide, activation = _gated(activated, up), _activation(activated)
            if wide is not None and activation is not None:
                _replace(node, wide, activation)
                break
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()


def _gated(activated: Argument, up: Argument) -> Node | None:
    """Return the reshaped matmul whose first half is activated to ``activated`` and whose second half is ``up``.
    Returns None if there is none, or if any other node reads its halves."""
    if _activation(activated) is None or _half(activated.args[0]) != 0 or _half(up) != 1:
        return None
    gate, parent = activated.args[0], up.args[0]
    wide = parent.args[0] if parent.target is aten.chunk.default else parent
    if gate.args[0] is not parent or wide.target is not aten.reshape.default or str(wide.args[0].target) not in GATED:
        return None
    product = wide.args[0]
    once = [activated, gate, up, product] + [wide] * (wide is not parent)
    if set(parent.users) != {gate, up} or any(len(node.users) > 1 for node in once):
        return None
    if GATED[str(product.target)].gate == "halves":  # each half has a whole number of tiles
        return wide
    weights = product.args[1] if isinstance(product.args[1], list | tuple) else [product.args[1]]
    outputs = [product.meta["val"].shape[1] // 2, *(weight.meta["val"].shape[0] for weight in weights)]
    return wide if all(n % WHOLE == 0 for n in outputs) else None


def _activation(node: Argument) -> str | None:
    """Return the name of the activation that ``node`` computes; None if it is another operation."""
    if not isinstance(node, Node):
        return None
    if node.target is aten.gelu.default and node.kwargs.get("approximate") == "tanh":
        return GELU_TANH
    return SILU if node.target is aten.silu.default else None


def _half(node: Argument) -> int | None:
    """Return 0 if ``node`` is the first half of another node's last dimension, 1 if it is the second half, otherwise
    None."""
    found = part(node)
    if found is None or 2 * found.width != found.whole.meta["val"].shape[-1]:
        return None
    return {(0, 1): 0, (found.width, 1): 1}.get((found.start, found.step))


def _replace(node: Node, wide: Node, activation: str) -> None:
    graph, product, value = node.graph, wide.args[0], node.meta["val"]
    with graph.inserting_before(node):
        gated = graph.call_function(product.target, product.args, {"activation": activation})
        gated.meta["val"] = value.new_empty(product.meta["val"].shape[0], value.shape[-1])
        shaped = graph.call_function(aten.reshape.default, (gated, [*wide.args[1][:-1], value.shape[-1]]))
        shaped.meta["val"] = value
    node.replace_all_uses_with(shaped)
