"""Lowers traced methods to a program in which each method is one delegate for MLX."""

from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from executorch.exir import EdgeCompileConfig, EdgeProgramManager, ExecutorchProgramManager, to_edge_transform_and_lower
from executorch.exir.dialects.edge._ops import EdgeOpOverload
from torch import Tensor
from torch.export import ExportedProgram

from eagle3.export.lowering.edge.replays import repeated_alone
from eagle3.export.lowering.gc_tuning import collected_rarely
from eagle3.export.lowering.mlx.forms import complete_arguments
from eagle3.export.lowering.mlx.generated import use_generated
from eagle3.export.lowering.xnnpack.bookkeeping import code_on_call, without_stacks
from eagle3.export.patching.patches import original, replaced

CONSTANT = "executorch.backends.mlx.builder.program_builder.MLXProgramBuilder.make_or_get_constant"
DELEGATE = "executorch_call_delegate"


def lower(
    programs: Mapping[str, ExportedProgram],
    constant_methods: Mapping[str, Any],
    outside: MutableMapping[str, list[str]] | None = None,
) -> ExecutorchProgramManager:
    """Lower all methods to one program.

    Args:
        outside: takes the operations that MLX does not compute, by method; they are left to ExecuTorch's kernels

    Raises:
        ValueError: there are such operations, and no ``outside``
    """
    use_generated()
    from executorch.backends.mlx import MLXPartitioner

    for program in programs.values():
        complete_arguments(program)
    constants = replaced(CONSTANT, _with_dtype(original(CONSTANT)))
    with constants, collected_rarely(), code_on_call(), without_stacks(), repeated_alone(decompose_by_node=False):
        lowered = to_edge_transform_and_lower(
            dict(programs),
            partitioner=[MLXPartitioner()],
            compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
            constant_methods=dict(constant_methods),
        )
        for name in programs:
            if outside is None:
                check_one_delegate(lowered, name)
            elif found := set(operations(lowered, name)) - {DELEGATE}:
                outside[name] = sorted(found)
        return lowered.to_executorch()


def _with_dtype(make: Callable[[Any, str, Tensor], Any]) -> Callable[[Any, str, Tensor], Any]:
    """Return ``make_or_get_constant`` with the dtype in a scalar's name. ExecuTorch names a scalar by its value, so
    that all operations read the constant that the first one made."""

    def made(builder: object, name: str, tensor: Tensor) -> object:
        dtype = f"_{str(tensor.dtype).removeprefix('torch.')}" if name.startswith("_scalar_") else ""
        return make(builder, name + dtype, tensor)

    return made


def check_one_delegate(lowered: EdgeProgramManager, name: str) -> None:
    """Raise ValueError unless the method ``name`` is one delegate and nothing else."""
    found = operations(lowered, name)
    outside = sorted(set(found) - {DELEGATE})
    if outside or found[DELEGATE] != 1:
        rest = f", and these operations outside of them: {', '.join(outside)}" if outside else ""
        raise ValueError(
            f"{name} has {found[DELEGATE]} delegates for MLX{rest}; it must be one, since delegates share no caches: "
            "this target or head cannot be exported for --backend mlx yet; type --allow-fallback to leave these to "
            "ExecuTorch's own kernels, which this machine cannot check"
        )


def operations(lowered: EdgeProgramManager, name: str) -> Counter[str]:
    """Count the operations of a method by name, such as "aten::cumsum". A delegate is one."""
    calls = (node.target for node in lowered.exported_program(name).graph.nodes if node.op == "call_function")
    names = (call.name() if isinstance(call, EdgeOpOverload) else str(call) for call in calls)
    return Counter(name for name in names if "getitem" not in name)
