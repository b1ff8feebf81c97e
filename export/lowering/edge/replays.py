"""Makes ExecuTorch's passes skip work that changes nothing. The resulting program is the same.

Each pass builds a new graph from the old one and computes every node's shapes again, which takes half a millisecond a
node with dynamic lengths. Most passes change few nodes or none. This module avoids the work in four ways:

- A pass whose ``call_operator`` changes no node returns the graph as it is.
- A node keeps its value if a pass repeats the call that computed it, or if the new value has the same shape, strides
  and dtype. The nodes after it then repeat their calls too.
- The operators that a decomposition may keep are listed with one query of PyTorch's dispatcher instead of one for each
  namespace of operators.
- For the CPU, a program is decomposed once instead of twice, since both decompositions of ExecuTorch make it
  functional, and it is decomposed node by node (``decompositions.py``). Programs for CUDA hold Triton kernels, which
  only PyTorch's own decomposition handles.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
import torch._export.utils as _export_utils
from executorch.exir.delegate import executorch_call_delegate
from executorch.exir.dialects.edge._ops import EdgeOpOverload
from executorch.exir.lowered_backend_module import LoweredBackendModule
from executorch.exir.pass_base import ExportPass, NodeMetadata, ProxyValue
from executorch.exir.passes.legalize_portable_dim_order_pass import LegalizePortableDimOrderPass
from executorch.exir.passes.normalize_transpose_pass import NormalizeTransposePass
from executorch.exir.passes.remove_mixed_type_operators import RemoveMixedTypeOperators
from executorch.exir.passes.replace_broken_ops_with_function_ops_pass import ReplaceBrokenOpsWithFunctionalOpsPass
from executorch.exir.passes.scalar_to_tensor_pass import ScalarToTensorPass
from executorch.exir.passes.sym_to_tensor_pass import SymToTensorPass
from torch._export.pass_base import ProxyValue as ExportsProxyValue
from torch._ops import OperatorBase, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg
from torch.fx.passes.infra.pass_base import PassResult
from torch.utils import _pytree as pytree

from eagle3.export.lowering.edge.decompositions import decomposed as decomposed_by_node
from eagle3.export.lowering.edge.operator_traces import description
from eagle3.export.patching.patches import all_replaced, original, replaced

BASES = (
    "executorch.exir.pass_base._ExportPassBase",
    "torch._export.pass_base._ExportPassBaseDeprecatedDoNotUse",
)
CALL = "computed by"
"""The key in a node's ``meta`` under which the call that computed its ``val`` is stored. Passes that edit a graph in
place leave both unchanged."""
DECOMPOSE = "torch.export.ExportedProgram.run_decompositions"
COMPOSITES = "_collect_all_valid_cia_ops"
QUERY = "torch._export.utils._materialize_cpp_cia_ops"
BY_NODE = (
    NormalizeTransposePass,
    ReplaceBrokenOpsWithFunctionalOpsPass,
    ScalarToTensorPass,
    SymToTensorPass,
    RemoveMixedTypeOperators,
    LegalizePortableDimOrderPass,
)
"""Passes that consist only of ``call_operator``, which depends on one node and keeps no state."""


class _Changed(Exception):
    """Raised when a pass would change a node."""


@contextmanager
def repeated_alone(decompose_by_node: bool) -> Iterator[None]:
    """Make ExecuTorch's passes compute only what they change."""
    call, decompose = original(f"{BASES[0]}.call"), original(DECOMPOSE)

    def called(self: ExportPass, graph_module: GraphModule) -> PassResult:
        if type(self) in BY_NODE and leaves_as_it_is(self, graph_module):
            return PassResult(graph_module, False)
        return call(self, graph_module)

    def decomposed(self: ExportedProgram, table: dict | None = None, **options: Any) -> ExportedProgram:
        by_node = None
        if decompose_by_node and table is not None and not options:
            if type(table) is dict and not table:
                return self
            by_node = decomposed_by_node(self, table)
        program = by_node or decompose(self, table, **options)
        for node in program.graph.nodes:
            if node.op == "call_function":
                node.meta[CALL] = _call(node)
        return program

    replacements: dict[str, Callable] = {f"{BASES[0]}.call": called, DECOMPOSE: decomposed}
    if decompose_by_node:
        replacements["executorch.exir.program._program.contains_any_call_fn_target_op"] = lambda *_: True
    for base in BASES:
        replacements |= _repeating(base)
    for module in ("exported_program", "decomp_utils"):
        replacements[f"torch.export.{module}.{COMPOSITES}"] = _composites
    with all_replaced(replacements):
        yield


def _composites() -> set[OperatorBase]:
    """Return what PyTorch's function of this name returns: the operators that a decomposition may keep."""
    original(QUERY)()
    with replaced(QUERY, lambda: None):
        return _export_utils._collect_all_valid_cia_ops()


def _repeating(base: str) -> dict[str, Callable]:
    """Return the patches, by name, that make passes derived from ``base`` reuse the values of unchanged nodes."""
    run_node, fx = f"{base}.ExportInterpreter.run_node", f"{base}._fx"
    originally_ran, originally = original(run_node), original(fx)

    def ran(self: ExportPass.ExportInterpreter, node: Node) -> object:
        self.callback.repeated = node
        return originally_ran(self, node)

    def repeated(
        self: ExportPass, kind: str, target: object, args: tuple, kwargs: dict, meta: NodeMetadata
    ) -> ProxyValue:
        node, interpreter = getattr(self, "repeated", None), self.interpreter
        if kind != "call_function" or node is None:
            return originally(self, kind, target, args, kwargs, meta)
        call = _aten(target), *pytree.tree_map(_data, (args, kwargs))
        if "val" in node.meta:
            is_new = target is executorch_call_delegate and CALL not in node.meta
            value = _outputs(node, call[1][0]) if is_new else node.meta["val"]
            self.interpreter = _Known(interpreter, value, is_new or _same(call, node.meta.get(CALL)))
        try:
            made = originally(self, kind, target, args, kwargs, meta)
        finally:
            self.interpreter = interpreter
        made.node.meta[CALL] = call
        return made

    return {run_node: ran, fx: repeated}


def _outputs(node: Node, delegate: LoweredBackendModule) -> object:
    """Return the values of a new delegate's node without running the delegate's operations. Values of buffers that the
    delegate changes are left out, since it does not return them."""
    program = delegate.original_module
    results = zip(program.graph.output_node().args[0], program.graph_signature.output_specs, strict=True)
    kept = [result.meta["val"] for result, spec in results if spec.kind is OutputKind.USER_OUTPUT]
    return node.meta["val"] if len(kept) == len(node.meta["val"]) else type(node.meta["val"])(kept)


class _Known:
    """Interprets nodes. It returns the known ``value`` for the call that made it (``is_its``), and also if the new
    value has the same description."""

    def __init__(self, interpreter: Interpreter, value: object, is_its: bool):
        self.interpreter, self.value, self.is_its = interpreter, value, is_its

    def call_function(self, *call: Any) -> object:
        if self.is_its:
            return self.value
        found = self.interpreter.call_function(*call)
        return self.value if _is_alike(found, self.value) else found


def leaves_as_it_is(self: ExportPass, graph_module: GraphModule) -> bool:
    """Return True if a pass of ``BY_NODE`` would change no node. Its ``call_operator`` is called for each node."""
    values = {
        node: _value(node) if node.op == "get_attr" else ProxyValue(_value(node), node)
        for node in graph_module.graph.nodes
    }

    def recorded(_kind: str, target: object, args: tuple, kwargs: dict, _meta: NodeMetadata) -> object:
        if target is not node.target or not _same(args, given[0]) or not _same(kwargs, given[1]):
            raise _Changed
        return values[node]

    self._fx = recorded
    try:
        for node in graph_module.graph.nodes:
            if node.op == "call_function" and not _same(_call(node), node.meta.get(CALL)):
                return False  # the node was edited, so its value may have changed
            if isinstance(node.target, OpOverload | EdgeOpOverload):
                given = map_arg((node.args, node.kwargs), values.__getitem__)
                if self.call_operator(node.target, *given, NodeMetadata(node.meta)) is not values[node]:
                    return False
    except _Changed:
        return False
    finally:
        del self._fx
    return True


def _call(node: Node) -> tuple[object, object, object]:
    """Return the call of a node: its operator, and the values of its inputs."""
    return _aten(node.target), *map_arg((node.args, node.kwargs), _value)


def _data(value: object) -> object:
    """Return the value of a pass's proxy, of ExecuTorch's class or of torch.export's; return anything else
    unchanged."""
    return value.data if isinstance(value, ProxyValue | ExportsProxyValue) else value


def _value(node: Node) -> object:
    """Return the value that a pass sees for a node; for a constant that is the tensor itself."""
    if node.op == "get_attr":
        return attrgetter(node.target)(node.graph.owning_module)
    return node.meta.get("val")


def _is_alike(found: object, known: object) -> bool:
    """Return True if both values are fake tensors of the same shape, strides and dtype, and neither is a constant."""
    if not isinstance(found, FakeTensor) or not isinstance(known, FakeTensor):
        return False
    if found.fake_mode is not known.fake_mode or found.constant is not None or known.constant is not None:
        return False
    return description(found) == description(known)


def _aten(target: object) -> object:
    """Return the ATen operator of an edge-dialect operator; return anything else unchanged."""
    return target._op if isinstance(target, EdgeOpOverload) else target


def _same(found: object, wanted: object) -> bool:
    """Return True if containers hold the same values. Tensors and symbols are compared by identity, other values by
    type and value."""
    if found is wanted:
        return True
    if isinstance(found, tuple | list) and isinstance(wanted, tuple | list):
        return len(found) == len(wanted) and all(map(_same, found, wanted))
    if isinstance(found, dict) and isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(_same(found[key], wanted[key]) for key in found)
    plain = int | float | bool | str | torch.dtype | torch.device | torch.layout | torch.memory_format
    return type(found) is type(wanted) and isinstance(found, plain) and found == wanted
