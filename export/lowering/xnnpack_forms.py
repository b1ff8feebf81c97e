"""Forms of two operations that XNNPACK takes whole, with the same numbers.

ExecuTorch 1.5's partitioner for XNNPACK leaves out ``mean`` over the last dimension and every slice of a tensor with a
dynamic dimension. Each occurrence (an RMSNorm; the halves of a rotary embedding) would end a delegate and run portable
kernels whose time grows with the rows. As products with constants they stay inside: ``target_verify`` of gemma4-tiny
has 16 delegates instead of 52 (tests/test_inspect.py counts them).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

_LLAMA_LIKE_NORMS = (modeling_llama.LlamaRMSNorm, modeling_qwen3.Qwen3RMSNorm)


class ProductRMSNorm(nn.Module):
    """``x * rsqrt(mean(x^2) + eps) * weight``, the mean and eps as one linear layer with a single output."""

    def __init__(self, size: int, eps: float, weight: Tensor | None):
        super().__init__()
        self.register_buffer("mean", torch.full((1, size), 1 / size), persistent=False)
        self.register_buffer("eps", torch.full((1,), eps), persistent=False)
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(F.linear(x * x, self.mean, self.eps))
        return normed if self.weight is None else normed * self.weight


def use_product_norms(module: nn.Module) -> None:
    """Replace every RMSNorm below ``module``, weights kept."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.RMSNorm):
                eps = torch.finfo(torch.float32).eps if child.eps is None else child.eps
                setattr(parent, name, ProductRMSNorm(child.normalized_shape[0], eps, child.weight))
            elif isinstance(child, _LLAMA_LIKE_NORMS):
                setattr(parent, name, ProductRMSNorm(child.weight.shape[0], child.variance_epsilon, child.weight))


def _rotation(size: int) -> Tensor:
    """[size, size]: ``x @ rotation.T == cat(-x[size/2:], x[:size/2])``."""
    half = size // 2
    rotation = torch.zeros(size, size)
    rotation[:half, half:] = -torch.eye(half)
    rotation[half:, :half] = torch.eye(half)
    return rotation


@contextmanager
def product_rotary(owner: nn.Module, head_dims: set[int]) -> Iterator[None]:
    """Within it, transformers' ``rotate_half`` is a product with a signed permutation.

    The permutations are buffers of ``owner``: XNNPACK's partitioner cannot take a constant that is no buffer.
    """
    for size in head_dims:
        owner.register_buffer(f"rotation_{size}", _rotation(size), persistent=False)

    def rotate_half(x: Tensor) -> Tensor:
        return F.linear(x, getattr(owner, f"rotation_{x.shape[-1]}"))

    with ExitStack() as stack:
        for module in (modeling_llama, modeling_qwen3):
            stack.enter_context(mock.patch.object(module, "rotate_half", rotate_half))
        yield
