"""Keeps large tensors in unnamed files. The operating system writes their memory out and reads it again as needed, like
that of a mapped checkpoint, so the weights that an export makes need not fit into memory."""

import ctypes
import math
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from torchao.utils import TorchAOBaseTensor

from eagle3.targets.spec import Convert

LARGE = 1 << 20
"""Tensors of at least this many bytes are kept in files."""


def empty(shape: Sequence[int], dtype: torch.dtype, folder: Path) -> Tensor:
    """Return a tensor in a file on the disk of ``folder``, which is deleted with the tensor; a small tensor is in
    memory.

    Raises OSError on a full disk.
    """
    count = math.prod(shape)
    size = count * dtype.itemsize
    if size < LARGE:
        return torch.empty(*shape, dtype=dtype)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):  # without allocated blocks, a write to a full disk would end the process
            os.posix_fallocate(file.fileno(), 0, size)
        return torch.from_file(file.name, shared=True, size=count, dtype=dtype).view(shape)


def contiguous_beside(values: Tensor) -> Tensor:
    """Return a contiguous copy of ``values``, in a file on the same disk if ``values`` is a part of a tensor in a
    file."""
    file = values.untyped_storage().filename
    if file is None:
        return values.clone(memory_format=torch.contiguous_format)
    return empty(values.shape, values.dtype, Path(file).parent).copy_(values)


def part_names(weight: TorchAOBaseTensor) -> list[str]:
    """Return the names of the tensors that a quantized weight consists of."""
    return weight.__tensor_flatten__()[0]


def parts(value: Tensor) -> list[Tensor]:
    """Return the plain tensors that a tensor consists of: itself, or the parts of a quantized weight."""
    return [getattr(value, name) for name in part_names(value)] if isinstance(value, TorchAOBaseTensor) else [value]


def in_files(convert: Convert, dtype: torch.dtype, folder: Path) -> Convert:
    """Return a conversion that calls ``convert`` and moves its results into files, and that converts plain
    floating-point tensors to ``dtype``. Results that share memory with the input are not moved, since a checkpoint's
    tensors are mapped. A result that is returned twice, such as a tied head, is put into one file."""
    moved = WeakTensorKeyDictionary()

    def converted(name: str, value: Tensor) -> Tensor:
        made = convert(name, value)
        given = {_memory(part) for part in parts(value)}
        if isinstance(made, TorchAOBaseTensor):
            for name_of_part, part in zip(part_names(made), parts(made), strict=True):
                setattr(made, name_of_part, _moved(part, part.dtype, given, folder))
            return made
        if made not in moved:
            moved[made] = _moved(made, dtype if made.is_floating_point() else made.dtype, given, folder)
        return moved[made]

    return converted


def return_freed_memory() -> None:
    """Return freed memory to the operating system: glibc keeps the memory of tensors below 32 MB, which is gigabytes
    after a model was quantized. With another C library this does nothing."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _memory(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _moved(value: Tensor, dtype: torch.dtype, given: set[int], folder: Path) -> Tensor:
    in_file = _memory(value) in given or value.untyped_storage().filename is not None
    if value.dtype == dtype and (in_file or not value.is_contiguous()):
        return value
    return empty(value.shape, dtype, folder).copy_(value)
