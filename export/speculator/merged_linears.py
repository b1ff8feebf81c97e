"""Merges linears with the same input into one: those of queries, keys and values, and those of gate and up in an MLP.

Without this a round on a GPU has about a thousand launches, and each small one leaves part of the GPU idle. On the CPU
a round of gemma4-tiny takes 2 to 4% less time, and the export of a quantized model a sixth less. The weights are
concatenated along their outputs, and each linear becomes a slice of the result. Names suggest which linears have the
same input. Each forward compares the inputs and computes a linear with another input separately, so a wrong suggestion
cannot make an artifact wrong.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchao.utils import TorchAOBaseTensor

from eagle3.export.speculator import tensor_files
from eagle3.export.speculator.tensor_files import part_names

SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""transformers' names of a module's linears that multiply the same input."""


def merge_linears(model: nn.Module, folder: Path) -> None:
    """Merge the linears of ``model`` in place. Large merged weights are kept in files on the disk of ``folder``.

    A weight that another module also holds, such as a tied head, is not merged.
    """
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    holders: dict[int, int] = {}
    for module in linears:
        holders[id(module.weight)] = holders.get(id(module.weight), 0) + 1
    for parent in list(model.modules()):
        for names in SAME_INPUT:
            alike: dict[Any, dict[str, nn.Linear]] = {}
            for name in names:
                linear = getattr(parent, name, None)
                if type(linear) is nn.Linear and holders[id(linear.weight)] == 1:
                    alike.setdefault((form(linear.weight.data), linear.bias is None), {})[name] = linear
            for group in alike.values():
                if len(group) > 1:
                    _merge(parent, group, folder)


def _merge(parent: nn.Module, group: dict[str, nn.Linear], folder: Path) -> None:
    linears = list(group.values())
    weight = concatenated([linear.weight.data for linear in linears], folder)
    product = nn.Linear(1, 1, bias=False, device="meta")
    product.in_features, product.out_features = linears[0].in_features, weight.shape[0]
    product.weight = nn.Parameter(weight, requires_grad=False)
    if linears[0].bias is not None:
        product.bias = nn.Parameter(torch.cat([linear.bias.data for linear in linears]), requires_grad=False)
    setattr(parent, "_".join(group), product)
    shared = _Shared(parent, "_".join(group), len(group))
    ends = list(accumulate((linear.out_features for linear in linears), initial=0))
    for name, (start, stop) in zip(group, pairwise(ends), strict=True):
        setattr(parent, name, Slice(shared, start, stop))


class Slice(nn.Module):
    """A module that returns outputs ``start`` to ``stop`` of a merged linear, which the parent holds: [..., K] -> [...,
    stop - start]."""

    def __init__(self, shared: "_Shared", start: int, stop: int):
        super().__init__()
        self.start, self.stop, self._shared = start, stop, shared

    def forward(self, x: Tensor) -> Tensor:
        return self._shared.product_of(x)[..., self.start : self.stop]


class _Shared:
    """Computes a merged linear and stores the result until all slices are taken. It is not a module, because a trace
    does not allow modules to keep such state."""

    def __init__(self, parent: nn.Module, name: str, slices: int):
        self._parent, self._name, self._slices = parent, name, slices
        self._x: Any = None
        self._out: Any = None
        self._left = 0

    def product_of(self, x: Tensor) -> Tensor:
        if x is not self._x:
            self._x, self._out, self._left = x, getattr(self._parent, self._name)(x), self._slices
        out = self._out
        self._left -= 1
        if not self._left:
            self._x = self._out = None
        return out


def concatenated(weights: Sequence[Tensor], folder: Path) -> Tensor:
    """Concatenate weights [N_i, K] of the same ``form`` into one [sum of N_i, K].

    Large parts of the result are kept in files on the disk of ``folder``. A class whose parts cannot simply be
    concatenated by rows has a method ``concatenate``, which takes the weights and a function that concatenates tensors.
    """

    def rows(tensors: Sequence[Tensor]) -> Tensor:
        shape = sum(len(tensor) for tensor in tensors), *tensors[0].shape[1:]
        return torch.cat(list(tensors), out=tensor_files.empty(shape, tensors[0].dtype, folder))

    first = weights[0]
    if not isinstance(first, TorchAOBaseTensor):
        return rows(weights)
    if hasattr(first, "concatenate"):
        return first.concatenate(weights, rows)
    parts = {name: rows([getattr(weight, name) for weight in weights]) for name in part_names(first)}
    attributes = {name: getattr(first, name) for name in first.tensor_attribute_names}
    if "shape" in attributes:
        attributes["shape"] = torch.Size((sum(weight.shape[0] for weight in weights), first.shape[1]))
    return type(first)(**parts, **attributes)


def form(weight: Tensor) -> str:
    """Return a description of a weight that leaves out its number of rows: weights with equal descriptions can be
    concatenated."""
    if not isinstance(weight, TorchAOBaseTensor):
        return repr((type(weight), weight.dtype, weight.shape[1:]))
    attributes = {name: getattr(weight, name) for name in weight.tensor_attribute_names if name != "shape"}
    parts = {name: getattr(weight, name) for name in part_names(weight)}
    return repr((type(weight), attributes, {name: (part.dtype, part.shape[1:]) for name, part in parts.items()}))
