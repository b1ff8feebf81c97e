"""Reads a checkpoint folder of safetensors files: the tensors, and their names, shapes and dtypes from the headers."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from eagle3.export.checkpoints.json_fields import read_object
from eagle3.export.checkpoints.safetensors_file import OpenFile, open_safetensors
from eagle3.export.checkpoints.source import Source, TensorHeader

SINGLE_FILE, INDEX_FILE, ADAPTER_CONFIG = "model.safetensors", "model.safetensors.index.json", "adapter_config.json"
MERGE_ADAPTER = "merge it into its base first (peft's merge_and_unload, then save_pretrained) and name that folder"
NO_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scheduler.bin")
"""Files without weights that a trainer leaves beside the weights."""
_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}  # every other dtype takes one byte


class SafetensorsFolder(Source):
    """A checkpoint in one file or in shards, quantized by torchao or not."""

    @staticmethod
    def recognizes(path: Path) -> bool:
        return (path / SINGLE_FILE).is_file() or (path / INDEX_FILE).is_file()

    def files(self) -> list[Path]:
        return shard_paths(self.path)

    def headers(self) -> dict[str, TensorHeader]:
        return read_headers(self.path)

    @cached_property
    def _raw(self) -> dict[str, TensorHeader]:
        """The headers as they are stored, for the formats that join several tensors into one."""
        return read_headers(self.path)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return self.some(lambda _name: True)

    def some(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        return _tensors(self.files(), wanted)

    @contextmanager
    def _opened(self) -> Iterator[Callable[[str], Tensor]]:
        """Open all files at once, memory-mapped, since the parts of a weight may lie in several. The value reads a
        tensor by its name."""
        with ExitStack() as stack:
            files = [stack.enter_context(open_safetensors(path)) for path in self.files()]
            holder = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (not a dict)
            yield lambda name: holder[name].get_tensor(name)


def shard_paths(folder: Path) -> list[Path]:
    """Return the files of a checkpoint folder: the single file, or else the shards in its index, as transformers
    chooses.

    Raises FileNotFoundError naming a missing file, and ValueError for an invalid index.
    """
    whole = (folder / SINGLE_FILE).is_file() or not (folder / INDEX_FILE).is_file()
    shards = [SINGLE_FILE] if whole else sorted(set(weight_map(folder / INDEX_FILE).values()))
    for path in (folder / shard for shard in shards):
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: {_cause_of_a_missing_file(folder)}")
    return [folder / shard for shard in shards]


def unread_index(folder: Path) -> Iterator[str]:
    """Yield a warning if a single file stands beside an index, which may name other weights."""
    if (folder / SINGLE_FILE).is_file() and (folder / INDEX_FILE).is_file():
        yield f"{folder}: {SINGLE_FILE} is read and {INDEX_FILE} beside it is not, as transformers does"


def weight_map(index: Path) -> dict[str, str]:
    """Return an index's map of tensor names to file names. Raises ValueError for a file outside the index's folder."""
    names = read_object(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{index} has no weight_map of tensors to files, so it is no index: copy it again")
    for tensor, name in names.items():
        if Path(name).is_absolute() or ".." in Path(name).parts or not Path(name).name:
            raise ValueError(f"{index} puts {tensor} into {name!r}, which is no file of this folder: copy it again")
    return names


def foreign_weights(folder: Path) -> str | None:
    """Return a line that names weights of an unsupported kind and what to do; None if there are none."""
    if (folder / ADAPTER_CONFIG).is_file() or any(folder.glob("adapter_model.*")):
        return f"{folder} holds a LoRA adapter alone: {MERGE_ADAPTER}"
    for pattern, kind in (("*.gguf", "GGUF"), ("*.bin", "pickled"), ("*.pt", "pickled"), ("*.pth", "pickled")):
        found = sorted(path.name for path in folder.glob(pattern) if path.name not in NO_WEIGHTS)
        if found and kind == "GGUF":
            return f"{folder} has GGUF weights: type --checkpoint {folder / found[0]}"
        if found:
            return f"{folder} has {kind} weights ({found[0]}), which are not read: name a folder of safetensors"
    return None


def _cause_of_a_missing_file(folder: Path) -> str:
    if (folder / INDEX_FILE).is_file():
        return f"{INDEX_FILE} names it, so the checkpoint is not complete: copy or download it again"
    found = sorted(path.name for path in folder.glob("*.safetensors") if not path.name.startswith("adapter_model"))
    if found:
        return f"{folder} has {found[0]}, but no {INDEX_FILE} beside it: copy or download that as well"
    return foreign_weights(folder) or f"{folder} is no complete safetensors checkpoint"


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Return the headers by tensor name. The parts of a weight that torchao quantized count as one weight.

    Raises ValueError for a file that is truncated or not safetensors, and for a tensor that only the index has.
    """
    headers: dict[str, TensorHeader] = {}
    described: dict[str, tuple[Path, dict]] = {}
    for path in shard_paths(folder):
        try:
            with open_safetensors(path) as file:
                for name, description in _descriptions(path, file.metadata() or {}).items():
                    described[name] = path, description
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    piece = file.get_slice(name)
                    shape, dtype = tuple(piece.get_shape()), piece.get_dtype()
                    headers[name] = TensorHeader(shape, dtype, math.prod(shape) * _BYTES.get(dtype, 1))
        except SafetensorError as error:
            size = path.stat().st_size
            raise ValueError(
                f"{path} ({size} bytes) is truncated or no safetensors file ({error}): copy or download it again"
            ) from error
    if (folder / INDEX_FILE).is_file() and not (folder / SINGLE_FILE).is_file():
        for name, shard in weight_map(folder / INDEX_FILE).items():
            if name not in headers and name not in described:
                raise ValueError(
                    f"{folder / INDEX_FILE} puts {name} into {shard}, but no file has it: index and files are of "
                    "different checkpoints, copy or download them again"
                )
    for name, (path, description) in described.items():
        headers[name] = _quantized(path, name, description, headers)
    return headers


def _descriptions(path: Path, metadata: dict[str, str]) -> dict[str, dict]:
    """Return torchao's description of each weight that it quantized, by name. Raises ValueError for an invalid
    description."""
    found = {}
    try:
        for name in json.loads(metadata.get("tensor_names", "[]")):
            description = json.loads(metadata[name])
            if "_tensor_data_names" in description:
                parts, data, kind = (description[key] for key in ("_tensor_data_names", "_data", "_type"))
                shape = data.get("shape")
                if not (isinstance(kind, str) and parts and all(isinstance(part, str) for part in parts)):
                    raise TypeError(f"{name} has parts {parts} of type {kind}")
                if shape is not None and not all(type(size) is int for size in shape):
                    raise TypeError(f"{name} has the shape {shape}")
                found[name] = description
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path}: its metadata describes no weights that torchao quantized ({error}): copy the file again, or "
            "quantize with ExecuTorch's quantize_and_save"
        ) from error
    return found


def _tensors(paths: list[Path], wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    """Yield the ``wanted`` tensors of files and of header files as they are stored, with one weight in memory at a
    time. The parts of a weight that torchao quantized may lie in several files. ExecuTorch's reader is not used: it
    fails on files larger than memory, since it always maps them, and it cannot read header files."""
    holders: dict[str, OpenFile] = {}
    described: dict[str, tuple[list[str], str]] = {}
    with ExitStack() as stack:
        for path in paths:
            file = stack.enter_context(open_safetensors(path))
            holders |= dict.fromkeys(file.keys(), file)
            metadata = file.metadata() or {}
            for name, description in _descriptions(path, metadata).items():
                described[name] = _part_names(name, description), metadata[name]
        for name, (parts, form) in described.items():
            files = {part: holders.pop(part) for part in parts}
            if not wanted(name):
                continue
            tensors = {part: file.get_tensor(part) for part, file in files.items()}
            from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

            single = {name: form, "tensor_names": json.dumps([name])}
            yield from unflatten_tensor_state_dict(tensors, single)[0].items()
        for name, file in holders.items():
            if wanted(name):
                yield name, file.get_tensor(name)


def _part_names(name: str, description: dict) -> list[str]:
    module, _, attribute = name.rpartition(".")
    return [f"{module}._{attribute}_{part}" for part in description["_tensor_data_names"]]


def _quantized(path: Path, name: str, description: dict, headers: dict[str, TensorHeader]) -> TensorHeader:
    """Take the parts of a quantized weight out of ``headers``, and return the header of the whole weight."""
    keys = _part_names(name, description)
    missing = [key for key in keys if key not in headers]
    if missing:
        raise ValueError(f"{path}: {name} is quantized, but its part {missing[0]} is not there: is a shard missing?")
    parts = [headers.pop(key) for key in keys]
    shape = description["_data"].get("shape") or parts[0].shape
    return TensorHeader(tuple(shape), description["_type"], sum(part.bytes for part in parts), quantized=True)
