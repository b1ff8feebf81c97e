"""GGUF's K-quants on CUDA: the weights of linears and embeddings, laid out for their kernel, values to the bit.

ExecuTorch's own conversion re-encodes scales and minima; here codes and float16 steps are those of the file, only
their places change (``kernels/k_quants.py`` has the layout). One layout serves products and look-ups alike, so that a
head tied to the embedding stays one tensor.
"""

import torch
from executorch.extension.llm.export.gguf import ExportableGGUFTensor, _q4_k_fields, _q5_k_fields, _q6_k_fields
from torch import Tensor
from torch.nn import functional as F
from torchao.utils import TorchAOBaseTensor

from eagle3.export.checkpoints.gguf_file import K_QUANTS, super_scales
from eagle3.export.lowering.cuda.kernels.k_quants import dequantized_rows, packed

_FIELDS = {"q4_k": _q4_k_fields, "q5_k": _q5_k_fields, "q6_k": _q6_k_fields}
_CHUNK = 1 << 24  # weights that are decoded at a time, a dozen bytes each


class KQuantTensor(TorchAOBaseTensor):
    """A weight [N, K] of bfloat16; parts as ``k_quant_small_m`` takes them."""

    tensor_data_names = ["qdata", "scale", "scale_step"]
    tensor_attribute_names = ["shape"]
    optional_tensor_data_names = ["high", "minima", "minima_step"]

    def __new__(cls, qdata: Tensor, scale: Tensor, scale_step: Tensor, shape: torch.Size, **parts: Tensor | None):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16, device=qdata.device)

    def __init__(
        self,
        qdata: Tensor,
        scale: Tensor,
        scale_step: Tensor,
        shape: torch.Size,
        high: Tensor | None = None,
        minima: Tensor | None = None,
        minima_step: Tensor | None = None,
    ):
        super().__init__()
        self.qdata, self.scale, self.scale_step = qdata, scale, scale_step
        self.high, self.minima, self.minima_step = high, minima, minima_step

    @property
    def parts(self) -> tuple[Tensor | None, ...]:
        return self.qdata, self.scale, self.scale_step, self.high, self.minima, self.minima_step

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Exact in float32, rounded once otherwise."""
        return dequantized_rows(*self.parts).to(dtype)

    def _quantization_type(self) -> str:
        return f"shape={tuple(self.shape)}, device={self.device}"


@KQuantTensor.implements([torch.ops.aten.linear.default])
@KQuantTensor.implements_torch_function([F.linear])
def _linear(func, types, args, kwargs) -> Tensor:
    """For many rows: the matrix is dequantized first."""
    x, weight, *bias = args
    return F.linear(x, weight.dequantize(x.dtype), *bias)


@KQuantTensor.implements([torch.ops.aten.embedding.default])
@KQuantTensor.implements_torch_function([F.embedding])
def _embedding(func, types, args, kwargs) -> Tensor:
    """[...] int64 -> [..., K]: the rows that are looked up are dequantized, not the table."""
    ids, table = args[:2] if isinstance(args[1], KQuantTensor) else args[1::-1]
    rows = (None if part is None else part[ids.flatten()] for part in table.parts)
    return dequantized_rows(*rows).to(table.dtype).unflatten(0, ids.shape)


def laid_out(weight: ExportableGGUFTensor) -> KQuantTensor:
    """The same weight for CUDA, in as many bytes."""
    n, k = weight.shape
    steps, bits = super_scales(weight), K_QUANTS[weight.ggml_type.upper()]
    rows = max(1, _CHUNK // k)
    pieces = [_codes(weight.raw[start : start + rows], weight.ggml_type, bits, k) for start in range(0, n, rows)]
    qdata, high, scale, minima = (None if part[0] is None else torch.cat(part) for part in zip(*pieces, strict=True))
    shape = torch.Size((n, k))
    if minima is None:
        return KQuantTensor(qdata, scale, steps.contiguous(), shape, high=high)
    scale_step, minima_step = (step.contiguous() for step in steps.unbind(-1))
    return KQuantTensor(qdata, scale, scale_step, shape, high=high, minima=minima, minima_step=minima_step)


def _codes(raw: Tensor, kind: str, bits: int, k: int) -> tuple[Tensor | None, ...]:
    """``qdata``, ``high``, ``scale`` and ``minima`` of some rows of blocks. ExecuTorch decodes scales as numbers: with
    steps of 1 these are their codes."""
    n = raw.shape[0]
    one = ExportableGGUFTensor(raw.clone(), kind, torch.float32)
    super_scales(one).fill_(1)
    q, scale, *minima = _FIELDS[kind](one.raw, n, k)
    if bits == 6:
        return *packed((q + 32).to(torch.uint8), bits), scale.to(torch.int8), None
    return *packed(q, bits), scale.to(torch.uint8), minima[0].to(torch.uint8)
