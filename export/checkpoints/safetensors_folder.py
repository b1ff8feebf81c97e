"""What a folder of safetensors says of itself in its headers: names, shapes, dtypes. No weight is read."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}  # the others take one byte


@dataclass(frozen=True)
class TensorHeader:
    """``dtype`` is safetensors' name; of a weight that torchao quantized, its tensor class."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    quantized: bool = False

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


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
    """Tensor name to header; the parts of a weight that torchao quantized count as that weight.

    Raises ValueError for a file that is cut short or no safetensors file.
    """
    headers: dict[str, TensorHeader] = {}
    described: dict[str, dict] = {}
    for path in shard_paths(folder):
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                for name in json.loads(metadata.get("tensor_names", "[]")):
                    described[name] = json.loads(metadata[name])
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    piece = file.get_slice(name)
                    shape, dtype = tuple(piece.get_shape()), piece.get_dtype()
                    headers[name] = TensorHeader(shape, dtype, math.prod(shape) * _BYTES.get(dtype, 1))
        except SafetensorError as error:
            size = path.stat().st_size
            raise ValueError(
                f"{path} ({size} bytes) is truncated or no safetensors file ({error}): copy or download it again"
            ) from error
    for name, description in described.items():
        if "_tensor_data_names" in description:
            headers[name] = _quantized(name, description, headers)
    return headers


def _quantized(name: str, description: dict, headers: dict[str, TensorHeader]) -> TensorHeader:
    """Take the parts of a quantized weight out of ``headers`` and return the weight's own."""
    module, _, attribute = name.rpartition(".")
    keys = [f"{module}._{attribute}_{part}" for part in description["_tensor_data_names"]]
    missing = [key for key in keys if key not in headers]
    if missing:
        raise ValueError(f"{name} is quantized, but its part {missing[0]} is not there: is a shard missing?")
    parts = [headers.pop(key) for key in keys]
    shape = description["_data"].get("shape") or parts[0].shape
    return TensorHeader(tuple(shape), description["_type"], sum(part.bytes for part in parts), quantized=True)
