"""Turns a graph with operators that change their inputs into one without, with the same result as PyTorch.

An operator that changes a buffer returns the new value instead. A view of a changed value is computed again where it is
used next.
"""

import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import SymInt, Tensor
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch._library.utils import mutated_args_kwargs
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.fx.traceback import NodeSource, NodeSourceAction

from eagle3.export.lowering.edge.operator_traces import (
    COMPARISONS,
    PLAIN,
    SIZE,
    LeftToPyTorch,
    Traces,
    inputs_of,
    is_view,
    may_share,
)

_ATEN = torch.ops.aten
_NOTHING: Mapping[Node, Node] = MappingProxyType({})
_RENAMED = {_ATEN.item.default: _ATEN._local_scalar_dense.default}
"""The operator ``item``. It cannot be traced alone, since each trace makes a new unknown number."""
_SCATTER = {_ATEN.slice.Tensor: _ATEN.slice_scatter.default, _ATEN.select.int: _ATEN.select_scatter.default}
"""Operators that return a part of a tensor, to those that return a tensor with another part."""
_OPAQUE = frozenset((_ATEN.lift_fresh_copy.default, _ATEN.lift_fresh.default))
"""Operators whose trace depends on the operator that made their input."""


class FunctionalGraph:
    """Builds ``graph`` by adding the nodes of another graph one after the other. ``now`` maps an old node to the new
    node with its value, and ``same`` maps a node to another node with the same value. ``views`` maps each possible view
    of a value that some operator changes to its base and to the nodes that lead from the base to it. ``generation``
    counts how often a base was changed, and ``made_at`` holds the generation at which a view was computed. ``buffers``
    are the names of the old placeholders. ``changed`` maps the name of a buffer to the node that holds its final value.
    """

    def __init__(self, old: Graph, buffers: Mapping[str, str], traces: Traces):
        self.graph, self.traces, self.buffers = Graph(), traces, buffers
        self.now: dict[Node, Node | tuple[Node, ...]] = {}
        self.same: dict[Node, Node] = {}
        self.views: dict[Node, tuple[Node, tuple[Node, ...]]] = {}
        self.generation = {_base(_changed(node)): 0 for node in old.nodes if _is_changing(node.target)}
        self.made_at: dict[Node, int] = {}
        self.numbers: dict[object, Node] = {}
        self.changed: dict[str, Node] = {}

    def add(self, node: Node) -> None:
        """Add an operator.

        Raises:
            LeftToPyTorch: the operator can only be traced with all others
        """
        target = node.target
        if target is operator.getitem and isinstance(self.now.get(node.args[0]), tuple | list):
            self.now[node] = self.now[node.args[0]][node.args[1]]
        elif target in PLAIN or target in _RENAMED:
            self.now[node] = self._plain(node)
        elif not isinstance(target, OpOverload) or target in _OPAQUE:
            raise LeftToPyTorch
        elif _is_changing(target):
            self._change(node)
        else:
            self._compute(node)

    def value(self, node: Node, user: Node) -> Node:
        """Return the new node that has the value of the old ``node``, for use in ``user``."""
        node = self.same.get(node, node)
        if node in self.views:
            base, steps = self.views[node]
            if self.made_at[node] != self.generation[base]:
                self.made_at[node] = self.generation[base]
                value = self.now[base]
                for step in steps:
                    values = self._values_for(user, {step.all_input_nodes[0]: value})
                    value = self._emitted(step, self.traces.of(step), values, user)
                self.now[node] = value
        return self.now[node]

    def _values_for(self, user: Node, known: Mapping[Node, Node] = _NOTHING) -> Callable[[Node], Node]:
        """Return a function that maps an old node to the new node for use in ``user``; nodes in ``known`` are looked up
        there."""
        return lambda each: known[each] if each in known else self.value(each, user)

    def _plain(self, node: Node) -> Node:
        """Add a node that is not an operator on tensors. A number that the graph already computes is reused, except in
        asserts, which PyTorch adds last."""
        number = node.meta["val"]
        for_asserts = node.target is not SIZE and all(user.target in COMPARISONS for user in node.users)
        if isinstance(number, SymInt) and node.target is not SIZE and not for_asserts:
            known = self.numbers.get(number.node.expr)
            if known is not None:
                return known
        copied = self._copied(node, self._values_for(node), node)
        copied.target = _RENAMED.get(node.target, node.target)
        return copied if for_asserts else self._noted(copied)

    def _compute(self, node: Node) -> None:
        """Add an operator that changes no input. A view of a changed value is not added before its first use."""
        parent = next(iter(node.all_input_nodes), None)
        parent = self.same.get(parent, parent)
        trace = self.traces.of(node)
        if (parent in self.views or parent in self.generation) and is_view(node, trace):
            if trace is not None and trace.output_node().args[0].op == "placeholder":
                self.same[node] = parent
                return
            base, steps = self.views.get(parent, (parent, ()))
            self.views[node], self.made_at[node] = (base, (*steps, node)), 0
            if self.generation[base] > 0:
                return
        self.now[node] = self._emitted(node, trace, self._values_for(node), node)

    def _emitted(
        self, node: Node, trace: Graph | None, value: Callable[[Node], Node], origin: Node
    ) -> Node | tuple[Node, ...]:
        """Add the decomposition of a node, its ``trace``, with the metadata of ``origin``."""
        if trace is None:
            return self._copied(node, value, origin)
        inputs = dict(zip((each for each in trace.nodes if each.op == "placeholder"), inputs_of(node), strict=True))
        late = {each for each, of in inputs.items() if self._is_late(of)}
        now: dict[Node, Node] = {}

        def value_of(each: Node) -> Node:
            if each in inputs:
                return value(inputs[each])
            if each not in now:
                args, kwargs = map_arg((each.args, each.kwargs), value_of)
                now[each] = self._noted(self._made(each.target, args, kwargs, origin))
            return now[each]

        for each in trace.nodes:
            if each.op != "call_function":
                continue
            size = each.meta.get("val")
            if isinstance(size, SymInt) and size.node.expr in self.numbers:
                now[each] = self.numbers[size.node.expr]
            elif each.target is SIZE:
                now[each] = self._size(size)
            elif each.args and each.args[0] in late and may_share(each.target):
                late.add(each)
            else:
                value_of(each)
        return map_arg(trace.output_node().args[0], value_of)

    def _is_late(self, node: Node) -> bool:
        """Return True if a node is a view of a value that was changed after the view was made."""
        base, _ = self.views.get(self.same.get(node, node), (None, ()))
        return base is not None and self.generation[base] > 0

    def _size(self, size: SymInt) -> Node:
        """Add a node, before all others, that reads a size from the first input that has it, as PyTorch does."""
        placeholders = self.graph.find_nodes(op="placeholder")
        for node in placeholders:
            shape = node.meta["val"].shape if isinstance(node.meta["val"], Tensor) else ()
            for dim, found in enumerate(shape):
                if isinstance(found, SymInt) and found.node.expr == size.node.expr:
                    with self.graph.inserting_after(placeholders[-1]):
                        made = self.graph.call_function(SIZE, (node, dim))
                    made.meta["val"] = found
                    return self._noted(made)
        raise LeftToPyTorch

    def _copied(self, node: Node, value: Callable[[Node], Node], origin: Node) -> Node:
        copied = self.graph.node_copy(node, value)
        # the trace already contains the tuple's parts
        of = node.args[0] if node.target is operator.getitem else origin
        copied.meta["from_node"] = [_source(of)]
        return copied

    def _made(self, target: Callable, args: tuple, kwargs: dict, origin: Node) -> Node:
        """Add a node with the metadata of ``origin``."""
        made = self.graph.call_function(target, args, kwargs)
        values = map_arg((args, kwargs), lambda node: node.meta["val"])
        made.meta = {**origin.meta, "from_node": [_source(origin)], "val": target(*values[0], **values[1])}
        # these are the values of the origin's inputs, not of this node's
        made.meta.pop("eager_input_vals", None)
        if origin.op == "output":
            del made.meta["from_node"]
        return made

    def _decomposed(self, made: Node, origin: Node) -> Node:
        """Return the decomposition, with the metadata of ``origin``, of a new node, which it replaces."""
        trace = self.traces.of(made)
        if trace is None:
            return made
        result = self._emitted(made, trace, lambda each: each, origin)
        self.graph.erase_node(made)
        return result

    def _noted(self, node: Node) -> Node:
        size = node.meta.get("val")
        if isinstance(size, SymInt):
            self.numbers.setdefault(size.node.expr, node)
        return node

    def _change(self, node: Node) -> None:
        """Replace an operator that changes its input by one that returns the new value, as PyTorch does."""
        changed = self.same.get(_changed(node), _changed(node))
        if changed in self.views:
            self._change_part(node, changed)
            return
        buffer = self.buffers.get(changed.name)
        if node.target.namespace == "aten":
            self.now[changed] = self._returned(node, changed)
            self.same[node] = changed
            if buffer is not None:
                self.changed[buffer] = self.now[changed]
        elif buffer is None or node.users:
            raise LeftToPyTorch
        else:
            arguments = [argument.name for argument in node.target._schema.arguments]
            name = arguments[_changed_place(node)]
            given = dict(zip(arguments, node.args, strict=False)) | node.kwargs
            del given[name]
            given = dict(map_arg(given, self._values_for(node)))
            given |= {f"_{name}_base_index": 0, "_all_bases": [self.now[changed]]}
            made = self._made(auto_functionalized_v2, (node.target,), given, node)
            self.now[changed] = self.changed[buffer] = self._made(operator.getitem, (made, 1), {}, node)
        self.generation[changed] += 1

    def _change_part(self, node: Node, changed: Node) -> None:
        """Replace a ``copy_`` into a part of an operator's result by operators that return the whole, as PyTorch
        does."""
        base, steps = self.views[changed]
        if node.target is not _ATEN.copy_.default or any(step.target not in _SCATTER for step in steps):
            raise LeftToPyTorch
        if base.op != "call_function" or may_share(base.target):
            raise LeftToPyTorch
        args, kwargs = map_arg((node.args, node.kwargs), self._values_for(node))
        part = self._made(_ATEN.copy.default, args, kwargs, node)
        filled = part.meta["val"]
        part.meta["val"] = filled.new_empty_strided(filled.shape, filled.stride())  # without the part's offset
        wholes = [self.now[base]]
        for step in steps[:-1]:
            wholes.append(self._copied(step, self._values_for(node, {step.args[0]: wholes[-1]}), node))
        for step, whole in zip(reversed(steps), reversed(wholes), strict=True):
            places, options = map_arg((step.args[1:], step.kwargs), self._values_for(node))
            part = self._decomposed(self._made(_SCATTER[step.target], (whole, part, *places), options, node), node)
        self.now[base], self.same[node] = part, changed
        self.generation[base] += 1

    def _returned(self, node: Node, changed: Node) -> Node:
        """Add the ATen operator that returns the new value of ``changed``: a whole buffer, or an operator's result."""
        operators = getattr(_ATEN, node.target.overloadpacket.__name__.removesuffix("_"), None)
        functional = getattr(operators, node.target._overloadname, None)
        if functional is None or self.traces.is_decomposed(functional):
            raise LeftToPyTorch
        computed = changed.op == "call_function" and not may_share(changed.target)
        if not computed and changed.name not in self.buffers:
            raise LeftToPyTorch
        args, kwargs = map_arg((node.args, node.kwargs), self._values_for(node))
        made = self._made(functional, args, kwargs, node)
        if made.meta["val"].dtype != changed.meta["val"].dtype:
            raise LeftToPyTorch
        return made


def _is_changing(target: object) -> bool:
    return isinstance(target, OpOverload) and target._schema.is_mutable


def _changed_place(node: Node) -> int:
    """Return the position of the argument that a node's operator changes. Raises LeftToPyTorch unless the operator
    changes exactly one tensor."""
    schema = node.target._schema
    places, names = mutated_args_kwargs(schema)
    if len(places) != 1 or names or places[0] >= len(node.args) or len(schema.returns) != 1:
        raise LeftToPyTorch
    if not isinstance(node.args[places[0]], Node):
        raise LeftToPyTorch
    return places[0]


def _changed(node: Node) -> Node:
    return node.args[_changed_place(node)]


def _base(node: Node) -> Node:
    """Return the value of which a changed node is a part, or the node itself."""
    while node.target in _SCATTER:
        node = node.args[0]
    return node


def _source(node: Node) -> NodeSource:
    return NodeSource(node, "decomposed", NodeSourceAction.CREATE)
