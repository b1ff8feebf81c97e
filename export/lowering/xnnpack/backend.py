"""The CPU: linear algebra through XNNPACK, attention and caches through ExecuTorch's own LLM ops.

Methods are one program whose caches are the same memory in each.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from executorch.exir import (
    EdgeCompileConfig,
    ExecutorchBackendConfig,
    ExecutorchProgramManager,
    to_edge_transform_and_lower,
)
from executorch.exir.passes import MemoryPlanningPass
from torch import nn
from torch.export import ExportedProgram

from eagle3.export.backends import Backend
from eagle3.export.draft.head import DraftHead
from eagle3.export.lowering.xnnpack.export_memory import export_bytes
from eagle3.export.lowering.xnnpack.forms import product_rotary, rows_before_heads, tanh_gelu, use_product_norms
from eagle3.export.lowering.xnnpack.llm_ops_attention import LlmOpsAttention
from eagle3.export.lowering.xnnpack.partition import LevelPartitioner
from eagle3.export.lowering.xnnpack.quantization import recipes
from eagle3.export.lowering.xnnpack.redundant import computed_once, remove_no_ops
from eagle3.export.lowering.xnnpack.shortcuts import applicable_passes
from eagle3.export.lowering.xnnpack.split_k import split_wide_linears
from eagle3.export.lowering.xnnpack.weight_conversion import XnnpackWeights, quantize
from eagle3.export.lowering.xnnpack.weight_names import scales_in_names
from eagle3.export.patches import FOR_CPU, TESTED, check_versions
from eagle3.export.planning.plan import Plan
from eagle3.export.speculator import Eagle3Speculator
from eagle3.targets.attention import AttentionFactory


class XnnpackBackend:
    """See ``eagle3.export.backends.Backend``."""

    dtype = torch.float32
    attention: AttentionFactory = LlmOpsAttention
    eager_on_host = True

    def check(self, plan: Plan) -> None:
        """Raise ValueError for groups that do not fit a linear, and for versions that were not tested."""
        check_versions(FOR_CPU, TESTED, "lowering for the CPU", "")
        target, draft = recipes(plan)
        target.check("--qlinear", plan.skeleton.model)
        with torch.device("meta"):
            draft.check("--draft-qlinear", DraftHead(plan.draft, max_seq_len=1))

    def runs_here(self) -> bool:
        return True

    def memory(self, _plan: Plan) -> tuple[int, str]:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine"

    def footprint(self, _plan: Plan) -> None:
        return None

    def suggest_flags(self, _plan: Plan, _has: int) -> None:
        return None

    def export_bytes(self, plan: Plan) -> int:
        return export_bytes(plan)

    def conversion(self, plan: Plan) -> XnnpackWeights:
        """The target is quantized as it is read."""
        target, _ = recipes(plan)
        return XnnpackWeights(plan.skeleton.model, target)

    def prepare(self, speculator: Eagle3Speculator, plan: Plan) -> None:
        """Quantize the draft head as the plan says."""
        _, draft = recipes(plan)
        quantize(speculator.draft, draft, spare=set(map(id, speculator.target.parameters())))

    def describe(self, _programs: Mapping[str, ExportedProgram], plan: Plan) -> dict[str, Any]:
        target, draft = recipes(plan)
        groups = target.group or draft.group
        return {"qembedding": target.embedding} | ({"group_size": groups} if groups else {})

    @contextmanager
    def tracing(self, speculator: nn.Module, plan: Plan) -> Iterator[None]:
        """What a trace for this backend needs of the module: norms, rotary embeddings and GELUs in XNNPACK's form,
        and products that suit a window's rows."""
        use_product_norms(speculator)
        split_wide_linears(speculator, plan.chain_len + 1)
        head_dims = {module.shape.head_dim for module in speculator.modules() if isinstance(module, LlmOpsAttention)}
        with product_rotary(speculator, head_dims), rows_before_heads(speculator), tanh_gelu(speculator):
            yield

    def lower(
        self, programs: Mapping[str, ExportedProgram], constant_methods: Mapping[str, Any], _plan: Plan
    ) -> tuple[ExecutorchProgramManager, dict[str, Any]]:
        """One program of all methods, whose mutable buffers (the caches) are the same memory in each."""
        for program in programs.values():
            remove_no_ops(program)
        with applicable_passes(), scales_in_names():
            lowered = to_edge_transform_and_lower(
                dict(programs),
                transform_passes=[computed_once()],
                partitioner=[LevelPartitioner()],
                compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
                constant_methods=dict(constant_methods),
            )
        program = lowered.to_executorch(
            ExecutorchBackendConfig(
                memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False, share_mutable_buffers=True),
                emit_mutable_buffer_names=True,
            )
        )
        return program, {}


BACKEND: Backend = XnnpackBackend()
