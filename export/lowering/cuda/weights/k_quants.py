"""GGUF's K-quants on CUDA: the weights of linears and embeddings, laid out for their kernel with bit-exact values.

ExecuTorch's own conversion re-encodes scales and minima. Here the codes and float16 steps are those of the file; only
their order changes (``kernels/k_quants.py`` has the layout). One layout serves matmuls and look-ups, so a head tied to
the embedding stays one tensor.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from executorch.extension.llm.export.gguf import ExportableGGUFTensor, _q4_k_fields, _q5_k_fields, _q6_k_fields
from torch import Tensor
from torch.nn import functional as F
from torchao.utils import TorchAOBaseTensor

from eagle3.export.checkpoints.gguf_file import K_QUANTS, super_scales
from eagle3.export.lowering.cuda.kernels.int4.tiles.kernel import BLOCK, TILE, in_tiles
from eagle3.export.lowering.cuda.kernels.k_quants import by_row, code_bits, dequantized, dequantized_rows, packed

_DECODED = {"q4_k": _q4_k_fields, "q5_k": _q5_k_fields, "q6_k": _q6_k_fields}
_CHUNK = 1 << 24  # the number of weights that are decoded at a time, at about a dozen bytes each


class KQuantTensor(TorchAOBaseTensor):
    """A weight [N, K] of dtype bfloat16, with the parts that ``k_quant_small_m`` takes."""

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
    def concatenate(weights: Sequence["KQuantTensor"], rows: Callable[[list[Tensor]], Tensor]) -> "KQuantTensor":
        """Concatenate weights along N (see ``merged_linears.concatenated``). If a weight before the last has a padded
        tile, all tiles are rebuilt."""
        if not any(weight.shape[0] % TILE for weight in weights[:-1]):
            return _stacked(weights, rows)
        rows_of_all = zip(*(by_row(*weight.parts) for weight in weights), strict=True)
        q, pairs, steps = map(torch.cat, rows_of_all)
        return _of_rows(q, pairs, steps, code_bits(*weights[0].parts))

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return the dense weight: exact in float32, rounded once in other dtypes."""
        return dequantized(*self.parts).to(dtype)

    def _quantization_type(self) -> str:
        return f"shape={tuple(self.shape)}, device={self.device}"


@KQuantTensor.implements([torch.ops.aten.linear.default])
@KQuantTensor.implements_torch_function([F.linear])
def _linear(_func: object, _types: object, args: tuple[Any, ...], _kwargs: object) -> Tensor:
    """Compute a linear with the dequantized matrix; ``small_m_dispatch`` has kernels that decode it instead."""
    x, weight, *bias = args
    return F.linear(x, weight.dequantize(x.dtype), *bias)


@KQuantTensor.implements([torch.ops.aten.embedding.default])
@KQuantTensor.implements_torch_function([F.embedding])
def _embedding(_func: object, _types: object, args: tuple[Any, ...], _kwargs: object) -> Tensor:
    """Look up rows: [...] int64 -> [..., K]. Only these rows are dequantized, not the table."""
    ids, table = args[:2] if isinstance(args[1], KQuantTensor) else args[1::-1]
    return dequantized_rows(ids.flatten(), *table.parts).to(table.dtype).unflatten(0, ids.shape)


def laid_out(weight: ExportableGGUFTensor) -> KQuantTensor:
    """Return the weight in CUDA's layout. It takes the same number of bytes, apart from the padding of the last
    tile."""
    n, k = weight.shape
    rows, bits = max(1, _CHUNK // k // TILE) * TILE, K_QUANTS[weight.ggml_type.upper()]
    pieces = (weight.raw[start : start + rows] for start in range(0, n, rows))
    return _stacked([_of_rows(*_fields(piece, weight.ggml_type, k), bits) for piece in pieces], torch.cat)


def _fields(raw: Tensor, kind: str, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Decode some rows of blocks into the form that ``by_row`` returns. ExecuTorch decodes scales as numbers; with
    steps set to 1, these numbers are the codes."""
    n = raw.shape[0]
    one = ExportableGGUFTensor(raw.clone(), kind, torch.float32)
    steps = super_scales(one).clone().view(n, k // BLOCK, -1)
    super_scales(one).fill_(1)
    q, scale, *minima = _DECODED[kind](one.raw, n, k)
    if not minima:
        return (q + 32).to(torch.uint8), scale.to(torch.int8).view(n, -1, 8, 2), steps
    return q, torch.stack([scale, *minima], dim=-1).to(torch.uint8).view(n, -1, 8, 2), steps


def _of_rows(q: Tensor, pairs: Tensor, steps: Tensor, bits: int) -> KQuantTensor:
    """Build a weight from the form that ``by_row`` returns."""
    qdata, high = packed(q, bits)
    return KQuantTensor(qdata, in_tiles(pairs), in_tiles(steps[:, :, None]).squeeze(2), q.shape, high=high)


def _stacked(weights: Sequence[KQuantTensor], rows: Callable[[list[Tensor]], Tensor]) -> KQuantTensor:
    """Stack weights along N by ``rows``, which concatenates tensors. All but the last must have whole tiles."""
    qdata, codes, steps = (
        rows([getattr(weight, part) for weight in weights]) for part in KQuantTensor.tensor_data_names
    )
    high = None if weights[0].high is None else rows([weight.high for weight in weights if weight.high is not None])
    shape = torch.Size((sum(weight.shape[0] for weight in weights), weights[0].shape[1]))
    return KQuantTensor(qdata, codes, steps, shape, high=high)
