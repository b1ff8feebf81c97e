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

from eagle3.export.lowering.cuda.graph.nodes import BF16, QUANTIZED
from eagle3.export.lowering.cuda.kernels.bf16 import ALIGNED
from eagle3.export.lowering.cuda.kernels.product import Product
from eagle3.export.patching.patches import with_items

FUNCTIONS, OPERATORS = (
    f"torchao.quantization.IntxUnpackedToInt8Tensor.{table}" for table in ("_TORCH_FN_TABLE", "_ATEN_OP_TABLE")
)

aten = torch.ops.aten
Handler = Callable[[Any, Any, Any, Any], Tensor]


def _linear(product: Product, limit: int) -> Handler:
    def linear(_func: object, _types: object, args: tuple[Any, ...], _kwargs: object) -> Tensor:
        return _multiplied(product, limit, *args)

    return linear


def _are_many(x: Tensor, limit: int) -> bool:
    return statically_known_true(math.prod(x.shape[:-1]) > limit)


def _multiplied(product: Product, limit: int, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    operator = product.many if _are_many(x, limit) else product.few
    out = product(operator, x.reshape(-1, x.shape[-1]), weight, limit).reshape(*x.shape[:-1], weight.shape[0])
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
            return _multiplied(BF16, self.limit, *args, **kwargs)
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


@contextmanager
def small_m_dispatch(limit: int) -> Iterator[None]:
    """Make ``F.linear`` and ``F.embedding`` dispatch as this module's docstring says."""
    with ExitStack() as stack:
        for product in QUANTIZED:
            kind, linear = product.weight, _linear(product, limit)
            stack.enter_context(with_items(FUNCTIONS, {F.linear: linear}, kind._TORCH_FN_TABLE[kind]))
            stack.enter_context(with_items(OPERATORS, {aten.linear.default: linear}, kind._ATEN_OP_TABLE[kind]))
        kind = IntxUnpackedToInt8Tensor
        stack.enter_context(with_items(FUNCTIONS, {F.embedding: _embedding}, kind._TORCH_FN_TABLE[kind]))
        stack.enter_context(with_items(OPERATORS, {aten.embedding.default: _embedding}, kind._ATEN_OP_TABLE[kind]))
        stack.enter_context(_Unquantized(limit))
        yield
