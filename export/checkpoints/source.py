"""The interface of a checkpoint on disk: its files, its tensors' headers, and the tensors one by one."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor


@dataclass(frozen=True)
class TensorHeader:
    """The shape, dtype and size of a stored tensor. ``dtype`` is safetensors' name of the dtype, or the tensor class of
    a weight that torchao quantized."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    quantized: bool = False
    group: int | None = None
    """The number of columns that share a scale in a weight that another tool quantized."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class Source(ABC):
    """A checkpoint on disk. ``path`` is the folder or file that the user named. Tensors have the checkpoint's own
    names.

    Any fault of the files raises a FileNotFoundError or a ValueError of one line.
    """

    def __init__(self, path: Path):
        self.path = path

    @staticmethod
    @abstractmethod
    def recognizes(path: Path) -> bool:
        """Return True if ``path`` has files of this kind."""

    @abstractmethod
    def files(self) -> list[Path]:
        """Return the files that hold tensors."""

    @abstractmethod
    def headers(self) -> dict[str, TensorHeader]:
        """Return the header of every tensor. No weight is read."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor, memory-mapped or read on demand; a quantized weight becomes a tensor of torchao's."""

    def notes(self) -> list[str]:
        """Return lines for the person who exports the checkpoint on how its weights are read."""
        return []

    def some(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors whose names are ``wanted``. Formats that can read them alone read no others."""
        return ((name, tensor) for name, tensor in self.tensors() if wanted(name))

    def tensor(self, name: str) -> Tensor:
        for _, tensor in self.some(lambda each: each == name):
            return tensor
        raise ValueError(f"{self.path} lacks {name}: is a shard missing?")
