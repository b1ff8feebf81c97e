"""Lowers to the CPU: linear algebra through XNNPACK, attention and caches through ExecuTorch's own LLM ops.

All methods are in one program and share the memory of the caches.
"""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from eagle3.export.draft.loading import unfilled
from eagle3.export.lowering.backend import Backend
from eagle3.export.lowering.xnnpack.export_memory import export_bytes, held_bytes
from eagle3.export.lowering.xnnpack.recipe import recipes
from eagle3.export.patching.tested_versions import FOR_CPU, TESTED, check_versions
from eagle3.export.planning.plan import Plan

if TYPE_CHECKING:
    from pathlib import Path

    from executorch.exir import ExecutorchProgramManager
    from torch.export import ExportedProgram

    from eagle3.export.lowering.xnnpack.weight_conversion import XnnpackWeights
    from eagle3.export.speculator.speculator import Eagle3Speculator
    from eagle3.targets.attention import AttentionFactory


class XnnpackBackend:
    """The CPU backend, with the interface of ``eagle3.export.lowering.backend.Backend``. Modules that quantize and
    lower are imported only when weights are loaded, since planning does not need them."""

    dtype = torch.float32
    eager_on_host = True

    @property
    def attention(self) -> "AttentionFactory":
        from eagle3.export.lowering.gc_tuning import collected_rarely
        from eagle3.export.lowering.xnnpack.bookkeeping import tables_read_by_libyaml

        with collected_rarely(), tables_read_by_libyaml():
            from eagle3.export.lowering.xnnpack.attention import cpu_attention

        return cpu_attention

    def check(self, plan: Plan) -> None:
        """Raise ValueError for a group size that does not fit a linear, and for untested versions of packages."""
        check_versions(FOR_CPU, TESTED, "lowering for the CPU", "")
        target, draft = recipes(plan)
        target.check("--qlinear", plan.skeleton.model)
        draft.check("--draft-qlinear", unfilled(plan.draft))

    def exact_activations(self) -> AbstractContextManager[object]:
        from eagle3.export.lowering.xnnpack.quantization import ExactActivations

        return ExactActivations()

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

    def held_bytes(self, plan: Plan) -> int:
        return held_bytes(plan)

    def conversion(self, plan: Plan) -> "XnnpackWeights":
        """Return the conversion that quantizes the target as it is read."""
        from eagle3.export.lowering.xnnpack.weight_conversion import XnnpackWeights

        target, _ = recipes(plan)
        return XnnpackWeights(plan.skeleton.model, target)

    def prepare(self, speculator: "Eagle3Speculator", plan: Plan) -> None:
        """Quantize the draft head as the plan says."""
        from eagle3.export.lowering.xnnpack.weight_conversion import quantize

        _, draft = recipes(plan)
        quantize(speculator.draft, draft, spare=set(map(id, speculator.target.parameters())))

    def pack(self, _speculator: "Eagle3Speculator", _plan: Plan, _folder: "Path") -> dict[str, Any]:
        return {}

    def measured_conversion(self, plan: Plan) -> "XnnpackWeights":
        return self.conversion(plan)

    def prepare_measured(self, speculator: "Eagle3Speculator", plan: Plan) -> None:
        self.prepare(speculator, plan)

    def describe(self, _programs: "Mapping[str, ExportedProgram]", plan: Plan) -> dict[str, Any]:
        target, draft = recipes(plan)
        from eagle3.export.lowering.xnnpack.split_k import splits

        groups = target.group or draft.group
        return {"qembedding": target.embedding} | ({"group_size": groups, "split_k": splits()} if groups else {})

    def tracing(self, speculator: "Eagle3Speculator", plan: Plan) -> AbstractContextManager[None]:
        from eagle3.export.lowering.xnnpack.lowering import tracing

        return tracing(speculator, plan.verify_rows)

    def lower(
        self, programs: "Mapping[str, ExportedProgram]", constant_methods: Mapping[str, Any], _plan: Plan
    ) -> "tuple[ExecutorchProgramManager, dict[str, Any]]":
        from eagle3.export.lowering.xnnpack.lowering import lower

        return lower(programs, constant_methods), {}


BACKEND: Backend = XnnpackBackend()
