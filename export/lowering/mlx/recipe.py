"""The quantization recipes for MLX, with ExecuTorch's names. This module imports nothing that quantizes, which would
take seconds."""

from dataclasses import dataclass
from math import gcd
from typing import TypeGuard

from torch import nn

from eagle3.export.configuration.config import MLX_RECIPES
from eagle3.export.planning.plan import Plan

GROUPS = (32, 64, 128)
"""The numbers of inputs that MLX's kernels let share a scale."""


@dataclass(frozen=True)
class Recipe:
    """The quantization of one model. ``linear`` is one of MLX_RECIPES; ``embedding`` is "none" or "8w"."""

    linear: str
    embedding: str
    group: int

    def covers(self, module: nn.Module) -> TypeGuard[nn.Linear | nn.Embedding]:
        """Return True for an embedding or a linear that is quantized. A router that is a linear has a class of its
        own."""
        if isinstance(module, nn.Embedding):
            return self.embedding != "none"
        return type(module) is nn.Linear and self.linear != "none"

    def of(self, module: nn.Module) -> str:
        return self.linear if isinstance(module, nn.Linear) else self.embedding

    def weight_bytes(self, module: nn.Module) -> tuple[float, float]:
        """Return the bytes per weight of a covered module: in memory, where each code takes a byte, and in the file,
        which has a scale and an offset of 16 bits for each group."""
        return 1 + 3 / self.group, (0.5 if self.of(module) == "4w" else 1) + 4 / self.group

    def check(self, flag: str, model: nn.Module) -> None:
        """Raise ValueError naming a layer of ``model`` that the group size does not fit."""
        covered = [(name, module) for name, module in model.named_modules() if self.covers(module)]
        widths = {name: module.weight.shape[1] for name, module in covered}
        for name, width in widths.items():
            if self.group not in GROUPS or width % self.group:
                fits = [str(size) for size in GROUPS if gcd(*widths.values()) % size == 0]
                advice = f"--group-size {' or '.join(fits)}" if fits else f"{flag} none"
                raise ValueError(
                    f"--group-size {self.group}: {name} takes {width} inputs, and --backend mlx takes groups of "
                    f"{', '.join(map(str, GROUPS))} that divide this number: type {advice}"
                )


def recipes(plan: Plan) -> tuple[Recipe, Recipe]:
    """Return the recipes of the target and of the draft."""
    embedding = plan.config.qembedding or ("8w" if plan.qlinear in MLX_RECIPES[1:] else "none")
    group = plan.config.group_size or GROUPS[0]
    target = plan.qlinear if plan.qlinear in MLX_RECIPES else "none"
    return Recipe(target, embedding, group), Recipe(plan.draft_qlinear, embedding, group)
