"""Quantizes the weights that a backend's recipe covers, the target's as each is read, the draft head's in place, and
counts their bytes."""

from collections.abc import Callable
from typing import Any, TypeGuard

from torch import Tensor, nn

from eagle3.targets.loading import dequantized, is_plain

Module = nn.Linear | nn.Embedding
Covers = Callable[[nn.Module], TypeGuard[Module]]
Quantized = Callable[[Module, Tensor], Tensor]
"""Quantizes the weight [N, K] of a covered module."""


class CoveredWeights:
    """The conversion for the target ``model`` (on the meta device). Weights that another tool quantized are dequantized
    first."""

    def __init__(self, model: nn.Module, covers: Covers, quantized: Quantized):
        self.quantized, self.dequantized = quantized, 0
        modules = model.named_modules(remove_duplicate=False)
        self.covered = {f"{name}.weight": module for name, module in modules if covers(module)}

    def __call__(self, name: str, value: Tensor) -> Tensor:
        self.dequantized += not is_plain(value)
        value = dequantized(name, value)
        return self.quantized(self.covered[name], value) if name in self.covered else value

    def record(self) -> dict[str, Any]:
        """Return how many weights were dequantized, for ``export.json``."""
        return {"dequantized": self.dequantized} if self.dequantized else {}


def quantize_covered(model: nn.Module, covers: Covers, quantized: Quantized, spare: set[int]) -> None:
    """Quantize in place the weights of ``model`` that are covered, except those whose id is in ``spare``."""
    for module in model.modules():
        if covers(module) and id(module.weight) not in spare:
            module.weight = nn.Parameter(quantized(module, module.weight.data), requires_grad=False)


def model_bytes(
    model: nn.Module, covers: Covers, of_weight: Callable[[Module], tuple[float, float]], plain: float
) -> tuple[float, float]:
    """Return the bytes of a model's weights in memory, and in the file. ``of_weight`` has the bytes per weight of a
    covered module, ``plain`` those of any other. A tensor that head and embedding share counts twice if it is
    quantized."""
    counted, held, written = set(), 0.0, 0.0
    for module in model.modules():
        weight, own = (module.weight, of_weight(module)) if covers(module) else (None, (plain, plain))
        for parameter in module.parameters(recurse=False):
            covered = parameter is weight
            key = id(parameter), covered and type(module)
            if key not in counted:
                counted.add(key)
                as_held, as_written = own if covered else (plain, plain)
                held, written = held + parameter.numel() * as_held, written + parameter.numel() * as_written
    return held, written
