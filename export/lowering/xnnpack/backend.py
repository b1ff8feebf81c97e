"""Lowers to the CPU: linear algebra through XNNPACK, attention and caches through ExecuTorch's own LLM ops.

All methods are in one program and share the memory of the caches.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from eagle3.export.draft.loading import unfilled
from eagle3.export.lowering.backend import Backend, OnThisMachine, files_of
from eagle3.export.lowering.covered_weights import model_bytes
from eagle3.export.lowering.xnnpack.recipe import Recipe, recipes
from eagle3.export.patching.tested_versions import FOR_CPU, TESTED, check_versions
from eagle3.export.planning.plan import Plan

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from eagle3.export.lowering.xnnpack.quantization import XnnpackWeights
    from eagle3.export.output.contents import Writable
    from eagle3.export.speculator.speculator import Eagle3Speculator
    from eagle3.export.speculator.state import RowAccess
    from eagle3.targets.attention import AttentionFactory


class XnnpackBackend(OnThisMachine):
    """The CPU backend, with the interface of ``eagle3.export.lowering.backend.Backend``. Modules that quantize and
    lower are imported only when weights are loaded, since planning does not need them."""

    dtype = torch.float32
    eager_on_host = True

    @property
    def attention(self) -> "AttentionFactory":
        from eagle3.export.lowering.gc_tuning import collected_rarely
        from eagle3.export.lowering.xnnpack.bookkeeping import tables_read_by_libyaml

        with collected_rarely(), tables_read_by_libyaml():
            from eagle3.export.lowering.xnnpack.full_attention import cpu_attention

        return cpu_attention

    def check(self, plan: Plan) -> None:
        """Raise ValueError for a group size that does not fit a linear, and for untested versions of packages."""
        check_versions(FOR_CPU, TESTED, "lowering for the CPU", "")
        target, draft = recipes(plan)
        target.check("--qlinear", plan.skeleton.model)
        draft.check("--draft-qlinear", unfilled(plan.draft))

    def exact_activations(self, _speculator: "Eagle3Speculator") -> AbstractContextManager[object]:
        from eagle3.export.lowering.xnnpack.quantization import ExactActivations

        return ExactActivations()

    def runs_here(self) -> bool:
        return True

    def stand_in(self) -> None:
        return None

    def export_bytes(self, plan: Plan) -> int:
        return export_bytes(plan)

    def held_bytes(self, plan: Plan) -> int:
        return held_bytes(plan)

    def artifact_bytes(self, plan: Plan) -> int:
        return artifact_bytes(plan)

    def export_seconds(self, plan: Plan) -> float:
        size = sum(header.bytes for header in (*plan.target_headers.values(), *plan.draft.headers.values()))
        layers = plan.target_config.num_hidden_layers + plan.has_draft
        return START_SECONDS + LAYER_SECONDS * layers * len(plan.methods) + GB_SECONDS * size / 1e9

    def conversion(self, plan: Plan) -> "XnnpackWeights":
        """Return the conversion that quantizes the target as it is read."""
        from eagle3.export.lowering.xnnpack.quantization import XnnpackWeights

        target, _ = recipes(plan)
        return XnnpackWeights(plan.skeleton.model, target)

    def prepare(self, speculator: "Eagle3Speculator", plan: Plan) -> None:
        """Quantize the draft head as the plan says."""
        from eagle3.export.lowering.xnnpack.quantization import quantize

        _, draft = recipes(plan)
        quantize(speculator.draft, draft, spare=set(map(id, speculator.target.parameters())))

    def describe(self, _programs: "Mapping[str, ExportedProgram]", plan: Plan) -> dict[str, Any]:
        target, draft = recipes(plan)
        from eagle3.export.lowering.xnnpack.split_k import splits

        groups = target.group or draft.group
        return {"qembedding": target.embedding} | ({"group_size": groups, "split_k": splits()} if groups else {})

    def tracing(self, speculator: "Eagle3Speculator", plan: Plan) -> AbstractContextManager[None]:
        from eagle3.export.lowering.xnnpack.lowering import tracing

        return tracing(speculator, plan.verify_rows)

    def state_access(self) -> "RowAccess":
        from eagle3.export.lowering.xnnpack.lowering import write_rows_in_place
        from eagle3.export.speculator.state import RowAccess, read_rows

        return RowAccess(read_rows, write_rows_in_place)

    def lower(
        self, programs: "Mapping[str, ExportedProgram]", constant_methods: Mapping[str, Any], _plan: Plan
    ) -> "tuple[dict[str, Writable], dict[str, Any]]":
        from eagle3.export.lowering.xnnpack.lowering import lower

        return files_of(lower(programs, constant_methods)), {}


BACKEND: Backend = XnnpackBackend()


OVERHEAD = 1 << 30
"""The bytes of libraries, of graphs, and of the rows of a weight that are being quantized."""
GRAPH = 30_000
"""The bytes of a layer's graph in one method: 18 to 57 thousand were measured."""
FLOAT = 4
START_SECONDS, LAYER_SECONDS, GB_SECONDS = 9, 0.43, 14
"""Seconds of an export: of its start, of a layer in one method, of a gigabyte of the checkpoints. Four exports took 0.9
to 1.4 times as long as they say: gemma4-tiny (21 s), and in 8da4w nine layers of qwen3-4B (112), all of it (209), and
llama3.1-8B (279)."""


def export_bytes(plan: Plan) -> int:
    """Return the bytes that an export takes in addition to the target's own weights."""
    models = _models(plan)
    head, draft = models[1]
    held, written = _model_bytes(head, draft)[0], sum(_model_bytes(*each)[1] for each in models)
    as_loaded = FLOAT * sum(parameter.numel() for parameter in head.parameters())
    return OVERHEAD + round(max(as_loaded, held + written + max(_copies(*each) for each in models)))


def held_bytes(plan: Plan) -> int:
    """Return the bytes of the target's weights in the form in which the export computes with them."""
    target, _ = recipes(plan)
    return round(_model_bytes(plan.skeleton.model, target)[0])


def artifact_bytes(plan: Plan) -> int:
    """Return the bytes of ``model.pte``."""
    graphs = GRAPH * len(plan.methods) * (plan.target_config.num_hidden_layers + 1)
    return graphs + round(sum(_model_bytes(*each)[1] for each in _models(plan)))


def _models(plan: Plan) -> tuple[tuple[nn.Module, Recipe], tuple[nn.Module, Recipe]]:
    """Return target and head without weights, each with its recipe."""
    target, draft = recipes(plan)
    return (plan.skeleton.model, target), (unfilled(plan.draft), draft)


def _copies(model: nn.Module, recipe: Recipe) -> int:
    """Return the bytes that ExecuTorch takes to write the largest weight. It holds two copies, and a third one of
    codes, with the hash of their scales appended. In memory, 4-bit codes take a byte each."""
    linears = (module for module in model.modules() if isinstance(module, nn.Linear))
    codes = 2 if recipe.group else 3
    sizes = (module.weight.numel() * (codes if recipe.covers(module) else 2 * FLOAT) for module in linears)
    return max(sizes, default=0)


def _model_bytes(model: nn.Module, recipe: Recipe) -> tuple[float, float]:
    """Return the bytes of a model's weights in memory, and in the file."""
    return model_bytes(model, recipe.covers, recipe.weight_bytes, FLOAT)
