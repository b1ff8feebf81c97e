"""INT4 weights on CUDA in records (``layout.py``).

Weights are packed once their models are loaded and their linears merged, straight into files on the disk of the
artifact: a merged weight's parts stay mapped until then, so that no weight is held twice. A weight that records cannot
hold keeps its tiles (``tiles/tensor.py``). Experts keep their own layout, which has no zero points and which a program
reads for one expert at a time; K-quants and INT8 have codes of other widths.
"""

from pathlib import Path
from typing import Any, Self

import executorch.backends.cuda.quantize_op_dispatch  # noqa: F401  (used by linears with many rows)
import torch
from executorch.backends.cuda.coalesced_int4_tensor import CudaCoalescedInt4Tensor
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.utils import TorchAOBaseTensor

from eagle3.export.lowering.cuda.kernels.int4.records import layout as record_layout
from eagle3.export.lowering.cuda.kernels.int4.records.layout import GROUP, OUTPUTS
from eagle3.export.lowering.cuda.kernels.int4.tiles.kernel import BLOCK
from eagle3.export.lowering.cuda.kernels.int4.tiles.tensor import TiledInt4Tensor
from eagle3.export.speculator import tensor_files


class RecordsInt4Tensor(TorchAOBaseTensor):
    """A weight [N, K] of dtype bfloat16 in the records that ``int4_records_small_m`` takes. It may be several weights
    stacked along N."""

    tensor_data_names = ["qdata"]
    tensor_attribute_names = ["shape"]

    def __new__(cls, qdata: Tensor, shape: torch.Size) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16, device=qdata.device)

    def __init__(self, qdata: Tensor, _shape: torch.Size):
        super().__init__()
        self.qdata = qdata

    def coalesced(self) -> CudaCoalescedInt4Tensor:
        """Return the weight in ExecuTorch's layout, bit for bit as it was packed."""
        return CudaCoalescedInt4Tensor(*record_layout.unpacked(self.qdata), [1, GROUP], self.shape)

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return the dense weight: exact in float32, rounded once in other dtypes."""
        return record_layout.dequantized(self.qdata).to(dtype)

    def _quantization_type(self) -> str:
        return f"shape={tuple(self.shape)}, device={self.device}"


@RecordsInt4Tensor.implements([torch.ops.aten.linear.default])
@RecordsInt4Tensor.implements_torch_function([F.linear])
def _linear(_func: object, _types: object, args: tuple[Any, ...], _kwargs: object) -> Tensor:
    """Compute a linear as ExecuTorch does, which dequantizes the matrix first for many rows."""
    x, weight, *bias = args
    return F.linear(x, weight.coalesced(), *bias)


def fits(weight: TiledInt4Tensor) -> bool:
    """Return True if records can hold the weight, and each of several stacked ones."""
    group = BLOCK // weight.codes.shape[2]
    return all(record_layout.fits(qdata.shape[0], weight.shape[1], group) for qdata in weight.parts[0])


def packed(weight: TiledInt4Tensor, folder: Path) -> RecordsInt4Tensor:
    """Return the weight in records, in a file on the disk of ``folder``. Raises ValueError if ``fits`` is False."""
    out = tensor_files.empty(record_layout.shape(*weight.shape), torch.uint8, folder)
    first = 0
    for each in weight.coalesced():
        last = first + each.shape[0] // OUTPUTS
        parts = each.qdata, each.scale, each.scale_step, each.zero_point, each.zero_point_step
        record_layout.records(*parts, out=out[first:last])
        first = last
    return RecordsInt4Tensor(out, weight.shape)


def pack_records(model: nn.Module, folder: Path) -> dict[str, int]:
    """Pack the INT4 weights of ``model`` into records, in place. Modules that share a weight still do.

    Returns the number of weights by layout: ``records``, and ``tiles`` for those that records cannot hold.
    """
    done: dict[int, nn.Parameter] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None or not isinstance(weight.data, TiledInt4Tensor):
            continue
        if id(weight) not in done:
            holds = fits(weight.data)
            done[id(weight)] = nn.Parameter(packed(weight.data, folder), requires_grad=False) if holds else weight
        module.weight = done[id(weight)]
    held = sum(isinstance(weight.data, RecordsInt4Tensor) for weight in done.values())
    return {"records": held, "tiles": len(done) - held}
