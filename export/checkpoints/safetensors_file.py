"""Opens safetensors files, and the header files that stand in for files that a dry run does not download.

A header file is a small safetensors file. Its metadata holds the other file's header as JSON, and its tensors are the
few values that were fetched. Asking for any other value raises ``HeaderAlone``, or gives random values if the file says
so (``--random-weights``).
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from eagle3.export.checkpoints.random_values import random_tensor

HEADER = "eagle3.header"
"""The key of the metadata under which a header file holds the other file's header: ``tensors`` maps each name to shape
and dtype, ``metadata`` is the other file's metadata, and ``random`` is true if values that are not in the file are
random."""


class HeaderAlone(ValueError):
    """Raised for a value that a header file does not hold."""


class Slice(Protocol):
    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...


class OpenFile(Protocol):
    """The part of the interface of safetensors' ``safe_open`` that is used here."""

    def keys(self) -> Iterable[str]: ...

    def metadata(self) -> dict[str, str] | None: ...

    def get_slice(self, name: str) -> Slice: ...

    def get_tensor(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class HeaderSlice:
    shape: list[int]
    dtype: str

    def get_shape(self) -> list[int]:
        return self.shape

    def get_dtype(self) -> str:
        return self.dtype


class HeaderFile:
    """Gives access to a header file as if it were the file that it describes. ``values`` is the open header file
    itself, ``header`` the other file's header."""

    def __init__(self, path: Path, values: OpenFile, header: dict[str, Any]):
        self.path, self._values, self._header = path, values, header

    def keys(self) -> list[str]:
        return list(self._header["tensors"])

    def metadata(self) -> dict[str, str]:
        return self._header["metadata"]

    def get_slice(self, name: str) -> HeaderSlice:
        return HeaderSlice(*self._header["tensors"][name])

    def get_tensor(self, name: str) -> Tensor:
        if name in self._values.keys():  # noqa: SIM118 (not a dict)
            return self._values.get_tensor(name)
        if self._header["random"]:
            return random_tensor(name, *self._header["tensors"][name])
        raise HeaderAlone(
            f"a dry run of this kind of checkpoint needs the values of {name}, and of {self.path.name} only the "
            "header was fetched: type --download as well, or leave --dry-run out"
        )


@contextmanager
def open_safetensors(path: Path) -> Iterator[OpenFile]:
    """Open a safetensors file or a header file. Raises SafetensorError for a file that is not safetensors."""
    with _opened(path) as file:
        header = (file.metadata() or {}).get(HEADER)
        yield file if header is None else HeaderFile(path, file, json.loads(header))


def _opened(path: Path) -> safe_open:
    """Map a file into memory, or read from it if it is larger than memory. safetensors maps files with writable pages,
    and Linux refuses such a map if it is larger than the memory. transformers saves files of up to 50 GB."""
    try:
        return safe_open(path, framework="pt")
    except RuntimeError as error:
        if "unable to mmap" not in str(error):
            raise
        return safe_open(path, framework="pt", backend="pread")


def needs_values(error: BaseException | None) -> bool:
    """Return True if ``error`` is ``HeaderAlone`` or was caused by it."""
    return error is not None and (isinstance(error, HeaderAlone) or needs_values(error.__cause__))


def save_header(
    path: Path,
    tensors: Mapping[str, tuple[list[int], str]],
    metadata: Mapping[str, str],
    values: Mapping[str, Tensor],
    random: bool = False,
) -> None:
    """Write a header file. ``tensors`` maps each name to its shape and safetensors' dtype."""
    header = {"tensors": dict(tensors), "metadata": dict(metadata), "random": random}
    save_file(dict(values), path, metadata={HEADER: json.dumps(header)})
