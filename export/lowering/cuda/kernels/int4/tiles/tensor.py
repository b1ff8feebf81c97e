"""INT4 weights on CUDA: ExecuTorch's ``CudaCoalescedInt4Tensor`` with scales and zero points laid out for our kernel.

The codes stay the bytes of the checkpoint, so a mapped file is never copied. Scales and zero points are rearranged and
take no more memory than before: for each tile of 128 outputs and block of 256 along K, group by group, each output's
scale and zero point are side by side (``kernel.py``). The last tile is padded with zeros.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

import executorch.backends.cuda.quantize_op_dispatch  # noqa: F401  (used by linears with many rows)
import torch
from executorch.backends.cuda.coalesced_int4_tensor import CudaCoalescedInt4Tensor
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.utils import TorchAOBaseTensor

from eagle3.export.lowering.cuda.kernels.int4.tiles.kernel import BLOCK, MOST, TILE, tiled, untiled


class TiledInt4Tensor(TorchAOBaseTensor):
    """A weight [N, K] of dtype bfloat16, with the parts that ``int4_small_m`` takes. It may be several weights stacked
    along N."""

    tensor_data_names = ["qdata", "codes", "steps"]
    optional_tensor_data_names = ["qdata1", "qdata2"]
    tensor_attribute_names = ["shape"]

    def __new__(cls, qdata: Tensor, _codes: Tensor, _steps: Tensor, shape: torch.Size, **_more: Tensor | None) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16, device=qdata.device)

    def __init__(
        self,
        qdata: Tensor,
        codes: Tensor,
        steps: Tensor,
        _shape: torch.Size,
        qdata1: Tensor | None = None,
        qdata2: Tensor | None = None,
    ):
        super().__init__()
        self.qdata, self.codes, self.steps = qdata, codes, steps
        self.qdata1, self.qdata2 = qdata1, qdata2

    @property
    def parts(self) -> tuple[list[Tensor], Tensor, Tensor]:
        qdata = [each for each in (self.qdata, self.qdata1, self.qdata2) if each is not None]
        return qdata, self.codes, self.steps

    def coalesced(self) -> list[CudaCoalescedInt4Tensor]:
        """Return the weight, or each of several stacked ones, in ExecuTorch's layout."""
        found, first, group = [], 0, BLOCK // self.codes.shape[2]
        for qdata in self.parts[0]:
            last = first + -(-qdata.shape[0] // TILE)
            rows = untiled(self.codes[first:last], self.steps[first:last], qdata.shape[0])
            found.append(CudaCoalescedInt4Tensor(qdata, *rows, [1, group], (qdata.shape[0], self.shape[1])))
            first = last
        return found

    @staticmethod
    def concatenate(weights: Sequence["TiledInt4Tensor"], rows: Callable[[list[Tensor]], Tensor]) -> "TiledInt4Tensor":
        """Concatenate weights along N (see ``merged_linears.concatenated``); the codes are not copied.

        Raises ValueError for more weights than the kernel takes.
        """
        qdata = [each for weight in weights for each in weight.parts[0]]
        if len(qdata) > MOST:
            raise ValueError(f"{len(qdata)} weights: one launch takes {MOST}")
        codes, steps = (rows([getattr(weight, part) for weight in weights]) for part in ("codes", "steps"))
        shape = torch.Size((sum(weight.shape[0] for weight in weights), weights[0].shape[1]))
        more = dict(zip(TiledInt4Tensor.optional_tensor_data_names, qdata[1:], strict=False))
        return TiledInt4Tensor(qdata[0], codes, steps, shape, **more)

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return the dense weight: exact in float32, rounded once in other dtypes."""
        return torch.cat([weight.dequantize(dtype) for weight in self.coalesced()])

    def _quantization_type(self) -> str:
        return f"shape={tuple(self.shape)}, device={self.device}"


@TiledInt4Tensor.implements([torch.ops.aten.linear.default])
@TiledInt4Tensor.implements_torch_function([F.linear])
def _linear(_func: object, _types: object, args: tuple[Any, ...], _kwargs: object) -> Tensor:
    """Compute a linear as ExecuTorch does, which dequantizes the matrix first for many rows."""
    x, weight, *bias = args
    found = [F.linear(x, each) for each in weight.coalesced()]
    out = found[0] if len(found) == 1 else torch.cat(found, -1)
    return out + bias[0] if bias and bias[0] is not None else out


def laid_out(weight: CudaCoalescedInt4Tensor) -> TiledInt4Tensor:
    """Return the weight in our kernel's layout."""
    codes, steps = tiled(weight.scale, weight.scale_step, weight.zero_point, weight.zero_point_step)
    return TiledInt4Tensor(weight.qdata, codes, steps, weight.shape)


def lay_out_int4(module: nn.Module) -> None:
    """Put the weight of ``module`` into our kernel's layout, in place, if it is INT4."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, CudaCoalescedInt4Tensor):
        module.weight = nn.Parameter(laid_out(weight), requires_grad=False)
