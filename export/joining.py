"""Weights of one kind as one, along their outputs: the first dimension of every part of a quantized weight."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torchao.utils import TorchAOBaseTensor

ON_DISK = 64 << 20
"""Bytes from which on a joined tensor lies in a file: the parts of a large checkpoint are mapped files themselves."""


def joined(weights: Sequence[Tensor], folder: Path) -> Tensor:
    """Weights [N_i, K] of one ``form`` to one [sum of N_i, K] with the same values.

    ``folder`` is where there is room for what is large; the file there has no name and goes with the tensor. A class
    whose parts are not simply rows has a ``join`` of its own, which is given its weights and how to join tensors.
    """

    def rows(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors), out=_room(tensors, folder))

    first = weights[0]
    if not isinstance(first, TorchAOBaseTensor):
        return rows(weights)
    if hasattr(first, "join"):
        return first.join(weights, rows)
    parts = {name: rows([getattr(weight, name) for weight in weights]) for name in _parts(first)}
    attributes = {name: getattr(first, name) for name in first.tensor_attribute_names}
    if "shape" in attributes:
        attributes["shape"] = torch.Size((sum(weight.shape[0] for weight in weights), first.shape[1]))
    return type(first)(**parts, **attributes)


def form(weight: Tensor) -> str:
    """What must be the same to be joined: all but the number of rows."""
    if not isinstance(weight, TorchAOBaseTensor):
        return repr((type(weight), weight.dtype, weight.shape[1:]))
    attributes = {name: getattr(weight, name) for name in weight.tensor_attribute_names if name != "shape"}
    parts = {name: getattr(weight, name) for name in _parts(weight)}
    return repr((type(weight), attributes, {name: (part.dtype, part.shape[1:]) for name, part in parts.items()}))


def _room(tensors: Sequence[Tensor], folder: Path) -> Tensor | None:
    """An empty tensor for what is large."""
    first, count = tensors[0], sum(tensor.numel() for tensor in tensors)
    if count * first.element_size() < ON_DISK:
        return None
    shape = (sum(len(tensor) for tensor in tensors), *first.shape[1:])
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        return torch.from_file(file.name, shared=True, size=count, dtype=first.dtype).view(shape)


def _parts(weight: TorchAOBaseTensor) -> list[str]:
    optional = getattr(weight, "optional_tensor_data_names", [])
    return [*weight.tensor_data_names, *(name for name in optional if getattr(weight, name) is not None)]
