"""Reads the two tables that say where a CUDA artifact's weights are. Reads none of the weights.

Each method has a weight table in its delegate: names, dtypes and shapes of tensors over named storages, as ExecuTorch's
``backends/cuda/cuda_weight_collector.py`` writes them. The ``.ptd`` beside the program has an index of the storages by
key.
"""

import math
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from eagle3.runner.artifact.light_imports import without_compiler
from eagle3.runner.artifact.pte import DTYPES
from eagle3.runner.system.command import calm_stderr

WEIGHTS_FILE = "aoti_cuda_blob.ptd"
TABLE_FAMILY = b"ETCUDAFQN"
TABLE_MAGIC = TABLE_FAMILY + b"3"
VARIANTS_MAGIC = TABLE_FAMILY + b"0"
"""Begins a table with a library for each compute capability, which ExecuTorch's CUDA runtime reads after 1.5
(``export/lowering/cuda/weight_table.py``)."""
FALLBACK = 1
"""The flag of a library that other GPUs take, for its PTX."""
PTD_MAGIC = b"FT01"
DEVICES = {0: "cpu", 1: "cuda"}  # keyed by AOTInductor's device type


@dataclass(frozen=True)
class CudaWeight:
    """A weight or a cache: a tensor over a storage. ``offset`` and ``stride`` count elements."""

    name: str
    storage_key: str
    storage_bytes: int
    dtype: torch.dtype
    device: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class WeightTable:
    """The weight table of a delegate: the key of its library (``.so``) in the ``.pte``, and its weights."""

    library_key: str
    weights: tuple[CudaWeight, ...]

    def storages(self) -> dict[str, CudaWeight]:
        """Map each storage key to one weight that lies in the storage."""
        return {weight.storage_key: weight for weight in self.weights}


@dataclass(frozen=True)
class Extent:
    """A place in a file, in bytes from its start."""

    offset: int
    size: int


def decode_weight_table(processed: bytes) -> WeightTable:
    """Decode a weight table. Raises ValueError for another version, a damaged table, one with several libraries, or a
    weight that exceeds its storage."""
    found = processed[: len(TABLE_MAGIC)]
    if found not in (TABLE_MAGIC, VARIANTS_MAGIC):
        fault = "another version" if found.startswith(TABLE_FAMILY) else "no such table"
        raise ValueError(f"weight table begins with {found!r}, not {TABLE_MAGIC!r} ({fault}): export it again")
    reader = _Reader(processed, len(TABLE_MAGIC))
    try:
        library_key = reader.string() if found == TABLE_MAGIC else _one_library(reader)
        weights = tuple(_weight(reader) for _ in range(*reader.unpack("I")))
    except (struct.error, UnicodeDecodeError) as error:
        at = f"at byte {reader.at} of {len(processed)}"
        raise ValueError(f"weight table is damaged {at} ({error}): export it again") from error
    if reader.at != len(processed):
        raise ValueError(f"weight table ends at byte {reader.at} of {len(processed)}: export it again")
    return WeightTable(library_key, weights)


def _one_library(reader: "_Reader") -> str:
    """Return the key of the library that all entries of a table by compute capability name."""
    keys = set()
    for _ in range(*reader.unpack("I")):
        reader.unpack("III")
        keys.add(reader.string())
    if len(keys) != 1:
        raise ValueError(f"weight table has {len(keys)} libraries, one serves all GPUs here: export it again")
    return keys.pop()


class _Reader:
    """Reads little-endian values one after the other."""

    def __init__(self, data: bytes, at: int):
        self.data, self.at = data, at

    def unpack(self, values: str) -> tuple[Any, ...]:
        layout = struct.Struct(f"<{values}")
        found = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return found

    def string(self) -> str:
        (length,) = self.unpack("I")
        return self.unpack(f"{length}s")[0].decode()


def _weight(reader: _Reader) -> CudaWeight:
    name, storage_key = reader.string(), reader.string()
    storage_bytes, dtype, device, offset, dimensions = reader.unpack("QiiqI")
    shape, stride = reader.unpack(f"{dimensions}q"), reader.unpack(f"{dimensions}q")
    try:
        weight = CudaWeight(name, storage_key, storage_bytes, _dtype(dtype), DEVICES[device], offset, shape, stride)
    except (ValueError, LookupError) as error:
        raise ValueError(
            f"weight {name!r}: dtype {dtype}, device type {device} are unknown: export it again"
        ) from error
    last = offset + sum(step * (size - 1) for step, size in zip(stride, shape, strict=True))
    needed = (last + 1) * weight.dtype.itemsize if math.prod(shape) else 0
    if min((offset, *shape, *stride)) < 0 or needed > storage_bytes:
        view = f"offset {offset}, shape {list(shape)}, stride {list(stride)} of {weight.dtype}"
        raise ValueError(f"weight {name!r}: {view} leaves its {storage_bytes} bytes: export it again")
    return weight


@cache
def _dtype(number: int) -> torch.dtype:
    """Return the torch dtype of a number of ExecuTorch's ``ScalarType``."""
    with calm_stderr(), without_compiler():
        from executorch.exir.scalar_type import ScalarType
    return getattr(torch, DTYPES[ScalarType(number).name][0])


def read_ptd_index(path: Path) -> dict[str, Extent]:
    """Map each storage key to its place in the file. Reads the file's head alone.

    Raises FileNotFoundError, and ValueError for a file that is no ``.ptd``, is damaged, or ends early.
    """
    with calm_stderr():
        from executorch.extension.flat_tensor.serialize import serialize as flat_tensor

    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8 + flat_tensor.FlatTensorHeader.EXPECTED_LENGTH)
        header = flat_tensor._get_extended_header(prefix)
        if header is None or prefix[4:8] != PTD_MAGIC:
            raise ValueError(f"{path} is no .ptd (no {PTD_MAGIC.decode()} header): damaged or another file")
        end = header.flatbuffer_offset + header.flatbuffer_size
        if end > size:
            raise ValueError(f"{path} ends early ({size:,} bytes; its index needs {end:,}): copy or export it again")
        file.seek(0)
        try:
            index = flat_tensor._deserialize_to_flat_tensor(file.read(end))
            places = [(header.segment_base_offset + segment.offset, segment.size) for segment in index.segments]
            found = {entry.key: Extent(*places[entry.segment_index]) for entry in index.named_data}
        except Exception as error:  # a damaged flatbuffer fails wherever its offsets lead
            raise ValueError(f"{path} is damaged (its index does not parse: {error}): export it again") from error
    if index.version > flat_tensor._FLAT_TENSOR_VERSION:
        newest = flat_tensor._FLAT_TENSOR_VERSION
        raise ValueError(f"{path} is a .ptd of version {index.version}; this ExecuTorch reads {newest}")
    end = max((extent.offset + extent.size for extent in found.values()), default=0)
    if end > size:
        raise ValueError(f"{path} ends early ({size:,} bytes; its weights need {end:,}): copy or export it again")
    return found


def check_stored(tables: list[WeightTable], index: dict[str, Extent]) -> None:
    """Raise ValueError if the ``.ptd`` lacks a storage of the tables, or has it with another size."""
    for table in tables:
        for key, weight in table.storages().items():
            size = index[key].size if key in index else None
            if size != weight.storage_bytes:
                has = "lacks it" if size is None else f"has {size:,} bytes"
                raise ValueError(
                    f"weight {weight.name!r} takes {weight.storage_bytes:,} bytes, {WEIGHTS_FILE} {has}: "
                    "the two files are of different exports"
                )
