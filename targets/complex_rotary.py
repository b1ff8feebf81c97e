"""Computes in real numbers the rotary embeddings that transformers computes in complex ones (Llama 4, DeepSeek V2).

Neither backend lowers complex tensors. Within ``RealRotary``, the results of ``torch.polar`` and of
``torch.view_as_complex`` are real tensors of interleaved pairs. The products and sums are the same:
(a + ib)(c + is) = (ac - bs) + i(bc + as). Any other operation on them is an error.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def rotate_half(x: Tensor) -> Tensor:
    """Multiply by i the complex numbers that pairs of adjacent elements stand for: [..., n] -> [..., n]."""
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


class _Rotation:
    """The complex numbers that pairs are multiplied by: real and imaginary parts [..., n], each repeated twice."""

    def __init__(self, real: Tensor, imaginary: Tensor):
        self.real, self.imaginary = real, imaginary

    def __getitem__(self, index: tuple[slice | None, ...]) -> "_Rotation":
        return _Rotation(self.real[index], self.imaginary[index])

    def __mul__(self, factor: float) -> "_Rotation":
        return _Rotation(self.real * factor, self.imaginary * factor)

    def unsqueeze(self, dim: int) -> "_Rotation":
        if dim < 0:  # behind the last dimension, where pairs and complex numbers differ in their dimensions
            raise TypeError(f"unsqueeze({dim}) of complex numbers is not known here")
        return _Rotation(self.real.unsqueeze(dim), self.imaginary.unsqueeze(dim))

    def to(self, device: torch.device) -> "_Rotation":
        return _Rotation(self.real.to(device), self.imaginary.to(device))


class _Pairs:
    """Complex numbers as pairs of adjacent elements, [..., n]."""

    def __init__(self, pairs: Tensor):
        self.pairs = pairs

    @property
    def device(self) -> torch.device:
        return self.pairs.device

    def __mul__(self, by: _Rotation) -> "_Pairs":
        return _Pairs(self.pairs * by.real + rotate_half(self.pairs) * by.imaginary)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], *_given: object) -> NoReturn:
        """Make ``torch.view_as_real`` dispatch to the mode. Raises TypeError for any other function."""
        raise TypeError(f"{func.__name__} of complex numbers is not known here")


class RealRotary(TorchFunctionMode):
    """Computes rotary embeddings on complex numbers with real ones while it is active (see the module's docstring)."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if func is torch.polar:
            size, angle = (torch.stack((each, each), dim=-1).flatten(-2) for each in args)
            return _Rotation(size * angle.cos(), size * angle.sin())
        if func is torch.view_as_complex:
            return _Pairs(args[0].flatten(-2))
        if func is torch.view_as_real and isinstance(args[0], _Pairs):
            return args[0].pairs.unflatten(-1, (-1, 2))
        return func(*args, **(kwargs or {}))
