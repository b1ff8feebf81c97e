"""Quantized weights on the CPU: ExecuTorch's recipes, as torchao's tensors, in the form that XNNPACK computes with.

A linear of ``8da4w`` or ``8da8w`` quantizes each row of its input for itself, to 8 bits, so that rows do not depend on
each other. An embedding of ``8w`` looks up codes and multiplies them by the scales of their rows: the table is never in
float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Any, Self, TypeGuard

import torch
from executorch.extension.llm.export.quantize import _default_group_size, _make_embedding_config, _make_linear_config
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torchao.quantization import IntxUnpackedToInt8Tensor, quantize_
from torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor import (
    _apply_int8_act_asym_per_token_quant_dequant,
)
from torchao.utils import TorchAOBaseTensor

from eagle3.export.planning.config import EMBEDDING_RECIPES, GROUPED, XNNPACK_RECIPES
from eagle3.export.planning.plan import Plan

ELEMENTS = 1 << 18
"""Of a weight, quantized at once: what a core has in its cache. Forty passes over more took 3 to 5 times as long."""
LEAST_GROUP = 32  # XNNPACK's kernels take groups of a multiple of it
QUANTIZED = (*XNNPACK_RECIPES[1:], *EMBEDDING_RECIPES[1:])


@dataclass(frozen=True)
class Recipe:
    """Of one model: ``linear`` and ``embedding`` by ExecuTorch's names, ``group``: inputs of a linear that share a
    scale, 0 for all of a row."""

    linear: str
    embedding: str
    group: int

    def covers(self, module: nn.Module) -> TypeGuard[nn.Linear | nn.Embedding]:
        """Not a router, which chooses experts: where one is a linear (Llama 4's), it is of a class of its own."""
        if isinstance(module, nn.Embedding):
            return self.embedding in QUANTIZED
        return type(module) is nn.Linear and self.linear in QUANTIZED

    def weight_bytes(self, module: nn.Module) -> tuple[float, float]:
        """Of a weight of a ``module`` that the recipe covers: held by torchao, where codes of 4 bits take 8, and
        written."""
        if isinstance(module, nn.Embedding):
            return 1, 1
        if self.group:
            return 1 + 5 / self.group, 1 / 2 + 2 / self.group
        return 1, 1

    def quantized(self, module: nn.Module, weight: Tensor) -> Tensor:
        """``weight`` [N, K] of a linear or embedding ``module`` that the recipe covers, some rows at a time."""
        quantize = self._linear if isinstance(module, nn.Linear) else self._embedding
        rows = max(1, ELEMENTS // weight.shape[1])
        data: dict[str, Tensor] = {}
        for start in range(0, weight.shape[0], rows):
            part = quantize(weight[start : start + rows].float())
            for name in part.tensor_data_names:
                values = getattr(part, name)
                if not start:
                    data[name] = values.new_empty(weight.shape[0], *values.shape[1:])
                data[name][start : start + rows] = values
        return type(part)(*data.values(), *(getattr(part, name) for name in part.tensor_attribute_names))

    def _linear(self, weight: Tensor) -> TorchAOBaseTensor:
        holder = nn.Linear(1, 1, bias=False, device="meta")
        holder.weight = nn.Parameter(weight, requires_grad=False)
        quantize_(holder, _make_linear_config(self.linear, self.group))
        made: TorchAOBaseTensor = holder.weight.data
        if self.group:  # XNNPACK holds the scales of groups in bfloat16
            made.scale = made.scale.to(torch.bfloat16).to(weight.dtype)
        return DynamicWeight(*(getattr(made, name) for name in (*made.tensor_data_names, *made.tensor_attribute_names)))

    def _embedding(self, weight: Tensor) -> TorchAOBaseTensor:
        holder = nn.Embedding.from_pretrained(weight)
        quantize_(holder, _make_embedding_config(self.embedding, 0), filter_fn=lambda *_: True)
        made: TorchAOBaseTensor = holder.weight.data
        return Int8Rows(made.qdata, made.scale)

    def check(self, flag: str, model: nn.Module) -> None:
        """Raise ValueError, naming the linear of ``model`` that the groups do not fit."""
        if not self.group:
            return
        covered = ((name, module) for name, module in model.named_modules() if self.covers(module))
        linears = {name: module.in_features for name, module in covered if isinstance(module, nn.Linear)}
        for name, width in linears.items():
            if self.group % LEAST_GROUP or width % self.group:
                fits = _divisors(gcd(*linears.values()))
                cure = f"--group-size {fits}" if fits else f"{flag} 8da8w, whose scales are a row's"
                raise ValueError(
                    f"{flag} {self.linear} with --group-size {self.group}: {name} takes {width} inputs, and groups are "
                    f"multiples of {LEAST_GROUP} that divide them: type {cure}"
                )


def _divisors(width: int) -> str:
    """The group sizes that divide ``width``, as words."""
    return ", ".join(str(size) for size in range(LEAST_GROUP, min(width, 256) + 1, LEAST_GROUP) if width % size == 0)


def recipes(plan: Plan) -> tuple[Recipe, Recipe]:
    """The target's and the draft's."""
    embedding = plan.config.qembedding or ("8w" if plan.qlinear in QUANTIZED else "none")
    target, draft = (Recipe(linear, embedding, _group(linear, plan)) for linear in (plan.qlinear, plan.draft_qlinear))
    return target, draft


def _group(linear: str, plan: Plan) -> int:
    return (plan.config.group_size or _default_group_size(linear)) if linear == GROUPED else 0


class DynamicWeight(IntxUnpackedToInt8Tensor):
    """torchao's weight with its own product, whatever else is imported: ExecuTorch's CUDA backend gives torchao's class
    another one, for the whole process."""


@DynamicWeight.implements([torch.ops.aten.linear.default])
@DynamicWeight.implements_torch_function([F.linear])
def _linear(_func: object, _types: object, args: tuple[Any, ...], _kwargs: object) -> Tensor:
    """Each row of x [..., K] in 8 bits with a scale and a zero point of its own, times the weight."""
    x, weight, *bias = args
    return F.linear(_apply_int8_act_asym_per_token_quant_dequant(x), weight.dequantize(), *bias)


class ExactActivations(TorchFunctionMode):
    """Within it, linears of ``DynamicWeight`` take their inputs as they are, in float32."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if func is F.linear and isinstance(args[1], DynamicWeight):
            args = (args[0], args[1].dequantize(), *args[2:])
        return func(*args, **(kwargs or {}))


class Int8Rows(TorchAOBaseTensor):
    """A table [N, K] of float32 as codes [N, K] of int8 and a scale a row, [N, 1]."""

    tensor_data_names = ["qdata", "scale"]
    tensor_attribute_names: list[str] = []

    def __new__(cls, qdata: Tensor, scale: Tensor) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=scale.dtype, device=qdata.device)

    def __init__(self, qdata: Tensor, scale: Tensor):
        super().__init__()
        self.qdata, self.scale = qdata, scale

    def _quantization_type(self) -> str:
        return f"shape={tuple(self.shape)}, device={self.device}"


@Int8Rows.implements([torch.ops.aten.embedding.default])
@Int8Rows.implements_torch_function([F.embedding])
def _embedding(func: object, _types: object, args: tuple[Any, ...], _kwargs: object) -> Tensor:
    """[...] int64 -> [..., K]."""
    ids, table = (args[1], args[0]) if func is torch.ops.aten.embedding.default else args[:2]
    return F.embedding(ids, table.qdata).to(table.dtype) * F.embedding(ids, table.scale)
