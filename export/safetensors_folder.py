"""What a folder of safetensors says of itself in its headers: names, shapes, dtypes. No weight is read."""

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}  # the others take one byte


@dataclass(frozen=True)
class TensorHeader:
    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def bytes(self) -> int:
        return self.elements * _BYTES.get(self.dtype, 1)


def shard_paths(folder: Path) -> list[Path]:
    """The files of a checkpoint folder, one or sharded. Raises FileNotFoundError naming what is not there."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        paths = [folder / name for name in names]
    else:
        paths = [folder / "model.safetensors"]
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: {folder} is no complete safetensors checkpoint")
    return paths


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Tensor name to header. Raises ValueError for a file that is cut short or no safetensors file."""
    headers = {}
    for path in shard_paths(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    piece = file.get_slice(name)
                    headers[name] = TensorHeader(tuple(piece.get_shape()), piece.get_dtype())
        except SafetensorError as error:
            size = path.stat().st_size
            raise ValueError(
                f"{path} ({size} bytes) is truncated or no safetensors file ({error}): copy or download it again"
            ) from error
    return headers
