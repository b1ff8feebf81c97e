"""Quantizes weights for MLX by ExecuTorch's recipes ``4w`` and ``8w``: codes of 4 or 8 bits, of which a group of inputs
shares a scale. Activations keep their dtype.

Weights that another tool quantized are dequantized while they load, exactly, and then quantized again if a recipe says
so.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.quantization import IntxUnpackedToInt8Tensor, quantize_
from torchao.utils import TorchAOBaseTensor

from eagle3.export.lowering.mlx.recipe import Recipe
from eagle3.export.lowering.xnnpack.quantization import by_rows, taken_from

DTYPE = torch.bfloat16


class GroupedWeight(IntxUnpackedToInt8Tensor):
    """torchao's weight of grouped codes, which is dequantized for a matmul or a lookup in one operation of its own. An
    export for CUDA replaces the matmul of torchao's class for the whole process, but not this one."""


@GroupedWeight.implements([torch.ops.aten.linear.default])
@GroupedWeight.implements_torch_function([F.linear])
def _linear(_func: object, _types: object, args: tuple[Any, ...], _kwargs: object) -> Tensor:
    x, weight, *bias = args
    return F.linear(x, weight.dequantize(), *bias)


@GroupedWeight.implements([torch.ops.aten.embedding.default])
@GroupedWeight.implements_torch_function([F.embedding])
def _embedding(func: object, _types: object, args: tuple[Any, ...], _kwargs: object) -> Tensor:
    ids, table = (args[1], args[0]) if func is torch.ops.aten.embedding.default else args[:2]
    return F.embedding(ids, table.dequantize())


def quantized(recipe: Recipe, module: nn.Linear | nn.Embedding, weight: Tensor) -> Tensor:
    """Quantize the ``weight`` [N, K] of a ``module`` that ``recipe`` covers."""
    return by_rows(partial(_rows, recipe.of(module), recipe.group), weight)


def _rows(name: str, group: int, weight: Tensor) -> TorchAOBaseTensor:
    from executorch.extension.llm.export.quantize import _make_linear_config

    holder = nn.Linear(1, 1, bias=False, device="meta")
    holder.weight = nn.Parameter(weight, requires_grad=False)
    quantize_(holder, _make_linear_config(name, group))
    made: Any = taken_from(holder)
    return GroupedWeight(
        made.qdata, made.scale.to(DTYPE), made.zero_point, made.target_dtype, made.block_size, DTYPE, None
    )
