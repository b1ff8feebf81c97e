"""Forms of three operations that XNNPACK takes whole and right.

ExecuTorch 1.5's partitioner for XNNPACK leaves out ``mean`` over the last dimension and every slice of a tensor with a
dynamic dimension. Each occurrence (an RMSNorm; the halves of a rotary embedding) would end a delegate and run portable
kernels whose time grows with the rows. As products with constants they stay inside: ``target_verify`` of gemma4-tiny
has 16 delegates instead of 52 (tests/test_inspect.py counts them).

Its GELU is the exact one, and the partitioner hands it the tanh approximation all the same: 4.7e-4 off, which grew to
2e-3 in gemma4-tiny's features. ``tanh_gelu`` writes the approximation out (tests/test_artifact.py compares at 1e-4).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

_LLAMA_LIKE_NORMS = (modeling_llama.LlamaRMSNorm, modeling_qwen3.Qwen3RMSNorm)


class ProductRMSNorm(nn.Module):
    """``x * rsqrt(mean(x^2) + eps) * weight``, the mean and eps as a linear layer with one output."""

    def __init__(self, mean: Callable[[], Tensor], eps: Callable[[], Tensor], weight: Tensor | None):
        super().__init__()
        self.mean, self.eps, self.weight = mean, eps, weight

    def forward(self, x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(F.linear(x * x, self.mean(), self.eps()))
        return normed if self.weight is None else normed * self.weight


def use_product_norms(owner: nn.Module) -> None:
    """Replace every RMSNorm below ``owner``, weights kept. Norms of a size share constants: buffers of ``owner``."""

    def shared(name: str, value: Tensor) -> Callable[[], Tensor]:
        owner.register_buffer(name, value, persistent=False)
        return lambda: getattr(owner, name)  # looked up in each forward: a trace swaps buffers for fake ones

    for parent in list(owner.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.RMSNorm):
                size, eps = child.normalized_shape[0], child.eps
            elif isinstance(child, _LLAMA_LIKE_NORMS):
                size, eps = child.weight.shape[0], child.variance_epsilon
            else:
                continue
            mean = shared(f"mean_{size}", torch.full((1, size), 1 / size))
            epsilon = shared(f"eps_{eps!r}".replace("-", "_").replace(".", "_"), torch.full((1,), eps))
            setattr(parent, name, ProductRMSNorm(mean, epsilon, child.weight))


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


class _WrittenOutGelu(TorchFunctionMode):
    """Sees every call of ``F.gelu``, also through a reference that was taken before (transformers' ``GELUTanh``)."""

    def __init__(self, owner: nn.Module):
        super().__init__()
        self.owner = owner

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.gelu and kwargs.get("approximate", "none") == "tanh":
            (x,) = args or (kwargs["input"],)
            return x * torch.sigmoid(x * (self.owner.gelu_a + self.owner.gelu_b * (x * x)))
        return func(*args, **kwargs)


@contextmanager
def tanh_gelu(owner: nn.Module) -> Iterator[None]:
    """Within it ``F.gelu(x, approximate="tanh")`` is ``x * sigmoid(x * (a + b x^2))``, which is the same function.

    (1 + tanh(u)) / 2 = sigmoid(2u), with u = sqrt(2 / pi) * (x + 0.044715 x^3). The constants are buffers of ``owner``.
    """
    scale = 2 * math.sqrt(2 / math.pi)
    owner.register_buffer("gelu_a", torch.full((1,), scale), persistent=False)
    owner.register_buffer("gelu_b", torch.full((1,), scale * 0.044715), persistent=False)
    with _WrittenOutGelu(owner):
        yield
