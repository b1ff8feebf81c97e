"""Decomposes a traced program node by node. The resulting program is the same as PyTorch's; this way is faster.

PyTorch decomposes a program by running all of it twice through three layers of tracing. With dynamic lengths that takes
as long as the trace itself. Here, a node that a decomposition changes is traced alone, and the trace is reused for all
similar nodes. Every other node is copied. If a program has a part that only a trace of the whole program can handle,
PyTorch decomposes it.
"""

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export._trace import _ignore_backend_decomps
from torch.export.exported_program import (
    _override_composite_implicit_decomp,
    _split_decomp_table_to_cia_and_python_decomp,
)
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from eagle3.export.lowering.edge.functional_graph import FunctionalGraph
from eagle3.export.lowering.edge.operator_traces import LeftToPyTorch, Traces

_INNER = torch.ops.export.access_subclass_inner_tensor.default
_COPY = torch.ops.aten.copy.default


def decomposed(program: ExportedProgram, table: dict[OpOverload, Callable]) -> ExportedProgram | None:
    """Return the same program as ``program.run_decompositions(table)``, except for the names of nodes.

    Returns None if the program has a part that only PyTorch's own function handles: an operator that changes something
    else than a whole buffer or (a part of) another operator's result, a higher-order operator, or a tensor subclass
    nested in another.
    """
    composites, operators = _split_decomp_table_to_cia_and_python_decomp(dict(table))
    fake = next((val for node in program.graph.nodes if isinstance(val := node.meta.get("val"), FakeTensor)), None)
    if fake is None:
        return None
    with ExitStack() as stack:
        stack.enter_context(_ignore_backend_decomps())
        stack.enter_context(fake.fake_mode)
        stack.enter_context(_override_composite_implicit_decomp(composites))
        # makes the kept operators stay inside the decompositions of other operators too
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(torch.no_grad())
        try:
            return _Decomposition(program, Traces(composites, operators)).run()
        except LeftToPyTorch:
            return None


class _Decomposition:
    """Builds the decomposed program: a new graph with its weights and inputs."""

    def __init__(self, program: ExportedProgram, traces: Traces):
        self.program = program
        self.new = FunctionalGraph(program.graph, program.graph_signature.inputs_to_buffers, traces)
        self.state = dict(program.state_dict)
        self.inputs: list[InputSpec] = []
        self.inner: dict[tuple[Node, str], Node] = {}

    def run(self) -> ExportedProgram:
        nodes = list(self.program.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        placed = zip(placeholders, self.program.graph_signature.input_specs, strict=True)
        for node, spec in sorted(placed, key=_by_module(self.program.graph_signature.input_specs)):
            self._place(node, spec)
        for node in nodes[len(placeholders) : -1]:
            if node.op != "call_function":
                raise LeftToPyTorch
            if node.target is _INNER:
                self.new.now[node] = self.inner[node.args]
            else:
                self.new.add(node)
        outputs = self._finish(nodes[-1])
        module = GraphModule(self.program.graph_module, self.new.graph)
        module.meta.update(self.program.graph_module.meta)
        return ExportedProgram(
            root=module,
            graph=module.graph,
            graph_signature=ExportGraphSignature(self.inputs, outputs),
            state_dict=self.state,
            range_constraints=self.program.range_constraints,
            module_call_graph=self.program.module_call_graph,
            example_inputs=self.program.example_inputs,
            constants=self.program.constants,
        )

    def _place(self, node: Node, spec: InputSpec) -> None:
        """Add an input. A parameter of a tensor subclass becomes one input for each tensor in it, with PyTorch's
        names."""
        if spec.kind in (InputKind.TOKEN, InputKind.CUSTOM_OBJ):
            raise LeftToPyTorch
        weight = self.state.get(spec.target)
        if not isinstance(weight, Tensor) or not is_traceable_wrapper_subclass(weight):
            self.new.now[node] = self.new.graph.node_copy(node)
            self.inputs.append(spec)
            return
        if spec.kind != InputKind.PARAMETER or any(user.target is not _INNER for user in node.users):
            raise LeftToPyTorch
        del self.state[spec.target]
        owner, _, attribute = spec.target.rpartition(".")
        for number, name in enumerate(weight.__tensor_flatten__()[0]):
            inner = getattr(weight, name)
            if type(inner) is not Tensor:
                raise LeftToPyTorch
            target = f"{owner}.parametrizations.{attribute}.original{number}".lstrip(".")
            placed = self.new.graph.placeholder(f"p_{target.replace('.', '_')}")
            placed.meta = {**node.meta, "val": getattr(node.meta["val"], name)}
            self.inner[node, name] = placed
            self.state[target] = Parameter(inner, requires_grad=weight.requires_grad)
            self.inputs.append(InputSpec(spec.kind, TensorArgument(placed.name), target, spec.persistent))

    def _finish(self, output: Node) -> list[OutputSpec]:
        """Add the output node, with changed buffers first, and return the specifications of its parts."""
        buffers = [spec.target for spec in self.inputs if spec.target in self.new.changed]
        results = map_arg(output.args[0], lambda each: self.new.value(each, output))
        written = [self.new.changed[buffer] for buffer in buffers]
        placed = self.new.graph.output((*written, *results))
        placed.meta = dict(output.meta)
        self.new.graph.eliminate_dead_code()
        for value in written:  # as PyTorch does, since the program copies its outputs to the buffers anyway
            if value.target is _COPY:
                value.replace_all_uses_with(value.args[1])
                self.new.graph.erase_node(value)
        written, results = placed.args[0][: len(buffers)], placed.args[0][len(buffers) :]
        specs = [
            OutputSpec(OutputKind.BUFFER_MUTATION, TensorArgument(value.name), buffer)
            for value, buffer in zip(written, buffers, strict=True)
        ]
        for spec, result in zip(self.program.graph_signature.output_specs, results, strict=True):
            if spec.kind != OutputKind.USER_OUTPUT or not isinstance(spec.arg, TensorArgument):
                raise LeftToPyTorch
            specs.append(OutputSpec(spec.kind, TensorArgument(result.name), spec.target))
        return specs


def _by_module(specs: list[InputSpec]) -> Callable[[tuple[Node, InputSpec]], tuple]:
    """Return a sort key that puts inputs into PyTorch's order: parameters, then buffers, then the rest. A module's own
    inputs come before those of its submodules, and modules are ordered by their first input."""
    ranks: dict[str, int] = {}
    for spec in specs:
        parts = (spec.target or "").split(".")
        for length in range(1, len(parts)):
            ranks.setdefault(".".join(parts[:length]), len(ranks))

    def key(placed: tuple[Node, InputSpec]) -> tuple:
        kind, target = placed[1].kind, placed[1].target
        if kind not in (InputKind.PARAMETER, InputKind.BUFFER):
            return 2, ()
        parts = target.split(".")
        modules = [ranks[".".join(parts[:length])] + 1 for length in range(1, len(parts))]
        if is_traceable_wrapper_subclass(placed[0].meta["val"]):
            modules.append(len(ranks) + 1)  # the tensors of a subclass count as a separate submodule, the last one
        return kind is InputKind.BUFFER, (*modules, 0)

    return key
