"""INT4 weights on CUDA: ExecuTorch's ``CudaCoalescedInt4Tensor`` with scales and zero points laid out for our kernel.

The codes stay the bytes of the checkpoint, so that a mapped file is never copied. The rest is made anew on every way
here and takes no more than it did: for each tile of 128 outputs and block of 256 of K, group by group, each output's
scale and zero point side by side (``kernels/int4.py``). The last tile is filled up with zeros.
"""

from collections.abc import Sequence

import executorch.backends.cuda.quantize_op_dispatch  # noqa: F401  (what linears of many rows take)
import torch
from executorch.backends.cuda.coalesced_int4_tensor import CudaCoalescedInt4Tensor
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.utils import TorchAOBaseTensor

from eagle3.export.lowering.cuda.kernels.int4 import BLOCK, tiled, untiled


class TiledInt4Tensor(TorchAOBaseTensor):
    """A weight [N, K] of bfloat16; parts as ``int4_small_m`` takes them."""

    tensor_data_names = ["qdata", "codes", "steps"]
    tensor_attribute_names = ["shape"]

    def __new__(cls, qdata: Tensor, codes: Tensor, steps: Tensor, shape: torch.Size):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16, device=qdata.device)

    def __init__(self, qdata: Tensor, codes: Tensor, steps: Tensor, shape: torch.Size):
        super().__init__()
        self.qdata, self.codes, self.steps = qdata, codes, steps

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.qdata, self.codes, self.steps

    def coalesced(self) -> CudaCoalescedInt4Tensor:
        """The same weight as ExecuTorch has it."""
        rows = untiled(self.codes, self.steps, self.shape[0])
        return CudaCoalescedInt4Tensor(self.qdata, *rows, [1, BLOCK // self.codes.shape[2]], self.shape)

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Exact in float32, rounded once otherwise."""
        return self.coalesced().dequantize(dtype)

    def _quantization_type(self) -> str:
        return f"shape={tuple(self.shape)}, device={self.device}"


@TiledInt4Tensor.implements([torch.ops.aten.linear.default])
@TiledInt4Tensor.implements_torch_function([F.linear])
def _linear(func, types, args, kwargs) -> Tensor:
    """As ExecuTorch does; for many rows it dequantizes the matrix first."""
    x, weight, *bias = args
    return F.linear(x, weight.coalesced(), *bias)


def laid_out(weight: CudaCoalescedInt4Tensor) -> TiledInt4Tensor:
    """The same weight for our kernel."""
    codes, steps = tiled(weight.scale, weight.scale_step, weight.zero_point, weight.zero_point_step)
    return TiledInt4Tensor(weight.qdata, codes, steps, weight.shape)


def lay_out_int4(module: nn.Module) -> None:
    """Lay out the weight of ``module``, in place, if it is INT4."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, CudaCoalescedInt4Tensor):
        module.weight = nn.Parameter(laid_out(weight), requires_grad=False)


def concatenated(weights: Sequence[TiledInt4Tensor]) -> TiledInt4Tensor:
    """One weight whose outputs are those of ``weights``, one after the other: one product for several of one input.

    The codes are copied. Raises ValueError for weights of several widths or group sizes.
    """
    kinds = {(weight.shape[1], weight.codes.shape[2]) for weight in weights}
    if len(kinds) > 1:
        raise ValueError(f"weights of (K, groups in {BLOCK}) {sorted(kinds)} make no single one: they must agree")
    rows = (untiled(weight.codes, weight.steps, weight.shape[0]) for weight in weights)
    codes, steps = tiled(*(torch.cat(part) for part in zip(*rows, strict=True)))
    qdata = torch.cat([weight.qdata for weight in weights])
    return TiledInt4Tensor(qdata, codes, steps, torch.Size((qdata.shape[0], weights[0].shape[1])))
