"""Traces decompositions of single operators, each once for all nodes that call the operator on similar inputs."""

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import SymInt
from torch._export.utils import _is_cia_op, _special_op_to_preserve_cia
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

SIZE = torch.ops.aten.sym_size.int
COMPARISONS = frozenset((operator.ge, operator.le))
PLAIN = (
    frozenset((operator.getitem, operator.add, operator.sub, operator.mul, operator.neg, operator.floordiv, SIZE))
    | COMPARISONS
)
"""Targets of nodes that are not operators on tensors; these nodes are kept."""


class LeftToPyTorch(Exception):
    """Raised for a part of a program that can only be decomposed by tracing the whole program."""


class Traces:
    """Traces the decompositions of operators, and caches the traces. ``composites`` and ``operators`` are the two parts
    of PyTorch's table."""

    def __init__(self, composites: dict[OpOverload, Callable], operators: dict[OpOverload, Callable]):
        self.composites, self.operators = composites, operators
        self.traces: dict[object, Graph] = {}

    def of(self, node: Node) -> Graph | None:
        """Return the decomposition of a node: a graph whose placeholders are the node's ``inputs_of``. Returns None if
        the node is kept."""
        target = node.target
        if not self.is_decomposed(target):
            return None
        leaves, shape = pytree.tree_flatten((node.args, node.kwargs))
        inputs = {each: _Input(place) for place, each in enumerate(inputs_of(node))}
        leaves = [inputs[leaf] if isinstance(leaf, Node) else leaf for leaf in leaves]
        values = [each.meta["val"] for each in inputs]
        key = target, shape, tuple((type(leaf), leaf) for leaf in leaves), tuple(map(_described, values))
        if key not in self.traces:
            self.traces[key] = self._traced(target, leaves, shape, values)
        return self.traces[key]

    def is_decomposed(self, target: OpOverload) -> bool:
        """Return True if an operator is in one of the tables."""
        is_composite = _is_cia_op(target) and self.composites.get(target) is not _special_op_to_preserve_cia
        return is_composite or target in self.operators

    def _traced(self, target: OpOverload, leaves: list, shape: pytree.TreeSpec, values: list) -> Graph:
        def call(*given: object) -> object:
            args, kwargs = pytree.tree_unflatten(
                [given[leaf.place] if isinstance(leaf, _Input) else leaf for leaf in leaves], shape
            )
            return target(*args, **kwargs)

        graph = make_fx(call, decomposition_table=self.operators)(*values).graph
        graph.eliminate_dead_code()
        for node in graph.nodes:
            if node.op == "get_attr" or (isinstance(node.target, OpOverload) and node.target._schema.is_mutable):
                raise LeftToPyTorch
        return graph


def inputs_of(node: Node) -> list[Node]:
    """Return the nodes in a node's arguments, each once, in order."""
    return list(dict.fromkeys(leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, Node)))


def may_share(target: object) -> bool:
    """Return True if the result of an operator may share memory with its input."""
    return isinstance(target, OpOverload) and any(each.alias_info is not None for each in target._schema.returns)


def is_view(node: Node, trace: Graph | None) -> bool:
    """Return True if a node with the decomposition ``trace`` shares its input's memory."""
    if trace is None:
        return may_share(node.target)
    called = [each.target for each in trace.nodes if each.op == "call_function"]
    return all(may_share(target) or target in PLAIN for target in called) and isinstance(
        trace.output_node().args[0], Node
    )


@dataclass(frozen=True)
class _Input:
    """A placeholder in a cache key for input number ``place`` of an operator."""

    place: int


def _described(value: object) -> object:
    """Return the part of the cache key of a trace that describes one input value."""
    if isinstance(value, FakeTensor):
        return description(value)
    if isinstance(value, SymInt):
        return value.node.expr
    raise LeftToPyTorch


def description(value: FakeTensor) -> tuple:
    """Return a fake tensor's dtype, device, layout, shape, strides and offset; symbols are given by their
    expressions."""
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    exact = (size.node.expr if isinstance(size, SymInt) else size for size in sizes)
    return value.dtype, value.device, value.layout, value.requires_grad, *exact
