"""The CPU: linear algebra through XNNPACK, attention and caches through ExecuTorch's own LLM ops.

Plain PyTorch attention would lower to an ``index_put`` that copies each cache and a dozen portable kernels over all of
its slots. ``llama::update_cache`` writes in place and ``llama::custom_sdpa`` reads only what has been written, so a
step costs the same whatever ``max_seq_len`` is.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401  (registers torch.ops.llama)
import torch
from executorch.exir import (
    EdgeCompileConfig,
    ExecutorchBackendConfig,
    ExecutorchProgramManager,
    to_edge_transform_and_lower,
)
from executorch.exir.passes import MemoryPlanningPass
from torch import Tensor, nn
from torch.export import ExportedProgram

from eagle3.export.lowering.xnnpack_forms import product_rotary, tanh_gelu, use_product_norms
from eagle3.export.lowering.xnnpack_shortcuts import LinearsKept, applicable_passes
from eagle3.export.plan import Plan
from eagle3.targets.attention import KVCacheShape

DTYPE = torch.float32


class LlmOpsAttention(nn.Module):
    """See ``EagerAttention``. The caches are laid out [1, slots, kv_heads, head_dim], as the ops want them."""

    def __init__(self, shape: KVCacheShape):
        super().__init__()
        self.window, self.slots = shape.window, shape.slots
        for name in ("k_cache", "v_cache"):
            empty = torch.zeros(1, shape.slots, shape.kv_heads, shape.head_dim, dtype=shape.dtype)
            self.register_buffer(name, empty, persistent=False)

    def rows(self, input_pos: Tensor, mask: Tensor) -> tuple[int, Tensor | None, Tensor | None]:
        """First position, ring slots [1, T], additive mask [T, slots]; a full layer needs the first alone."""
        if self.window:
            additive = torch.zeros_like(mask[0, 0], dtype=torch.float32).masked_fill(~mask[0, 0], float("-inf"))
            return 0, (input_pos % self.slots)[None], additive
        start = input_pos[0].item()
        torch._check(start >= 0)
        torch._check(start + input_pos.shape[0] <= self.slots)
        return start, None, None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, rows: Any, scale: float) -> Tensor:
        start, ring, mask = rows
        for new, cache in ((key, self.k_cache), (value, self.v_cache)):
            if ring is None:
                torch.ops.llama.update_cache(new, cache, start)
            else:
                torch.ops.llama.update_cache_with_indices(new, cache, start, ring)
        causal = mask is None
        return torch.ops.llama.custom_sdpa(query, self.k_cache, self.v_cache, start, mask, 0.0, causal, scale)


attention = LlmOpsAttention


def check(plan: Plan) -> None:
    """Every machine lowers to the CPU."""


def prepare(speculator: nn.Module, plan: Plan) -> None:
    """Weights stay as they are."""


def describe(programs: Mapping[str, ExportedProgram], plan: Plan) -> dict[str, Any]:
    return {}


@contextmanager
def tracing(speculator: nn.Module, plan: Plan) -> Iterator[None]:
    """What a trace for this backend needs of the module: norms, rotary embeddings and GELUs in XNNPACK's form."""
    use_product_norms(speculator)
    head_dims = {module.k_cache.shape[-1] for module in speculator.modules() if isinstance(module, LlmOpsAttention)}
    with product_rotary(speculator, head_dims), tanh_gelu(speculator):
        yield


def lower(
    programs: Mapping[str, ExportedProgram], constant_methods: Mapping[str, Any], plan: Plan
) -> ExecutorchProgramManager:
    """One program of all methods, whose mutable buffers (the caches) are the same memory in each."""
    with applicable_passes():
        lowered = to_edge_transform_and_lower(
            dict(programs),
            partitioner=[LinearsKept()],
            compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
            constant_methods=dict(constant_methods),
        )
    return lowered.to_executorch(
        ExecutorchBackendConfig(
            memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False, share_mutable_buffers=True),
            emit_mutable_buffer_names=True,
        )
    )
