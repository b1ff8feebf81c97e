"""Forms of operations that XNNPACK takes whole and right.

ExecuTorch 1.5's partitioner for XNNPACK leaves out ``mean`` over the last dimension: each RMSNorm would end a delegate
and run a portable kernel whose time grows with the rows. As a product with a constant it stays inside, and so a
rotation of halves is a node instead of four: ``target_verify`` of gemma4-tiny has 14 delegates
(tests/runner/inspect/test_inspect.py counts them).

Its GELU is the exact one, and the partitioner hands it the tanh approximation all the same: 4.7e-4 off, which grew to
2e-3 in gemma4-tiny's features. ``tanh_gelu`` writes the approximation out (tests/export/test_artifact.py compares at
1e-4).
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
"""Stands for the module of any family in the register of patches."""


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
            found = _rms_norm(child, getattr(parent, "head_dim", getattr(parent, "hidden_size", 0)))
            if found is None:
                continue
            size, eps, weight = found
            mean = shared(f"mean_{size}", torch.full((1, size), 1 / size))
            epsilon = shared(f"eps_{eps!r}".replace("-", "_").replace(".", "_"), torch.full((1,), eps))
            setattr(parent, name, ProductRMSNorm(mean, epsilon, weight))


def _rms_norm(module: nn.Module, width: int) -> tuple[int, float, Tensor | None] | None:
    """Return size, epsilon and factor of a module that computes an RMSNorm, None of any other: every family of
    transformers has a class of its own, some with a weight that is added to 1, so that it is tried. ``width``: the size
    of one that holds neither a weight nor a shape, as Gemma 4's of values."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    shape: Sequence[int] = getattr(module, "normalized_shape", (width,)) if weight is None else weight.shape
    if "Norm" not in type(module).__name__ or not isinstance(eps, float) or len(shape) != 1 or not shape[0]:
        return None
    if len(inspect.signature(module.forward).parameters) != 1:  # a recurrent layer's norm takes a gate too
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

    The permutations are buffers of ``owner``: XNNPACK's partitioner cannot take a constant that is no buffer. Families
    rotate halves or neighbours: what one does to the unit vectors of a head is its permutation. A partial embedding
    cuts heads before it rotates, and stays as it is.
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
    """Rotate queries and keys as projections give them and attention takes them, [1, T, heads, head_dim]: most families
    of transformers hand over [1, heads, T, head_dim], and the transpositions there and back meet now, for
    ``remove_no_ops`` to take out."""
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
    """Return the names of transformers' modules, and of those with the draft's layers and a complex rotation."""
    names = {type(module).__module__ for module in owner.modules()}
    return sorted(names | {modeling_llama.__name__, complex_rotary.__name__})


def _rotate(owner: nn.Module, original: Callable[[Tensor], Tensor], index: int, x: Tensor) -> Tensor:
    rotation = getattr(owner, f"rotation_{index}_{x.shape[-1]}", None)
    return original(x) if rotation is None else F.linear(x, rotation)


class _WrittenOutGelu(TorchFunctionMode):
    """Sees every call of ``F.gelu``, also through a reference that was taken before (transformers' ``GELUTanh``)."""

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
    """Compute ``F.gelu(x, approximate="tanh")`` as ``x * sigmoid(x * (a + b x^2))``, which is the same function.

    (1 + tanh(u)) / 2 = sigmoid(2u), with u = sqrt(2 / pi) * (x + 0.044715 x^3). The constants are buffers of ``owner``.
    """
    scale = 2 * math.sqrt(2 / math.pi)
    owner.register_buffer("gelu_a", torch.full((1,), scale), persistent=False)
    owner.register_buffer("gelu_b", torch.full((1,), scale * 0.044715), persistent=False)
    with _WrittenOutGelu(owner):
        yield
