"""The quantization recipes of the CPU, with ExecuTorch's names. This module imports nothing that quantizes, which would
take seconds."""

from dataclasses import dataclass
from math import gcd
from typing import TypeGuard

from torch import nn

from eagle3.export.configuration.config import EMBEDDING_RECIPES, GROUPED, XNNPACK_RECIPES
from eagle3.export.planning.plan import Plan

DEFAULT_GROUP = 32
"""ExecuTorch's default for 8da4w."""
LEAST_GROUP = 32  # XNNPACK's kernels only take multiples of this
QUANTIZED = (*XNNPACK_RECIPES[1:], *EMBEDDING_RECIPES[1:])


@dataclass(frozen=True)
class Recipe:
    """The quantization of one model: ``linear`` and ``embedding`` are ExecuTorch's names; ``group`` is the number of
    inputs of a linear that share a scale, or 0 if a whole row shares one."""

    linear: str
    embedding: str
    group: int

    def covers(self, module: nn.Module) -> TypeGuard[nn.Linear | nn.Embedding]:
        """Return True for an embedding or a linear that is quantized. Routers are not quantized: a router that is a
        linear (Llama 4's) has a class of its own."""
        if isinstance(module, nn.Embedding):
            return self.embedding in QUANTIZED
        return type(module) is nn.Linear and self.linear in QUANTIZED

    def weight_bytes(self, module: nn.Module) -> tuple[float, float]:
        """Return the bytes per weight of a ``module`` that the recipe covers: in torchao's form, where a 4-bit code
        takes a byte, and in the file."""
        if isinstance(module, nn.Embedding):
            return 1, 1
        if self.group:
            return 1 + 5 / self.group, 1 / 2 + 2 / self.group
        return 1, 1

    def check(self, flag: str, model: nn.Module) -> None:
        """Raise ValueError naming a linear of ``model`` that the group size does not fit."""
        if not self.group:
            return
        covered = ((name, module) for name, module in model.named_modules() if self.covers(module))
        linears = {name: module.in_features for name, module in covered if isinstance(module, nn.Linear)}
        for name, width in linears.items():
            if self.group % LEAST_GROUP or width % self.group:
                fits = _divisors(gcd(*linears.values()))
                advice = f"--group-size {fits}" if fits else f"{flag} 8da8w, which has a scale per row"
                raise ValueError(
                    f"{flag} {self.linear} with --group-size {self.group}: {name} takes {width} inputs, and a group "
                    f"must be a multiple of {LEAST_GROUP} that divides this number: type {advice}"
                )


def _divisors(width: int) -> str:
    """Return a text that lists the group sizes that divide ``width``."""
    return ", ".join(str(size) for size in range(LEAST_GROUP, min(width, 256) + 1, LEAST_GROUP) if width % size == 0)


def recipes(plan: Plan) -> tuple[Recipe, Recipe]:
    """Return the recipes of the target and of the draft."""
    embedding = plan.config.qembedding or ("8w" if plan.qlinear in QUANTIZED else "none")
    target, draft = (Recipe(linear, embedding, _group(linear, plan)) for linear in (plan.qlinear, plan.draft_qlinear))
    return target, draft


def _group(linear: str, plan: Plan) -> int:
    return (plan.config.group_size or DEFAULT_GROUP) if linear == GROUPED else 0
