"""Opens safetensors files, and the header files that stand in for files that a dry run does not download.

A header file is a small safetensors file. Its metadata holds the other file's header as JSON, and its tensors are the
few values that were fetched. Asking for any other value raises ``HeaderAlone``, or gives random values if the file says
so (``--random-weights``).

Makes random values for a tensor of which only the header is known. The values depend on the tensor's name alone, so
that they are the same each time.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

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


DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
}
BLOCK = 1_048_573
"""The number of values that are drawn once and then repeated. It is a prime number, so that no two rows of a matrix are
equal."""
SPREAD = 0.02
"""The standard deviation of weights, as in the initialization of most models."""
SCALE, EXPONENT = 0.005, 120
"""The scale of quantized weights, and the biased exponent of a scale that is stored as an exponent alone (2 ** -7)."""


def random_tensor(name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
    """Return values like an untrained model's: weights with the standard deviation ``SPREAD``, norms around 1, uniform
    codes.

    Raises ValueError for a dtype that is not in ``DTYPES``.
    """
    if dtype not in DTYPES:
        raise ValueError(f"{name} is {dtype}, for which there are no random values: leave --random-weights out")
    kind, part = DTYPES[dtype], name.rpartition(".")[2]
    if "zero" in part:
        return torch.zeros(shape, dtype=kind)
    if "scale" in part and len(shape) > 1:
        if dtype in ("U8", "F8_E8M0"):
            return torch.full(shape, EXPONENT, dtype=torch.uint8).view(kind)
        return torch.full(shape, SCALE).to(kind)
    if not kind.is_floating_point:
        return _repeated(name, _codes(), shape, kind)
    values = _repeated(name, _normal(), shape, torch.float32 if kind.itemsize == 1 else kind)
    return (values + 1 if len(shape) < 2 and part != "bias" else values).to(kind)


def _repeated(name: str, block: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor filled with repetitions of ``block``, which starts at an offset that depends on the name."""
    count = math.prod(shape)
    begun = block.roll(crc32(name.encode()) % BLOCK).to(dtype)
    return begun.repeat(-(-count // BLOCK))[:count].view(shape)


@cache
def _normal() -> Tensor:
    return torch.randn(BLOCK, generator=torch.Generator().manual_seed(0)) * SPREAD


@cache
def _codes() -> Tensor:
    return torch.randint(-(2**31), 2**31, (BLOCK,), generator=torch.Generator().manual_seed(0))
