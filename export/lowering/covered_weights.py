"""Quantizes the weights that a backend's recipe covers: the target's as each is read, the draft head's in place."""

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
