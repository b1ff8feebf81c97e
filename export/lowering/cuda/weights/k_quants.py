"""GGUF's K-quants on CUDA: the weights of linears and embeddings, laid out for their kernel, values to the bit.

ExecuTorch's own conversion re-encodes scales and minima; here codes and float16 steps are those of the file, only
their places change (``kernels/k_quants.py`` has the layout). One layout serves products and look-ups alike, so that a
head tied to the embedding stays one tensor.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from executorch.extension.llm.export.gguf import ExportableGGUFTensor, _q4_k_fields, _q5_k_fields, _q6_k_fields
from torch import Tensor
from torch.nn import functional as F
from torchao.utils import TorchAOBaseTensor

from eagle3.export.checkpoints.gguf_file import K_QUANTS, super_scales
from eagle3.export.lowering.cuda.kernels.int4 import BLOCK, TILE, in_tiles
from eagle3.export.lowering.cuda.kernels.k_quants import by_row, code_bits, dequantized, dequantized_rows, packed

_DECODED = {"q4_k": _q4_k_fields, "q5_k": _q5_k_fields, "q6_k": _q6_k_fields}
_CHUNK = 1 << 24  # weights that are decoded at a time, a dozen bytes each


class KQuantTensor(TorchAOBaseTensor):
    """A weight [N, K] of bfloat16; parts as ``k_quant_small_m`` takes them."""

    tensor_data_names = ["qdata", "codes", "steps"]
    tensor_attribute_names = ["shape"]
    optional_tensor_data_names = ["high"]

    def __new__(cls, qdata: Tensor, _codes: Tensor, _steps: Tensor, shape: torch.Size, **_more: Tensor | None) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16, device=qdata.device)

    def __init__(
        self, qdata: Tensor, codes: Tensor, steps: Tensor, _shape: torch.Size, high: Tensor | None = None
    ):  # fmt: skip
        super().__init__()
        self.qdata, self.codes, self.steps, self.high = qdata, codes, steps, high

    @property
    def parts(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        return self.qdata, self.high, self.codes, self.steps

    @staticmethod
    def join(weights: Sequence["KQuantTensor"], rows: Callable[[list[Tensor]], Tensor]) -> "KQuantTensor":
        """See ``joined``. Whole tiles stay as they are; where others than the last are filled up, all are made anew."""
        if not any(weight.shape[0] % TILE for weight in weights[:-1]):
            return _one_below_the_other(weights, rows)
        rows_of_all = zip(*(by_row(*weight.parts) for weight in weights), strict=True)
        q, pairs, steps = map(torch.cat, rows_of_all)
        return _of_rows(q, pairs, steps, code_bits(*weights[0].parts))

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Exact in float32, rounded once otherwise."""
        return dequantized(*self.parts).to(dtype)

    def _quantization_type(self) -> str:
        return f"shape={tuple(self.shape)}, device={self.device}"


@KQuantTensor.implements([torch.ops.aten.linear.default])
@KQuantTensor.implements_torch_function([F.linear])
def _linear(_func: object, _types: object, args: tuple[Any, ...], _kwargs: object) -> Tensor:
    """The matrix is dequantized first; ``small_m_dispatch`` has products that decode it as they go."""
    x, weight, *bias = args
    return F.linear(x, weight.dequantize(x.dtype), *bias)


@KQuantTensor.implements([torch.ops.aten.embedding.default])
@KQuantTensor.implements_torch_function([F.embedding])
def _embedding(_func: object, _types: object, args: tuple[Any, ...], _kwargs: object) -> Tensor:
    """[...] int64 -> [..., K]: the rows that are looked up are dequantized, not the table."""
    ids, table = args[:2] if isinstance(args[1], KQuantTensor) else args[1::-1]
    return dequantized_rows(ids.flatten(), *table.parts).to(table.dtype).unflatten(0, ids.shape)


def laid_out(weight: ExportableGGUFTensor) -> KQuantTensor:
    """The same weight for CUDA, in as many bytes but for what fills up a last tile."""
    n, k = weight.shape
    rows, bits = max(1, _CHUNK // k // TILE) * TILE, K_QUANTS[weight.ggml_type.upper()]
    pieces = (weight.raw[start : start + rows] for start in range(0, n, rows))
    return _one_below_the_other([_of_rows(*_fields(piece, weight.ggml_type, k), bits) for piece in pieces], torch.cat)


def _fields(raw: Tensor, kind: str, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """What ``by_row`` gives, of some rows of blocks. ExecuTorch decodes scales as numbers: with steps of 1 these are
    their codes."""
    n = raw.shape[0]
    one = ExportableGGUFTensor(raw.clone(), kind, torch.float32)
    steps = super_scales(one).clone().view(n, k // BLOCK, -1)
    super_scales(one).fill_(1)
    q, scale, *minima = _DECODED[kind](one.raw, n, k)
    if not minima:
        return (q + 32).to(torch.uint8), scale.to(torch.int8).view(n, -1, 8, 2), steps
    return q, torch.stack([scale, *minima], dim=-1).to(torch.uint8).view(n, -1, 8, 2), steps


def _of_rows(q: Tensor, pairs: Tensor, steps: Tensor, bits: int) -> KQuantTensor:
    """Of what ``by_row`` gives."""
    qdata, high = packed(q, bits)
    return KQuantTensor(qdata, in_tiles(pairs), in_tiles(steps[:, :, None]).squeeze(2), q.shape, high=high)


def _one_below_the_other(weights: Sequence[KQuantTensor], rows: Callable[[list[Tensor]], Tensor]) -> KQuantTensor:
    """Of whole tiles, but for the last; ``rows`` joins tensors."""
    qdata, codes, steps = (
        rows([getattr(weight, part) for weight in weights]) for part in KQuantTensor.tensor_data_names
    )
    high = None if weights[0].high is None else rows([weight.high for weight in weights if weight.high is not None])
    shape = torch.Size((sum(weight.shape[0] for weight in weights), weights[0].shape[1]))
    return KQuantTensor(qdata, codes, steps, shape, high=high)
