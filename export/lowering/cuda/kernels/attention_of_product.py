"""Attention whose input is a layer's matmul of queries, keys and values; see ``attention``."""

import torch
from torch import Tensor
from torch.library import triton_op
from torch.nn import functional as F

from eagle3.export.lowering.cuda.kernels.attention import Product, attention_reference, launch, wrapped
from eagle3.targets.attention import int8_codes


@triton_op("eagle3::attention_of_product", mutates_args={})
def attention_of_product(
    product: Tensor,
    bias: Tensor | None,
    keys: Tensor,
    values: Tensor,
    first: Tensor,
    last: Tensor,
    arrived: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    heads: int,
    starts: list[int],
    eps: list[float],
    plus: float,
    rotary: list[int],
    scale: float,
    longest: int,
    divided_rows: int,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> list[Tensor]:
    """Compute ``attention`` from a layer's matmul of queries, keys and values, in the launches of attention.

    It adds the bias, normalizes the heads (``x / rms(x) * (weight + plus)``) and applies rotary embeddings to queries
    and keys (``x * cos + across * sin``), all in float32. Keys and values are written at ``last`` before the rows
    attend.

    Args:
        product: bfloat16 [T, N]
        bias: [N], None: 0
        keys, values: as for ``attention``, without the rows' own
        first, last, arrived, scale, longest, divided_rows, softcap, sinks, key_scales, value_scales: see ``attention``;
            ``last`` is consecutive, ``divided_rows`` is not 0
        cos, sin: floating [1, T, columns], None without rotary embeddings
        q_weight, k_weight: [head_dim]; None for a weight of 1 without ``plus``
        heads: number of query heads
        starts: the first outputs of queries, keys and values in the product
        eps: added to the mean of squares in the norms of queries, keys and values; 0: no norm
        plus: added to the weights
        rotary: the number of leading dimensions of a head with rotary embeddings; the distance between the two
            dimensions of a pair; how many consecutive dimensions use the same column of ``cos`` and ``sin`` (modulo the
            number of columns). Empty: no rotary embeddings

    Returns: bfloat16 [1, T, heads, head_dim], and the keys and values that were attended to, with their scales if they
    have any. A lowered program writes them over the old ones, which nothing else reads.

    Raises:
        ValueError: see ``attention``
    """
    caches = [cache.clone() for cache in (keys, values, key_scales, value_scales) if cache is not None]
    keys, values, *scales = caches
    query = torch.empty(1, product.shape[0], heads, keys.shape[3], dtype=product.dtype, device=product.device)
    tables = (table if table is None else table.contiguous() for table in (cos, sin))
    made = Product(product.contiguous(), bias, *tables, q_weight, k_weight, heads, starts, eps, plus, rotary)
    given = query, keys, values, first, last, arrived, scale, longest, divided_rows, softcap, sinks
    return [launch(wrapped(), *given, *(scales or (None, None)), made), *caches]


@attention_of_product.register_kernel("cpu")
def attention_of_product_reference(
    product: Tensor,
    bias: Tensor | None,
    keys: Tensor,
    values: Tensor,
    first: Tensor,
    last: Tensor,
    arrived: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    heads: int,
    starts: list[int],
    eps: list[float],
    plus: float,
    rotary: list[int],
    scale: float,
    longest: int,
    divided_rows: int,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> list[Tensor]:
    """``attention_of_product`` in plain PyTorch, of any floating dtype."""
    kv_heads, slots, width = keys.shape[1:]

    biased = product.float() if bias is None else product.float() + bias

    def made(start: int, count: int, eps: float, weight: Tensor | None, with_rotary: bool) -> Tensor:
        x = biased[None, :, start : start + count * width].unflatten(-1, (count, width))
        x = F.rms_norm(x, [width], eps=eps) if eps else x
        x = x if weight is None else x * (weight.float() + plus)
        return (_with_rotary(x, cos, sin, *rotary) if with_rotary and rotary else x).to(product.dtype)

    query = made(starts[0], heads, eps[0], q_weight, True)
    key, value = made(starts[1], kv_heads, eps[1], k_weight, True), made(starts[2], kv_heads, eps[2], None, False)
    new = [key.transpose(1, 2), value.transpose(1, 2)]
    caches = [keys, values]
    if key_scales is not None and value_scales is not None:
        (keys_of, scales_of_keys), (values_of, scales_of_values) = map(int8_codes, new)
        new, caches = [keys_of, values_of, scales_of_keys, scales_of_values], [*caches, key_scales, value_scales]
    caches = [cache.index_copy(2, last % slots, x) for cache, x in zip(caches, new, strict=True)]
    keys, values, *scales = caches
    rest = scale, longest, divided_rows, softcap, sinks, *scales
    return [attention_reference(query, keys, values, first, last, arrived, *rest), *caches]


def _with_rotary(x: Tensor, cos: Tensor, sin: Tensor, dims: int, pair_distance: int, repeat: int) -> Tensor:
    columns = torch.arange(dims) // repeat % cos.shape[-1]
    cos, sin = (table[:, :, None, columns] for table in (cos, sin))
    x, rest = x[..., :dims], x[..., dims:]
    first, second = x.unflatten(-1, (-1, 2, pair_distance)).unbind(-2)
    across = torch.stack((-second, first), -2).flatten(-3)
    return torch.cat((x * cos + across * sin, rest), -1)
