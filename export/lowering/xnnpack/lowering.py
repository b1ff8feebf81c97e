"""Lowers eager modules to a program with delegates for the CPU: rewrites them for tracing, lowers the traces, and plans
memory."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from executorch.exir import (
    EdgeCompileConfig,
    ExecutorchProgramManager,
    to_edge_transform_and_lower,
)
from torch import nn
from torch.export import ExportedProgram

from eagle3.export.lowering.edge.replays import repeated_alone
from eagle3.export.lowering.gc_tuning import collected_rarely
from eagle3.export.lowering.xnnpack.bookkeeping import code_on_call, without_stacks
from eagle3.export.lowering.xnnpack.forms import product_rotary, rows_before_heads, tanh_gelu, use_product_norms
from eagle3.export.lowering.xnnpack.full_attention import FullAttention
from eagle3.export.lowering.xnnpack.llm_ops_attention import LlmOpsAttention
from eagle3.export.lowering.xnnpack.partition import LevelPartitioner
from eagle3.export.lowering.xnnpack.recurrent import use_cpu_recurrence
from eagle3.export.lowering.xnnpack.redundant import computed_once, remove_no_ops
from eagle3.export.lowering.xnnpack.shortcuts import applicable_passes
from eagle3.export.lowering.xnnpack.split_k import split_wide_linears, splits
from eagle3.export.lowering.xnnpack.used_slots import planned
from eagle3.export.lowering.xnnpack.weight_names import scales_in_names


@contextmanager
def tracing(model: nn.Module, rows: int) -> Iterator[None]:
    """Prepare ``model`` for a trace: rewrite norms, rotary embeddings and GELUs for XNNPACK, and choose matrix products
    that suit a verify window of ``rows``."""
    use_product_norms(model)
    use_cpu_recurrence(model)
    if splits():
        split_wide_linears(model, rows)
    kinds = (FullAttention, LlmOpsAttention)
    head_dims = {module.shape.head_dim for module in model.modules() if isinstance(module, kinds)}
    with (
        product_rotary(model, head_dims),
        rows_before_heads(model),
        tanh_gelu(model),
        collected_rarely(),
        without_stacks(),
    ):
        yield


def lower(programs: Mapping[str, ExportedProgram], constant_methods: Mapping[str, Any]) -> ExecutorchProgramManager:
    """Lower all methods to one program, in which each mutable buffer (cache) has the same memory in all methods."""
    for program in programs.values():
        remove_no_ops(program)
    with (
        collected_rarely(),
        code_on_call(),
        without_stacks(),
        repeated_alone(decompose_by_node=True),
        applicable_passes(),
        scales_in_names(),
    ):
        lowered = to_edge_transform_and_lower(
            dict(programs),
            transform_passes=[computed_once()],
            partitioner=[LevelPartitioner()],
            compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
            constant_methods=dict(constant_methods),
        )
        return lowered.to_executorch(planned())
