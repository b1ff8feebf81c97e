"""Quantizes weights for the CPU by ExecuTorch's recipes into torchao's tensors, in the form that XNNPACK takes.

A linear of ``8da4w`` or ``8da8w`` quantizes each row of its input separately, to 8 bits, so that rows do not depend on
each other. An embedding of ``8w`` looks up codes and multiplies them by the scales of their rows, so the table is never
in float32.

Converts each tensor of a target as it is read: XNNPACK computes in float32, or with weights quantized by the recipes
here. Weights that another tool quantized are dequantized exactly.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, Self

import torch
from executorch.extension.llm.export.quantize import _make_embedding_config, _make_linear_config
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torchao.quantization import IntxUnpackedToInt8Tensor, quantize_
from torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor import (
    _apply_int8_act_asym_per_token_quant_dequant,
)
from torchao.utils import TorchAOBaseTensor

from eagle3.export.lowering.covered_weights import CoveredWeights, quantize_covered
from eagle3.export.lowering.xnnpack.hqq import faster_search
from eagle3.export.lowering.xnnpack.recipe import Recipe

ELEMENTS = 1 << 21
"""The number of elements of a weight that a core quantizes at once. With fewer elements, threads wait for Python's
lock."""


def quantized(recipe: Recipe, module: nn.Module, weight: Tensor) -> Tensor:
    """Quantize the ``weight`` [N, K] of a linear or embedding ``module`` that ``recipe`` covers."""
    quantize = _quantized_linear if isinstance(module, nn.Linear) else _quantized_embedding
    return by_rows(partial(quantize, recipe), weight)


def by_rows(quantize: Callable[[Tensor], TorchAOBaseTensor], weight: Tensor) -> Tensor:
    """Quantize a ``weight`` [N, K] whose rows do not depend on each other. Each core quantizes some rows at a time."""
    rows = max(1, ELEMENTS // weight.shape[1])
    data: dict[str, Tensor] = {}
    starts = range(0, weight.shape[0], rows)
    with faster_search():
        parts = _a_core_each().map(lambda start: quantize(weight[start : start + rows].float()), starts)
        for start, part in zip(starts, parts, strict=True):
            for name in part.tensor_data_names:
                values = getattr(part, name)
                if not start:
                    data[name] = values.new_empty(weight.shape[0], *values.shape[1:])
                data[name][start : start + rows] = values
    return type(part)(*data.values(), *(getattr(part, name) for name in part.tensor_attribute_names))


@cache
def _a_core_each() -> ThreadPoolExecutor:
    """Return a pool of threads that each compute on one core. Splitting such small operations over cores does not pay:
    on a busy machine it took ten times the CPU time.

    All weights use the same threads, since glibc keeps the memory that a thread freed in an arena of that thread. When
    each weight had new threads, glibc held 7 GiB after a model of 4B parameters.
    """
    return ThreadPoolExecutor(torch.get_num_threads(), initializer=torch.set_num_threads, initargs=(1,))


def _quantized_linear(recipe: Recipe, weight: Tensor) -> TorchAOBaseTensor:
    holder = nn.Linear(1, 1, bias=False, device="meta")
    holder.weight = nn.Parameter(weight, requires_grad=False)
    quantize_(holder, _make_linear_config(recipe.linear, recipe.group))
    made = taken_from(holder)
    if recipe.group:  # XNNPACK stores the scales of groups in bfloat16
        made.scale = made.scale.to(torch.bfloat16).to(weight.dtype)
    return DynamicWeight(*(getattr(made, name) for name in (*made.tensor_data_names, *made.tensor_attribute_names)))


def _quantized_embedding(recipe: Recipe, weight: Tensor) -> TorchAOBaseTensor:
    holder = nn.Embedding.from_pretrained(weight)
    quantize_(holder, _make_embedding_config(recipe.embedding, 0), filter_fn=lambda *_: True)
    made = taken_from(holder)
    return Int8Rows(made.qdata, made.scale)


def taken_from(holder: nn.Module) -> TorchAOBaseTensor:
    """Return the quantized weight of a module, and remove it from the module. The module refers to itself
    (``extra_repr``), so its codes would otherwise stay in memory until a garbage collection."""
    made: TorchAOBaseTensor = holder.get_parameter("weight").data
    del holder.weight
    return made


class DynamicWeight(IntxUnpackedToInt8Tensor):
    """torchao's INT8 weight with a matmul of this package, since ExecuTorch's CUDA backend replaces the matmul of
    torchao's class for the whole process."""


@DynamicWeight.implements([torch.ops.aten.linear.default])
@DynamicWeight.implements_torch_function([F.linear])
def _linear(_func: object, _types: object, args: tuple[Any, ...], _kwargs: object) -> Tensor:
    """Multiply the weight by each row of x [..., K], quantized to 8 bits with the row's own scale and zero point."""
    x, weight, *bias = args
    return F.linear(_apply_int8_act_asym_per_token_quant_dequant(x), weight.dequantize(), *bias)


class ExactActivations(TorchFunctionMode):
    """A mode in which linears of ``DynamicWeight`` do not quantize their inputs."""

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
    """A table [N, K] of float32, held as codes [N, K] of int8 and a scale for each row, [N, 1]."""

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
    """Look up rows: ids [...] int64 -> [..., K]."""
    ids, table = (args[1], args[0]) if func is torch.ops.aten.embedding.default else args[:2]
    return F.embedding(ids, table.qdata).to(table.dtype) * F.embedding(ids, table.scale)


class XnnpackWeights(CoveredWeights):
    """The conversion for the target ``model`` (on the meta device)."""

    def __init__(self, model: nn.Module, recipe: Recipe):
        super().__init__(model, recipe.covers, partial(quantized, recipe))


def quantize(model: nn.Module, recipe: Recipe, spare: set[int]) -> None:
    """Quantize in place the weights of ``model`` that ``recipe`` covers, except those whose id is in ``spare``."""
    quantize_covered(model, recipe.covers, partial(quantized, recipe), spare)
