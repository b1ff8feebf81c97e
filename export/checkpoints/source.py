"""A checkpoint on disk: which files, which tensors, and the tensors one by one."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor


@dataclass(frozen=True)
class TensorHeader:
    """``dtype`` is safetensors' name; of a weight that torchao quantized, its tensor class."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    quantized: bool = False
    group: int | None = None
    """Columns that share a scale, of a weight that another tool quantized."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class Source(ABC):
    """``path`` is what the user named: a folder, or a file. Tensors go by the checkpoint's own names.

    Whatever is wrong with the files is a FileNotFoundError or a ValueError of one line.
    """

    def __init__(self, path: Path):
        self.path = path

    @staticmethod
    @abstractmethod
    def recognizes(path: Path) -> bool:
        """Return whether there are such files at ``path``."""

    @abstractmethod
    def files(self) -> list[Path]:
        """Return the files that hold tensors."""

    @abstractmethod
    def headers(self) -> dict[str, TensorHeader]:
        """Return the header of every tensor. No weight is read."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor, memory-mapped or read when it is asked for; a quantized weight as a tensor of
        torchao's."""

    def some(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors whose names are ``wanted``. Formats that can read them alone read no others."""
        return ((name, tensor) for name, tensor in self.tensors() if wanted(name))

    def tensor(self, name: str) -> Tensor:
        for each, tensor in self.tensors():
            if each == name:
                return tensor
        raise ValueError(f"{self.path} lacks {name}: is a shard missing?")
