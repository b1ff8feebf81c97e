"""Converts each tensor of a target as it is read: XNNPACK computes in float32, or with weights quantized by the recipes
here. Weights that another tool quantized are dequantized exactly."""

from typing import Any

from torch import Tensor, nn

from eagle3.export.lowering.xnnpack.quantization import quantized
from eagle3.export.lowering.xnnpack.recipe import Recipe
from eagle3.targets.loading import dequantized, is_plain


class XnnpackWeights:
    """The conversion for the target ``model`` (on the meta device)."""

    def __init__(self, model: nn.Module, recipe: Recipe):
        self.recipe, self.dequantized = recipe, 0
        modules = model.named_modules(remove_duplicate=False)
        self.covered = {f"{name}.weight": module for name, module in modules if recipe.covers(module)}

    def __call__(self, name: str, value: Tensor) -> Tensor:
        self.dequantized += not is_plain(value)
        value = dequantized(name, value)
        return quantized(self.recipe, self.covered[name], value) if name in self.covered else value

    def record(self) -> dict[str, Any]:
        """Return how many weights were dequantized, for ``export.json``."""
        return {"dequantized": self.dequantized} if self.dequantized else {}


def quantize(model: nn.Module, recipe: Recipe, spare: set[int]) -> None:
    """Quantize in place the weights of ``model`` that ``recipe`` covers, except those whose id is in ``spare``."""
    for module in model.modules():
        if recipe.covers(module) and id(module.weight) not in spare:
            module.weight = nn.Parameter(quantized(recipe, module, module.weight.data), requires_grad=False)
