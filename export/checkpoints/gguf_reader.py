"""Reads the headers of a GGUF file with gguf-py, but skips the vocabulary: gguf-py makes an object of every token,
which takes half a minute and 1.8 GB for Gemma's.
"""

import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, ReaderField

_UNREADABLE = (ValueError, IndexError, KeyError, OverflowError, MemoryError, struct.error)


class HeaderReader(GGUFReader):
    """A reader of GGUF headers that reads an array of numbers as one part, and only the length of an array of
    strings."""

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[np.ndarray], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        mapped: Any = self.data  # from Python 3.12 on, numpy's types do not say that an array is a buffer
        kind, count = struct.unpack_from("<IQ", mapped, orig_offs)
        start = at = orig_offs + 12
        if kind == GGUFValueType.STRING:
            data = memoryview(mapped)
            for _ in range(count):
                at += 8 + struct.unpack_from("<Q", data, at)[0]
            return at - orig_offs, [np.array([count])], [], [GGUFValueType.ARRAY, GGUFValueType.STRING]
        if kind == GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        values = self._get(start, self.gguf_scalar_to_np[GGUFValueType(kind)], count)
        if len(values) != count:
            raise ValueError(f"{len(values)} of {count} values")
        return 12 + int(values.nbytes), [values], [0], [GGUFValueType.ARRAY, GGUFValueType(kind)]


def text_count(field: ReaderField) -> int | None:
    """Return the length of an array of strings that ``HeaderReader`` read; None for a field of another type."""
    return int(field.parts[-1][0]) if field.types == [GGUFValueType.ARRAY, GGUFValueType.STRING] else None


def open_gguf(file: Path) -> GGUFReader:
    """Open a GGUF file, memory-mapped. Raises ValueError for a file that is not GGUF, is truncated, or has the other
    byte order."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        head = opened.read(8)
    if head[:4] != b"GGUF":
        raise ValueError(f"{file} ({size} bytes) does not begin with GGUF, so it is no GGUF file: download it again")
    if head[4:6] == b"\0\0":  # the low bytes of the version, a small number
        raise ValueError(f"{file} is of the other byte order (big-endian): name the file for this kind of machine")
    try:
        return HeaderReader(file, "c")  # copy on write, since PyTorch has no read-only tensors
    except _UNREADABLE as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{file} ({size} bytes) is truncated, damaged, or newer than the gguf package ({reason}): copy or download "
            "it again"
        ) from error
