"""Rotary embeddings that a family of transformers computes on complex numbers (Llama 4), in real ones.

Neither backend lowers complex tensors. Within ``RealRotary`` the unit numbers that ``torch.polar`` makes and the pairs
that ``torch.view_as_complex`` makes stay real, interleaved: (a + ib)(c + is) = (ac - bs) + i(bc + as), the same
products and sums. Anything else that is done to them is an error.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def rotate_half(x: Tensor) -> Tensor:
    """i times the complex numbers that are the pairs of neighbours: [..., n] -> [..., n]."""
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


class _Rotation:
    """Complex numbers by which pairs are multiplied: real and imaginary parts, each twice over, [..., n]."""

    def __init__(self, real: Tensor, imaginary: Tensor):
        self.real, self.imaginary = real, imaginary

    def __getitem__(self, index: tuple[slice | None, ...]) -> "_Rotation":
        return _Rotation(self.real[index], self.imaginary[index])

    def __mul__(self, factor: float) -> "_Rotation":
        return _Rotation(self.real * factor, self.imaginary * factor)

    def to(self, device: torch.device) -> "_Rotation":
        return _Rotation(self.real.to(device), self.imaginary.to(device))


class _Pairs:
    """Complex numbers as pairs of neighbours, [..., n]."""

    def __init__(self, pairs: Tensor):
        self.pairs = pairs

    def __mul__(self, by: _Rotation) -> "_Pairs":
        return _Pairs(self.pairs * by.real + rotate_half(self.pairs) * by.imaginary)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], *_given: object) -> NoReturn:
        """Lets ``torch.view_as_real`` take one, which is then handed to the mode."""
        raise TypeError(f"{func.__name__} of complex numbers is not known here")


class RealRotary(TorchFunctionMode):
    """See this module's docstring."""

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
