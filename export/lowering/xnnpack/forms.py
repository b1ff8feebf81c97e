"""Rewrites operations into forms that XNNPACK takes completely and computes correctly.

ExecuTorch 1.5's partitioner for XNNPACK leaves out ``mean`` over the last dimension: each RMSNorm would end a delegate,
and would run a portable kernel whose time grows with the rows. Written as a product with a constant, the mean stays in
the delegate. A rotation of halves, written as a product too, is one node instead of four. As a result,
``target_verify`` of gemma4-tiny has 14 delegates (tests/runner/commands/test_inspect.py counts them).

XNNPACK computes the exact GELU, but the partitioner also assigns GELUs with the tanh approximation to it. The results
were off by 4.7e-4, which grew to 2e-3 in gemma4-tiny's features. ``tanh_gelu`` writes the approximation out
(tests/export/test_artifact.py compares at 1e-4).
"""

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers.models.llama import modeling_llama

from eagle3.export.patching.patches import replaced
from eagle3.targets import complex_rotary

FAMILY = modeling_llama.__name__
"""The name under which the register of patches lists the modules of all families."""


class ProductRMSNorm(nn.Module):
    """Computes ``x * rsqrt(mean(x^2) + eps) * weight``, with the mean and eps as a linear layer with one output."""

    def __init__(self, mean: Callable[[], Tensor], eps: Callable[[], Tensor], weight: Tensor | None):
        super().__init__()
        self.mean, self.eps, self.weight = mean, eps, weight

    def forward(self, x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(F.linear(x * x, self.mean(), self.eps()))
        return normed if self.weight is None else normed * self.weight


def use_product_norms(owner: nn.Module) -> None:
    """Replace every RMSNorm below ``owner``; the weights are kept. Norms of the same size share their constants, which
    are buffers of ``owner``."""

    def shared(name: str, value: Tensor) -> Callable[[], Tensor]:
        owner.register_buffer(name, value, persistent=False)
        # looked up in each forward, since a trace replaces buffers by fake ones
        return lambda: getattr(owner, name)

    for parent in list(owner.modules()):
        for name, child in list(parent.named_children()):
            found = _rms_norm(child, getattr(parent, "head_dim", getattr(parent, "hidden_size", 0)))
            if found is None:
                continue
            size, eps, weight = found
            mean = shared(f"mean_{size}", torch.full((1, size), 1 / size))
            epsilon = shared(f"eps_{eps!r}".replace("-", "_").replace(".", "_"), torch.full((1,), eps))
            setattr(parent, name, ProductRMSNorm(mean, epsilon, weight))


def _rms_norm(module: nn.Module, width: int) -> tuple[int, float, Tensor | None] | None:
    """Return size, epsilon and factor of a module that computes an RMSNorm; None for any other module. Every family of
    transformers has a class of its own, some with a weight that is added to 1, so the module's output is compared with
    the formula. ``width`` is the size of a norm that has neither a weight nor a shape, such as Gemma 4's norm of
    values."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    shape: Sequence[int] = getattr(module, "normalized_shape", (width,)) if weight is None else weight.shape
    if "Norm" not in type(module).__name__ or not isinstance(eps, float) or len(shape) != 1 or not shape[0]:
        return None
    if len(inspect.signature(module.forward).parameters) != 1:  # the norm of a recurrent layer also takes a gate
        return None
    x = torch.linspace(-1, 2, 2 * shape[0]).reshape(2, -1)
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    found = module(x)
    for factor in (None,) if weight is None else (weight, nn.Parameter(1 + weight, requires_grad=False)):
        if torch.allclose(found, normed if factor is None else normed * factor, atol=1e-5, rtol=1e-5):
            return shape[0], eps, factor
    return None


@contextmanager
def product_rotary(owner: nn.Module, head_dims: set[int]) -> Iterator[None]:
    """Make the ``rotate_half`` of each family of transformers a product with a signed permutation.

    The permutations are buffers of ``owner``, since XNNPACK's partitioner cannot take a constant that is not a buffer.
    Families rotate halves or neighbours. A family's permutation is found by applying its function to the unit vectors
    of a head. A partial rotary embedding calls the function on a part of a head, and is not replaced.
    """
    with ExitStack() as stack:
        for index, family in enumerate(_families(owner)):
            original = getattr(sys.modules.get(family), "rotate_half", None)
            if original is not None:
                for size in head_dims:
                    rotation = original(torch.eye(size)).T.contiguous()
                    owner.register_buffer(f"rotation_{index}_{size}", rotation, persistent=False)
                product = partial(_rotate, owner, original, index)
                stack.enter_context(replaced(f"{FAMILY}.rotate_half", product, sys.modules[family]))
        yield


@contextmanager
def rows_before_heads(owner: nn.Module) -> Iterator[None]:
    """Rotate queries and keys in the layout [1, T, heads, head_dim], which projections return and attention takes. Most
    families of transformers use [1, heads, T, head_dim]. Without a rotation between them, the two transpositions
    cancel, and ``remove_no_ops`` removes both."""
    with ExitStack() as stack:
        for family in _families(owner):
            original = getattr(sys.modules.get(family), "apply_rotary_pos_emb", None)
            if original is not None and list(inspect.signature(original).parameters) == ROTARY_PARAMETERS:
                rotated = partial(_rotated_by_rows, original)
                name = f"{FAMILY}.apply_rotary_pos_emb"
                stack.enter_context(replaced(name, rotated, sys.modules[family]))
        yield


ROTARY_PARAMETERS = ["q", "k", "cos", "sin", "unsqueeze_dim"]


def _rotated_by_rows(
    original: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    if unsqueeze_dim != 1:
        return original(q, k, cos, sin, unsqueeze_dim)
    q, k = original(q.transpose(1, 2), k.transpose(1, 2), cos, sin, 2)
    return q.transpose(1, 2), k.transpose(1, 2)


def _families(owner: nn.Module) -> list[str]:
    """Return the names of the Python modules that define the layers of ``owner``, the draft's layers and complex
    rotations."""
    names = {type(module).__module__ for module in owner.modules()}
    return sorted(names | {modeling_llama.__name__, complex_rotary.__name__})


def _rotate(owner: nn.Module, original: Callable[[Tensor], Tensor], index: int, x: Tensor) -> Tensor:
    rotation = getattr(owner, f"rotation_{index}_{x.shape[-1]}", None)
    return original(x) if rotation is None else F.linear(x, rotation)


class _WrittenOutGelu(TorchFunctionMode):
    """Replaces every call of ``F.gelu``, including calls through references taken earlier (transformers'
    ``GELUTanh``)."""

    def __init__(self, owner: nn.Module):
        super().__init__()
        self.owner = owner

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func is F.gelu and kwargs.get("approximate", "none") == "tanh":
            (x,) = args or (kwargs["input"],)
            return x * torch.sigmoid(x * (self.owner.gelu_a + self.owner.gelu_b * (x * x)))
        return func(*args, **kwargs)


@contextmanager
def tanh_gelu(owner: nn.Module) -> Iterator[None]:
    """Compute ``F.gelu(x, approximate="tanh")`` as ``x * sigmoid(x * (a + b x^2))``, which is the same function, since
    (1 + tanh(u)) / 2 = sigmoid(2u), with u = sqrt(2 / pi) * (x + 0.044715 x^3). The constants are buffers of ``owner``.
    """
    scale = 2 * math.sqrt(2 / math.pi)
    owner.register_buffer("gelu_a", torch.full((1,), scale), persistent=False)
    owner.register_buffer("gelu_b", torch.full((1,), scale * 0.044715), persistent=False)
    with _WrittenOutGelu(owner):
        yield
