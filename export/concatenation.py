"""Concatenates weights of one kind along their outputs, the first dimension of every part of a quantized weight."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torchao.utils import TorchAOBaseTensor

ON_DISK = 64 << 20
"""Bytes from which a concatenated tensor is kept in a file, as the mapped parts of a large checkpoint are."""


def concatenated(weights: Sequence[Tensor], folder: Path) -> Tensor:
    """Concatenate weights [N_i, K] of the same ``form`` into one [sum of N_i, K].

    A large result is kept in a file in ``folder``, which has no name and is deleted with the tensor. A class whose
    parts are not simply rows has a method ``concatenate``, which gets the weights and a function that concatenates
    tensors.
    """

    def rows(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors), out=_room(tensors, folder))

    first = weights[0]
    if not isinstance(first, TorchAOBaseTensor):
        return rows(weights)
    if hasattr(first, "concatenate"):
        return first.concatenate(weights, rows)
    parts = {name: rows([getattr(weight, name) for weight in weights]) for name in _parts(first)}
    attributes = {name: getattr(first, name) for name in first.tensor_attribute_names}
    if "shape" in attributes:
        attributes["shape"] = torch.Size((sum(weight.shape[0] for weight in weights), first.shape[1]))
    return type(first)(**parts, **attributes)


def form(weight: Tensor) -> str:
    """Return a description of a weight without its number of rows. Weights can be concatenated if it is the same."""
    if not isinstance(weight, TorchAOBaseTensor):
        return repr((type(weight), weight.dtype, weight.shape[1:]))
    attributes = {name: getattr(weight, name) for name in weight.tensor_attribute_names if name != "shape"}
    parts = {name: getattr(weight, name) for name in _parts(weight)}
    return repr((type(weight), attributes, {name: (part.dtype, part.shape[1:]) for name, part in parts.items()}))


def _room(tensors: Sequence[Tensor], folder: Path) -> Tensor | None:
    """Return an empty tensor in a file for a large result, None for a small one."""
    first, count = tensors[0], sum(tensor.numel() for tensor in tensors)
    if count * first.element_size() < ON_DISK:
        return None
    shape = (sum(len(tensor) for tensor in tensors), *first.shape[1:])
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        return torch.from_file(file.name, shared=True, size=count, dtype=first.dtype).view(shape)


def _parts(weight: TorchAOBaseTensor) -> list[str]:
    optional = getattr(weight, "optional_tensor_data_names", [])
    return [*weight.tensor_data_names, *(name for name in optional if getattr(weight, name) is not None)]
