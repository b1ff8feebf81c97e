"""Converts each tensor of a target while it is read: quantizes it by the recipe, and puts it into its kernel's layout.

A tensor is not needed again after its conversion, so the whole unquantized checkpoint is never in memory. A large
weight is converted some rows at a time, and memory-mapped data is only read.
"""

from typing import Any

import torch
from executorch.examples.models.gemma4_31b.cuda_packers import pack_embedding_for_cuda, pack_linear_for_cuda
from executorch.extension.llm.export.gguf import ExportableGGUFTensor
from executorch.extension.llm.export.int4 import ExportableInt4Tensor
from executorch.extension.llm.export.quant import QuantConfig, QuantRecipe, quantize_weight
from executorch.extension.llm.export.quant.convert import fuse_along_output, to_default
from torch import Tensor, nn
from torchao.quantization import IntxUnpackedToInt8Tensor
from torchao.quantization.quantize_.workflows.int4.int4_tensor import Int4Tensor
from torchao.utils import TorchAOBaseTensor

from eagle3.export.lowering.cuda.kernels.int4.tiles import tensor as int4_tensor
from eagle3.export.lowering.cuda.weights.experts import fused_linears
from eagle3.export.lowering.cuda.weights.int4_layout import exact_layout, has_whole_zeros
from eagle3.export.lowering.cuda.weights.k_quants import KQuantTensor, laid_out

ELEMENTS = 1 << 25
"""The number of elements of a weight that are quantized at a time. Quantizing them takes memory for their float32
copies."""

LAID_OUT = (Int4Tensor, ExportableInt4Tensor, IntxUnpackedToInt8Tensor)


class CudaWeights:
    """The conversion for the target ``model`` (on the meta device). With ``recipe`` None it quantizes nothing."""

    def __init__(self, model: nn.Module, recipe: QuantRecipe | None, dtype: torch.dtype):
        self.recipe, self.dtype = recipe, dtype
        self.packers = {
            f"{name}.weight": pack_linear_for_cuda if isinstance(module, nn.Linear) else pack_embedding_for_cuda
            for name, module in model.named_modules(remove_duplicate=False)
            if isinstance(module, nn.Linear | nn.Embedding)
        }
        self.fused = {f"{name}.weight" for name in fused_linears(model)}
        """The weights of experts with kernels, which ``use_fused_experts`` lays out after both weights of an expert are
        loaded."""
        self.k_quants: dict[int, KQuantTensor] = {}
        self.rounding: dict[str, float] = {}
        """The largest relative rounding of a scale, by the name of the weight, for weights that another tool
        quantized."""

    def __call__(self, name: str, value: Tensor) -> Tensor:
        if name not in self.packers:
            return value
        if isinstance(value, ExportableGGUFTensor):
            return self._k_quant(value)
        linear = self.packers[name] is pack_linear_for_cuda
        if linear and isinstance(value, ExportableInt4Tensor) and has_whole_zeros(value):
            packed, self.rounding[name] = exact_layout(name, value)
            return int4_tensor.laid_out(packed)
        config = self.recipe.get_config(name) if self.recipe else None
        if config is not None and not isinstance(value, TorchAOBaseTensor):
            value = quantized(value.to(self.dtype), config)
        elif isinstance(value, LAID_OUT):
            self._note_rounding(name, value)
        else:
            return value
        if name in self.fused:
            return to_default(name, value)
        holder = nn.Module()
        self.packers[name](holder, {"weight": to_default(name, value)})
        int4_tensor.lay_out_int4(holder)
        return holder.get_parameter("weight").data

    def _k_quant(self, value: ExportableGGUFTensor) -> KQuantTensor:
        """Put a K-quant into its kernel's layout. A head and its tied embedding share one tensor, because the layout
        serves both."""
        blocks = value.raw.data_ptr()
        if blocks not in self.k_quants:
            self.k_quants[blocks] = laid_out(value)
        return self.k_quants[blocks]

    def record(self) -> dict[str, Any]:
        if not self.rounding:
            return {}
        worst = max(self.rounding, key=self.rounding.__getitem__)
        return {"scales": {"weights": len(self.rounding), "largest_rounding": self.rounding[worst], "of": worst}}

    def _note_rounding(self, name: str, value: Tensor) -> None:
        """Record the rounding of INT8 scales, which are stored in the activations' dtype."""
        if isinstance(value, IntxUnpackedToInt8Tensor) and value.scale.dtype != self.dtype:
            held = value.scale.to(self.dtype).float()
            error = (held - value.scale.float()).abs() / value.scale.float().abs().clamp_min(1e-30)
            self.rounding[name] = float(error.max())


def quantized(weight: Tensor, config: QuantConfig) -> Tensor:
    """Quantize ``weight`` [N, K]. The method min-max depends only on single groups, so it takes some rows at a time.
    HQQ takes all rows at once, because it stops by the error of the whole weight."""
    rows = weight.shape[0] if config.method != "min_max" else max(1, ELEMENTS // weight.shape[1])
    return fuse_along_output([to_default("", quantize_weight(part, config)) for part in weight.split(rows)])
