"""The quantization recipes of the CPU, by ExecuTorch's names for them. Nothing that quantizes is imported here, which
takes seconds."""

from dataclasses import dataclass
from math import gcd
from typing import TypeGuard

from torch import Tensor, nn

from eagle3.export.configuration.config import EMBEDDING_RECIPES, GROUPED, XNNPACK_RECIPES
from eagle3.export.planning.plan import Plan

DEFAULT_GROUP = 32
"""ExecuTorch's for 8da4w."""
LEAST_GROUP = 32  # XNNPACK's kernels take groups of a multiple of it
QUANTIZED = (*XNNPACK_RECIPES[1:], *EMBEDDING_RECIPES[1:])


@dataclass(frozen=True)
class Recipe:
    """The quantization of one model: ``linear`` and ``embedding`` by ExecuTorch's names; ``group``: how many inputs of
    a linear share a scale, 0 for all of a row."""

    linear: str
    embedding: str
    group: int

    def covers(self, module: nn.Module) -> TypeGuard[nn.Linear | nn.Embedding]:
        """Return True for an embedding or linear that is quantized. A router is not: where it is a linear (Llama 4's),
        it has a class of its own."""
        if isinstance(module, nn.Embedding):
            return self.embedding in QUANTIZED
        return type(module) is nn.Linear and self.linear in QUANTIZED

    def weight_bytes(self, module: nn.Module) -> tuple[float, float]:
        """Return the bytes per weight of a ``module`` that the recipe covers: as torchao holds it, where a 4-bit code
        takes a byte, and as it is written."""
        if isinstance(module, nn.Embedding):
            return 1, 1
        if self.group:
            return 1 + 5 / self.group, 1 / 2 + 2 / self.group
        return 1, 1

    def quantized(self, module: nn.Module, weight: Tensor) -> Tensor:
        """Quantize the ``weight`` [N, K] of a linear or embedding ``module`` that the recipe covers."""
        from eagle3.export.lowering.xnnpack.quantization import quantized

        return quantized(self, module, weight)

    def check(self, flag: str, model: nn.Module) -> None:
        """Raise ValueError, naming the linear of ``model`` that the groups do not fit."""
        if not self.group:
            return
        covered = ((name, module) for name, module in model.named_modules() if self.covers(module))
        linears = {name: module.in_features for name, module in covered if isinstance(module, nn.Linear)}
        for name, width in linears.items():
            if self.group % LEAST_GROUP or width % self.group:
                fits = _divisors(gcd(*linears.values()))
                advice = f"--group-size {fits}" if fits else f"{flag} 8da8w, whose scales are a row's"
                raise ValueError(
                    f"{flag} {self.linear} with --group-size {self.group}: {name} takes {width} inputs, and groups are "
                    f"multiples of {LEAST_GROUP} that divide them: type {advice}"
                )


def _divisors(width: int) -> str:
    """Return the group sizes that divide ``width``, as words."""
    return ", ".join(str(size) for size in range(LEAST_GROUP, min(width, 256) + 1, LEAST_GROUP) if width % size == 0)


def recipes(plan: Plan) -> tuple[Recipe, Recipe]:
    """Return the recipes of the target and of the draft."""
    embedding = plan.config.qembedding or ("8w" if plan.qlinear in QUANTIZED else "none")
    target, draft = (Recipe(linear, embedding, _group(linear, plan)) for linear in (plan.qlinear, plan.draft_qlinear))
    return target, draft


def _group(linear: str, plan: Plan) -> int:
    return (plan.config.group_size or DEFAULT_GROUP) if linear == GROUPED else 0
