"""Converts each tensor of a target while it is read: quantizes it by the recipe, and puts it into its kernel's layout.

A tensor is not needed again after its conversion, so the whole unquantized checkpoint is never in memory. A large
weight is converted some rows at a time, and memory-mapped data is only read.

For a measurement on a machine without a GPU, it makes dense float32 weights with the values of CUDA's quantized ones.

INT4 weights that another tool quantized are converted to CUDA's layout. Codes and zero points stay exact, and scales
are as near as possible.

ExecuTorch's ``CudaCoalescedInt4Tensor`` stores a scale as an 8-bit code times an fp16 step, which 256 weights of a row
share, and stores a zero point in the same way. ExecuTorch computes the step only from the largest of the scales that
share it. Here several steps are tried, because fp16 is coarse for such small numbers (1e-5 and less are subnormal). A
step of 1 makes zero points exact.
"""

from typing import Any

import torch
from executorch.backends.cuda.coalesced_int4_tensor import CudaCoalescedInt4Tensor
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


BLOCK = 256  # the number of weights that share a step
STEPS = range(255, 223, -1)
"""The codes that are tried for the largest scale of a block."""
ROWS = 1024  # the number of rows that are converted at a time


def exact_layout(name: str, weight: ExportableInt4Tensor) -> tuple[CudaCoalescedInt4Tensor, float]:
    """Return the weight [N, K] in CUDA's layout, and the largest relative rounding of a scale.

    The weight must satisfy ``has_whole_zeros``. Raises ValueError for scales outside the layout's range.
    """
    group, (rows, columns) = weight.group_size, weight.shape
    scale, zero = weight.scale.t(), weight.zero_point.t()  # [N, groups]
    _check_range(name, scale)
    if group > BLOCK:
        scale, zero = (values.repeat_interleave(group // BLOCK, 1) for values in (scale, zero))
        group = BLOCK
    codes, steps, rounding = zip(*map(_encoded, scale.unflatten(1, (-1, BLOCK // group)).split(ROWS)), strict=True)
    ones = torch.ones(rows, columns // BLOCK, dtype=torch.float16)
    packed = CudaCoalescedInt4Tensor(
        weight.qdata,
        torch.cat(codes),
        torch.cat(steps),
        zero.to(torch.uint8).contiguous(),
        ones,
        [1, group],
        weight.shape,
    )
    return packed, max(rounding)


def _encoded(scale: Tensor) -> tuple[Tensor, Tensor, float]:
    """Encode scales [N, blocks, groups of a block] as codes uint8 [N, groups] and steps fp16 [N, blocks]. Also return
    the largest relative rounding."""
    scale = scale.float()
    largest = scale.amax(-1)
    best = torch.full_like(largest, torch.inf)
    step = torch.zeros_like(largest, dtype=torch.float16)
    for code in STEPS:
        tried = (largest / code).to(torch.float16)
        error = _rounding(scale, _codes(scale, tried), tried)
        better = error < best
        best, step = torch.where(better, error, best), torch.where(better, tried, step)
    return _codes(scale, step).to(torch.uint8).flatten(1), step, float(best.max())


def _codes(scale: Tensor, step: Tensor) -> Tensor:
    return (scale / step.float().clamp_min(1e-30).unsqueeze(-1)).round().clamp(0, 255)


def _rounding(scale: Tensor, codes: Tensor, step: Tensor) -> Tensor:
    """Return the largest relative rounding in each block, [N, blocks]. A scale of 0 is stored exactly."""
    held = codes * step.float().unsqueeze(-1)
    return ((held - scale).abs() / scale.clamp_min(1e-30)).amax(-1)


def has_whole_zeros(weight: ExportableInt4Tensor) -> bool:
    """Return True if every zero point is an integer from 0 to 255, which a step of 1 stores exactly."""
    zero = weight.zero_point
    return bool(((zero == zero.round()) & (zero >= 0) & (zero <= 255)).all())


def _check_range(name: str, scale: Tensor) -> None:
    least, most = scale.amin().item(), scale.amax().item()
    if least < 0 or most > 255 * torch.finfo(torch.float16).max:
        raise ValueError(
            f"{name} has scales of {least:g} to {most:g}, but CUDA's INT4 layout holds 0 to 1.6e7: the checkpoint is "
            "damaged, or another tool's"
        )
