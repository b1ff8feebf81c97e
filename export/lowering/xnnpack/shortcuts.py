"""Makes ExecuTorch's lowering to XNNPACK take less time and memory; the resulting program is the same. With dynamic
lengths each pass over a graph takes seconds on one core. Passes that cannot change a program of linear layers
(dynamically quantized or not) and elementwise operations are left out.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from executorch.backends.xnnpack import _passes as passes
from executorch.backends.xnnpack._passes import XNNPACKPassManager
from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.dialects._ops import ops as exir_ops
from torch import Tensor
from torch._export.pass_base import PassType
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from eagle3.export.patching.patches import all_replaced

_FOR_OTHER_GRAPHS = (
    passes.ConvertToUpsampleBilinear2d,
    passes.ConvertToSDPAPass,
    passes.FuseBatchNormPass,
    passes.DecomposeBatchNorm,
    passes.InsertPadQDQPass,
    passes.Conv1dUnsqueezePass,
    passes.PReLUReshapePass,
    passes.DimOrderOpsRevertPass,
    passes.PropagateCustomMetaPass,
    passes.RemoveGetItemPass,
)


_EDGE = exir_ops.edge.aten
_LOOKS_FOR = {
    passes.XNNPACKRemoveCloneOpsTransform: passes.XNNPACKRemoveCloneOpsTransform.clone_ops,
    passes.ConvertToLinearPass: passes.ConvertToLinearPass.targets,
    passes.FuseActivationPass: passes.FuseActivationPass.FUSEABLE_ACTIVATIONS,
    passes.DecomposeConcatenate: (_EDGE.cat.default,),
    passes.ChannelsLastTaggedReshapePass: (
        *passes.ChannelsLastTaggedReshapePass.memory_sensitive_ops_nhwc,
        _EDGE._to_copy.default,
    ),
    passes.RemoveRedundantCopyPass: (_EDGE._to_copy.default,),
}
"""Maps each pass to the operators that it may change."""


class _SharedBytes(NamedDataStore):
    """A store of named data that keeps equal bytes in memory only once, for all delegates of all methods. The name of
    the data is its hash."""

    def __init__(self, pool: dict[str, bytes]):
        super().__init__()
        self.pool = pool

    def add_named_data(self, key: str, data: bytes, *args: Any, **kwargs: Any) -> None:
        super().add_named_data(key, self.pool.setdefault(key, data), *args, **kwargs)


class _Passes(XNNPACKPassManager):
    passes: list[type[PassType]]

    def __init__(self, exported_program: ExportedProgram, passes: list[type[PassType]] | None = None):
        super().__init__(exported_program, passes)
        self.passes = [each for each in self.passes if each not in _FOR_OTHER_GRAPHS]

    def transform(self) -> ExportedProgram:
        """Run only the passes that may change the program, since each pass builds a new graph even if it changes
        nothing."""
        graph = self.exported_program.graph
        targets = {node.target for node in graph.nodes}
        self.passes = [each for each in self.passes if _may_change(each, graph, targets)]
        return super().transform()


def _may_change(each: type, graph: Graph, targets: set) -> bool:
    """Return True if a graph has an operator that a pass changes. No pass changes an operator that an earlier one
    adds."""
    if each is passes.ConstPropPass:
        return any(node.op == "call_function" and not node.all_input_nodes for node in graph.nodes)
    if each is passes.ChannelsLastTaggedReshapePass and any(map(_channels_last, graph.nodes)):
        return True
    return each not in _LOOKS_FOR or not targets.isdisjoint(_LOOKS_FOR[each])


def _channels_last(node: Node) -> bool:
    value = node.meta.get("val")
    is_image = isinstance(value, Tensor) and value.dim() == 4
    return is_image and passes.ChannelsLastTaggedReshapePass._is_nhwc_tensor(value)


def _copied_without_weights(program: ExportedProgram, _specs: list[CompileSpec]) -> ExportedProgram:
    """Copy a program without its weights. ExecuTorch copies a delegate's program with its weights before the passes,
    but the passes that are run here change no weight."""
    weights = (*program.state_dict.values(), *program.constants.values())
    return copy.deepcopy(program, {id(weight): weight for weight in weights})


def _sorted_in_place(module: GraphModule) -> GraphModule:
    """Sort the graph topologically in place. For each delegate, ExecuTorch makes a sorted copy of the whole graph and
    generates its Python code, which takes two thirds of the time of an export of 32 layers. Only the order is
    needed."""
    stable_topological_sort(module.graph)
    return module


@contextmanager
def applicable_passes() -> Iterator[None]:
    """Make XNNPACK's preprocessing keep each weight once for all methods. It also skips the passes for convolutions,
    batch norms, pooling, quantized padding, dim orders and constants in separate files."""
    stores = partial(_SharedBytes, {})
    preprocess = "executorch.backends.xnnpack.xnnpack_preprocess."
    with all_replaced(
        {
            "executorch.exir.lowered_backend_module.legalize_graph": _sorted_in_place,
            f"{preprocess}XNNPACKPassManager": _Passes,
            f"{preprocess}NamedDataStore": stores,
            f"{preprocess}XnnpackBackend.copy_exported_program_for_preprocess": _copied_without_weights,
        }
    ):
        yield
