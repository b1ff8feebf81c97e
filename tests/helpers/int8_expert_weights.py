"""Makes INT8 weights of experts."""

import torch
from torch import Tensor


def weights_of(count: int, n: int, k: int) -> tuple[Tensor, ...]:
    """Return random qdata, scale, zero and bias of ``count`` experts [n, k]."""
    q = torch.randint(-128, 128, (count * n, k), dtype=torch.int8)
    scale = torch.rand(count * n, k // 32).bfloat16() / 100
    return q, scale, torch.randint(-9, 9, scale.shape, dtype=torch.int8), torch.randn(count, n).bfloat16()
