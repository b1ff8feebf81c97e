"""Quantizes weights for MLX by ExecuTorch's recipes ``4w`` and ``8w``: codes of 4 or 8 bits, of which a group of inputs
shares a scale. Activations keep their dtype.

Weights that another tool quantized keep their codes, unless a recipe says otherwise, if MLX's kernels take them: 4, 5
or 8 bits, and a scale for 32 columns or a multiple. Any other weight is dequantized while it loads.
"""

from collections.abc import Set
from functools import partial
from typing import Any

import torch
from executorch.extension.llm.export.gguf import ExportableGGUFTensor
from executorch.extension.llm.export.int4 import ExportableInt4Tensor
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.quantization import IntxUnpackedToInt8Tensor, quantize_
from torchao.utils import TorchAOBaseTensor

from eagle3.export.checkpoints.packed import unpacked
from eagle3.export.lowering.covered_weights import CoveredWeights
from eagle3.export.lowering.mlx.recipe import Recipe
from eagle3.export.lowering.xnnpack.quantization import by_rows, taken_from
from eagle3.targets.loading import is_plain

DTYPE = torch.bfloat16


class GroupedWeight(IntxUnpackedToInt8Tensor):
    """torchao's weight of grouped codes, which is dequantized for a matmul or a lookup in one operation of its own. An
    export for CUDA replaces the matmul of torchao's class for the whole process, but not this one.

    The matmul computes in the dtype of the scales: float32 for scales of a checkpoint that bfloat16 would round."""

    def dense(self) -> Tensor:
        parts = self.qdata, self.scale, self.zero_point, self.target_dtype, self.block_size
        return IntxUnpackedToInt8Tensor(*parts, self.scale.dtype, None).dequantize()


@GroupedWeight.implements([torch.ops.aten.linear.default])
@GroupedWeight.implements_torch_function([F.linear])
def _linear(_func: object, _types: object, args: tuple[Any, ...], _kwargs: object) -> Tensor:
    x, weight, *bias = args
    wide = weight.scale.dtype
    return F.linear(x.to(wide), weight.dense(), *(each.to(wide) for each in bias if each is not None)).to(x.dtype)


@GroupedWeight.implements([torch.ops.aten.embedding.default])
@GroupedWeight.implements_torch_function([F.embedding])
def _embedding(func: object, _types: object, args: tuple[Any, ...], _kwargs: object) -> Tensor:
    ids, table = (args[1], args[0]) if func is torch.ops.aten.embedding.default else args[:2]
    return F.embedding(ids, table.dense()).to(table.dtype)


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


class KeptCodes(CoveredWeights):
    """The conversion of a quantized checkpoint for the target ``model`` (on the meta device). The weights ``names`` of
    linears and embeddings keep their codes; ``recipe`` covers the others."""

    def __init__(self, model: nn.Module, recipe: Recipe, names: Set[str | None]):
        super().__init__(model, recipe.covers, partial(quantized, recipe))
        self.names, self.kept = names, 0

    def __call__(self, name: str, value: Tensor) -> Tensor:
        if name not in self.names or is_plain(value):  # parts that were joined may have been dequantized
            return super().__call__(name, value)
        self.kept += 1
        return grouped(value)

    def record(self) -> dict[str, Any]:
        return {"kept_codes": self.kept} | super().record()


def grouped(weight: Tensor) -> GroupedWeight:
    """Return a checkpoint's quantized ``weight`` [N, K] with the same codes, scales and zero points. Scales are
    bfloat16 if that is exact and zero is the middle code, so that offsets are exact too; otherwise float32."""
    made: Any = weight
    if isinstance(weight, ExportableGGUFTensor):
        made = weight.to_intx_unpacked_to_int8_tensor(scale_dtype=torch.float32)
    elif isinstance(weight, ExportableInt4Tensor):
        codes = unpacked(weight.qdata, 4).to(torch.int8) - 8
        scale, zero = (part.t().float().contiguous() for part in (weight.scale, weight.zero_point))
        held, block = torch.int4, (1, weight.group_size)  # type: ignore[attr-defined]
        made = IntxUnpackedToInt8Tensor(codes, scale, zero - 8, held, block, torch.float32, None)
    scale, zero = made.scale.float(), made.zero_point
    narrow = scale.to(DTYPE)
    if torch.equal(narrow.float(), scale) and not zero.any():
        scale, zero = narrow, torch.zeros_like(zero, dtype=torch.int8)
    return GroupedWeight(made.qdata, scale, zero, made.target_dtype, tuple(made.block_size), DTYPE, None)
