"""Lowers to Apple silicon by ExecuTorch's backend for MLX, on Linux or on a Mac.

Methods of this backend share no caches. So one method computes all rows of the target, and the draft head's method has
a cache of its own (``TARGET_ROWS`` in ``eagle3.runner.contract``). Each method is one delegate.
"""

import importlib.util
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from eagle3.export.draft.loading import unfilled
from eagle3.export.lowering.backend import Backend, OnThisMachine, StandIn, files_of
from eagle3.export.lowering.covered_weights import CoveredWeights, model_bytes, quantize_covered
from eagle3.export.lowering.gc_tuning import collected_rarely
from eagle3.export.lowering.mlx.attention import MlxAttention
from eagle3.export.lowering.mlx.forms import MlxForms
from eagle3.export.lowering.mlx.recipe import Recipe, recipes
from eagle3.export.patching.tested_versions import FOR_CPU, TESTED, check_versions
from eagle3.export.planning.plan import Plan
from eagle3.runner.artifact.opening import Artifact
from eagle3.runner.contract import OUTSIDE

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from eagle3.export.output.contents import Writable
    from eagle3.export.speculator.speculator import Eagle3Speculator
    from eagle3.targets.attention import AttentionFactory

OVERHEAD = 1 << 30
"""The bytes of libraries and graphs during an export."""
BFLOAT16 = 2


class MlxBackend(OnThisMachine):
    """The backend, with the interface of ``eagle3.export.lowering.backend.Backend``."""

    dtype = torch.bfloat16
    eager_on_host = True

    @property
    def attention(self) -> "AttentionFactory":
        return MlxAttention

    def check(self, plan: Plan) -> None:
        """Raise ValueError for a group size that MLX does not take, and for untested versions."""
        check_versions(FOR_CPU, TESTED, "lowering for MLX", "")
        target, draft = recipes(plan)
        target.check("--qlinear", plan.skeleton.model)
        draft.check("--draft-qlinear", unfilled(plan.draft))

    @contextmanager
    def exact_activations(self, speculator: "Eagle3Speculator") -> Iterator[None]:
        from eagle3.export.lowering.mlx.exact import InFloat32, wide_caches

        with wide_caches(speculator), InFloat32():
            yield

    def runs_here(self) -> bool:
        return _on_apple_silicon() or importlib.util.find_spec("mlx") is not None

    def stand_in(self) -> StandIn | None:
        return None if _on_apple_silicon() else StandIn("eagle3.export.lowering.mlx.program:exact_methods", _compare)

    def export_seconds(self, _plan: Plan) -> None:
        return None

    def export_bytes(self, plan: Plan) -> int:
        """Return the bytes of the draft's weights, and of all weights as the lowering packs them."""
        held, written = _model_bytes(unfilled(plan.draft), recipes(plan)[1])
        return OVERHEAD + round(held + written + _target_bytes(plan)[1])

    def held_bytes(self, plan: Plan) -> int:
        return round(_target_bytes(plan)[0])

    def artifact_bytes(self, plan: Plan) -> int:
        return round(_target_bytes(plan)[1] + _model_bytes(unfilled(plan.draft), recipes(plan)[1])[1])

    def conversion(self, plan: Plan) -> CoveredWeights:
        from eagle3.export.lowering.mlx.quantization import KeptCodes, quantized

        recipe, skeleton = recipes(plan)[0], plan.skeleton
        if plan.kept_headers:
            return KeptCodes(skeleton.model, recipe, set(map(skeleton.key_map, plan.kept_headers)))
        return CoveredWeights(skeleton.model, recipe.covers, partial(quantized, recipe))

    def prepare(self, speculator: "Eagle3Speculator", plan: Plan) -> None:
        """Quantize the draft head as the plan says."""
        from eagle3.export.lowering.mlx.quantization import quantized

        recipe = recipes(plan)[1]
        spare = set(map(id, speculator.target.parameters()))
        quantize_covered(speculator.draft, recipe.covers, partial(quantized, recipe), spare)

    def describe(self, _programs: "Mapping[str, ExportedProgram]", plan: Plan) -> dict[str, Any]:
        target, draft = recipes(plan)
        grouped = any(each.linear != "none" for each in (target, draft))
        return {"qembedding": target.embedding} | ({"group_size": target.group} if grouped else {})

    @contextmanager
    def tracing(self, _speculator: "Eagle3Speculator", _plan: Plan) -> Iterator[None]:
        from eagle3.export.lowering.xnnpack.bookkeeping import without_stacks

        with MlxForms(), without_stacks(), collected_rarely():
            yield

    def state_access(self) -> None:
        """Return None: methods share no caches, so that none can read the state of another."""

    def lower(
        self, programs: "Mapping[str, ExportedProgram]", constant_methods: Mapping[str, Any], plan: Plan
    ) -> "tuple[dict[str, Writable], dict[str, Any]]":
        from eagle3.export.lowering.mlx.lowering import lower

        outside: dict[str, list[str]] | None = {} if plan.config.allow_fallback else None
        files = files_of(lower(programs, constant_methods, outside))
        return files, {OUTSIDE: outside} if outside else {}


BACKEND: Backend = MlxBackend()


def _on_apple_silicon() -> bool:
    return sys.platform == "darwin" and platform.machine() == "arm64"


def _compare(artifact: Artifact, speculator: "Eagle3Speculator") -> float:
    from eagle3.export.lowering.mlx.exact import compare
    from eagle3.export.lowering.mlx.program import methods

    return compare(methods(artifact.model), speculator, artifact.metadata)


def _model_bytes(model: nn.Module, recipe: Recipe) -> tuple[float, float]:
    """Return the bytes of a model's weights in memory, and in the file."""
    return model_bytes(model, recipe.covers, recipe.weight_bytes, BFLOAT16)


def _target_bytes(plan: Plan) -> tuple[float, float]:
    """Return the bytes of the target's weights in memory, and in the file. A kept code takes a byte in memory; in the
    file each group has a scale and an offset of 32 bits at most."""
    held, written = _model_bytes(plan.skeleton.model, recipes(plan)[0])
    for header in plan.kept_headers.values():
        groups = header.elements / (header.group or 1)
        held += header.elements * (1 - BFLOAT16) + 8 * groups
        written += header.bytes - header.elements * BFLOAT16 + 6 * groups
    return held, written
