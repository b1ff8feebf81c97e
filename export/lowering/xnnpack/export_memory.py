"""Estimates the memory that an export to the CPU takes on this machine, from configurations alone: every weight as it
is written, copies of the weight that is being written, and the head's weights. The target's weights may lie in files
instead (``tensor_files``)."""

from torch import nn

from eagle3.export.draft.loading import unfilled
from eagle3.export.lowering.xnnpack.recipe import Recipe, recipes
from eagle3.export.planning.plan import Plan

OVERHEAD = 1 << 30
"""The bytes of libraries, of graphs, and of the rows of a weight that are being quantized."""
FLOAT = 4


def export_bytes(plan: Plan) -> int:
    """Return the bytes that an export takes in addition to the target's own weights."""
    target, draft = recipes(plan)
    head = unfilled(plan.draft)
    models = ((plan.skeleton.model, target), (head, draft))
    held, written = _model_bytes(head, draft)[0], sum(_model_bytes(*each)[1] for each in models)
    as_loaded = FLOAT * sum(parameter.numel() for parameter in head.parameters())
    return OVERHEAD + round(max(as_loaded, held + written + max(_copies(*each) for each in models)))


def held_bytes(plan: Plan) -> int:
    """Return the bytes of the target's weights in the form in which the export computes with them."""
    target, _ = recipes(plan)
    return round(_model_bytes(plan.skeleton.model, target)[0])


def _copies(model: nn.Module, recipe: Recipe) -> int:
    """Return the bytes that ExecuTorch takes to write the largest weight. It holds two copies, and a third one of
    codes, with the hash of their scales appended. In memory, 4-bit codes take a byte each."""
    linears = (module for module in model.modules() if isinstance(module, nn.Linear))
    codes = 2 if recipe.group else 3
    sizes = (module.weight.numel() * (codes if recipe.covers(module) else 2 * FLOAT) for module in linears)
    return max(sizes, default=0)


def _model_bytes(model: nn.Module, recipe: Recipe) -> tuple[float, float]:
    """Return the bytes of a model's weights in memory, and in the file. A tensor that head and embedding share counts
    twice if it is quantized."""
    counted, held, written = set(), 0.0, 0.0
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            covered = recipe.covers(module) and parameter is module.weight
            key = id(parameter), covered and type(module)
            if key not in counted:
                counted.add(key)
                as_held, as_written = recipe.weight_bytes(module) if covered else (FLOAT, FLOAT)
                held, written = held + parameter.numel() * as_held, written + parameter.numel() * as_written
    return held, written
