"""The dispatch of linears to kernels, which replaces ExecuTorch's own while an export is traced.

ExecuTorch sends up to 4 rows to ``executorch_cuda::int*_plain_mm``, which exists only in its CUDA runtime, and
dequantizes the whole matrix for more rows. Here, a linear whose rows are known to be more than ``limit`` takes the
large-M kernel, which decodes weights while it multiplies. ``limit`` is ``Plan.few_rows``, 8 or 16, and less than the
shortest prefill. Every other linear takes the small-M op, which reads each weight once for 16 rows. Unquantized
bfloat16 linears with more than ``limit`` rows stay as they are. A quantized embedding dequantizes only the rows that it
looks up; one of K-quants does so without this dispatch.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import executorch.backends.cuda.quantize_op_dispatch  # noqa: F401  (the dispatch that is replaced)
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torchao.quantization import IntxUnpackedToInt8Tensor
from torchao.utils import TorchAOBaseTensor

from eagle3.export.lowering.cuda.kernels.bf16 import ALIGNED, bf16_small_m
from eagle3.export.lowering.cuda.kernels.int4 import int4_small_m
from eagle3.export.lowering.cuda.kernels.int4_matmul import int4_matmul
from eagle3.export.lowering.cuda.kernels.int4_records import int4_records_small_m
from eagle3.export.lowering.cuda.kernels.int4_records_matmul import int4_records_matmul
from eagle3.export.lowering.cuda.kernels.int8_matmul import int8_matmul
from eagle3.export.lowering.cuda.kernels.k_quant_matmul import k_quant_matmul
from eagle3.export.lowering.cuda.kernels.k_quants import k_quant_small_m
from eagle3.export.lowering.cuda.kernels.small_m import int8_small_m
from eagle3.export.lowering.cuda.kernels.sums import counters
from eagle3.export.lowering.cuda.weights.int4_records_tensor import RecordsInt4Tensor
from eagle3.export.lowering.cuda.weights.int4_tensor import TiledInt4Tensor
from eagle3.export.lowering.cuda.weights.k_quants import KQuantTensor
from eagle3.export.patching.patches import with_items

FUNCTIONS, OPERATORS = (
    f"torchao.quantization.IntxUnpackedToInt8Tensor.{table}" for table in ("_TORCH_FN_TABLE", "_ATEN_OP_TABLE")
)

aten = torch.ops.aten
Handler = Callable[[Any, Any, Any, Any], Tensor]
Product = Callable[[Tensor, Any, int], Tensor]  # takes rows [M, K], a weight, and the limit of few rows

_COUNTERS = {torch.device("cpu"): counters()}
"""The counters that a device's matmuls and attention use. Those of the host are made before any trace, so that a trace
takes them as a constant."""


def shared_counters(x: Tensor) -> Tensor:
    """Return the counters on the device of ``x``."""
    if x.device not in _COUNTERS:
        _COUNTERS[x.device] = counters(x.device)
    return _COUNTERS[x.device]


def _bf16(x: Tensor, weight: Tensor, _limit: int) -> Tensor:
    return bf16_small_m(x, weight, shared_counters(x))


def _int4(x: Tensor, weight: TiledInt4Tensor, _limit: int) -> Tensor:
    return int4_small_m(x, *weight.parts, shared_counters(x))


def _int4_many(x: Tensor, weight: TiledInt4Tensor, _limit: int) -> Tensor:
    return int4_matmul(x, *weight.parts, shared_counters(x))


def _records(x: Tensor, weight: RecordsInt4Tensor, limit: int) -> Tensor:
    return int4_records_small_m(x, weight.qdata, shared_counters(x), limit)


def _records_many(x: Tensor, weight: RecordsInt4Tensor, limit: int) -> Tensor:
    return int4_records_matmul(x, weight.qdata, shared_counters(x), limit)


def _int8(x: Tensor, weight: IntxUnpackedToInt8Tensor, _limit: int) -> Tensor:
    return int8_small_m(x, weight.qdata, weight.scale, weight.zero_point, shared_counters(x))


def _int8_many(x: Tensor, weight: IntxUnpackedToInt8Tensor, _limit: int) -> Tensor:
    return int8_matmul(x, weight.qdata, weight.scale, weight.zero_point, shared_counters(x))


def _k_quant(x: Tensor, weight: KQuantTensor, _limit: int) -> Tensor:
    return k_quant_small_m(x, *weight.parts, shared_counters(x))


def _k_quant_many(x: Tensor, weight: KQuantTensor, _limit: int) -> Tensor:
    return k_quant_matmul(x, *weight.parts, shared_counters(x))


def _linear(few: Product, many: Product, limit: int) -> Handler:
    def linear(_func: object, _types: object, args: tuple[Any, ...], _kwargs: object) -> Tensor:
        return _multiplied(many if _are_many(args[0], limit) else few, limit, *args)

    return linear


def _are_many(x: Tensor, limit: int) -> bool:
    return statically_known_true(math.prod(x.shape[:-1]) > limit)


def _multiplied(product: Product, limit: int, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = product(x.reshape(-1, x.shape[-1]), weight, limit).reshape(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias


class _Unquantized(TorchFunctionMode):
    """Sends linears with few rows and plain bfloat16 weights to the small-M op."""

    def __init__(self, limit: int):
        super().__init__()
        self.limit = limit

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func is F.linear and _is_plain(*args[:2], **kwargs) and not _are_many(args[0], self.limit):
            return _multiplied(_bf16, self.limit, *args, **kwargs)
        return func(*args, **kwargs)


def _is_plain(x: Tensor, weight: Tensor, **_bias: object) -> bool:
    bfloat16 = x.dtype == weight.dtype == torch.bfloat16
    return bfloat16 and not is_traceable_wrapper_subclass(weight) and weight.shape[1] % ALIGNED == 0


def _embedding(_func: object, _types: object, args: tuple[Any, ...], _kwargs: object) -> Tensor:
    """Look up rows of an INT8 table: [...] int64 -> [..., width]."""
    ids, table = args[:2]
    groups = table.scale.shape[1]
    codes = table.qdata[ids].unflatten(-1, (groups, -1)).to(table.dtype)
    zeros, scales = (values[ids].to(table.dtype).unsqueeze(-1) for values in (table.zero_point, table.scale))
    return ((codes - zeros) * scales).flatten(-2)


KERNELS: dict[type[TorchAOBaseTensor], tuple[Product, Product]] = {
    TiledInt4Tensor: (_int4, _int4_many),
    RecordsInt4Tensor: (_records, _records_many),
    IntxUnpackedToInt8Tensor: (_int8, _int8_many),
    KQuantTensor: (_k_quant, _k_quant_many),
}
"""The kernels for few rows and for many rows, by the class of the weight."""


@contextmanager
def small_m_dispatch(limit: int) -> Iterator[None]:
    """Make ``F.linear`` and ``F.embedding`` dispatch as this module's docstring says."""
    with ExitStack() as stack:
        for kind, (few, many) in KERNELS.items():
            product = _linear(few, many, limit)
            stack.enter_context(with_items(FUNCTIONS, {F.linear: product}, kind._TORCH_FN_TABLE[kind]))
            stack.enter_context(with_items(OPERATORS, {aten.linear.default: product}, kind._ATEN_OP_TABLE[kind]))
        kind = IntxUnpackedToInt8Tensor
        stack.enter_context(with_items(FUNCTIONS, {F.embedding: _embedding}, kind._TORCH_FN_TABLE[kind]))
        stack.enter_context(with_items(OPERATORS, {aten.embedding.default: _embedding}, kind._ATEN_OP_TABLE[kind]))
        stack.enter_context(_Unquantized(limit))
        yield
