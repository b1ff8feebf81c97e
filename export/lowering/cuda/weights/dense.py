"""Dense float32 weights with the values of CUDA's quantized ones, for a measurement on a machine without a GPU."""

import torch
from executorch.backends.cuda.coalesced_int4_tensor import CudaCoalescedInt4Tensor
from torch import Tensor, nn

from eagle3.export.lowering.cuda.kernels.int4.tiles.tensor import TiledInt4Tensor
from eagle3.export.lowering.cuda.weights.k_quants import KQuantTensor
from eagle3.targets.loading import dequantized, is_plain
from eagle3.targets.spec import Convert


def dense(value: Tensor) -> Tensor:
    """Return a quantized weight as the dense float32 tensor that it stands for; a plain tensor unchanged."""
    if isinstance(value, TiledInt4Tensor | CudaCoalescedInt4Tensor | KQuantTensor):
        return value.dequantize(torch.float32)
    return dequantized("", value)


def made_dense(convert: Convert) -> Convert:
    """Return a conversion to the dense values of what ``convert`` gives."""
    return lambda name, value: dense(convert(name, value))


def make_dense(model: nn.Module) -> None:
    """Replace the quantized weights of ``model`` by their dense values, in place."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if weight is not None and not is_plain(weight):
            module.weight = nn.Parameter(dense(weight), requires_grad=False)
