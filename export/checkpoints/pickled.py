"""Reads weights that PyTorch pickled, ``pytorch_model.bin``, whole or sharded, with ``weights_only=True`` only."""

import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from eagle3.export.checkpoints.safetensors_folder import weight_map
from eagle3.export.checkpoints.source import Source, TensorHeader
from eagle3.targets.loading import is_plain

SINGLE_FILE, INDEX_FILE = "pytorch_model.bin", "pytorch_model.bin.index.json"
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class PickledFolder(Source):
    @staticmethod
    def recognizes(path: Path) -> bool:
        return (path / SINGLE_FILE).is_file() or (path / INDEX_FILE).is_file()

    def files(self) -> list[Path]:
        if (self.path / SINGLE_FILE).is_file():
            return [self.path / SINGLE_FILE]
        files = [self.path / name for name in sorted(set(weight_map(self.path / INDEX_FILE).values()))]
        for file in files:
            if not file.is_file():
                raise FileNotFoundError(f"{file} is missing: {INDEX_FILE} names it: copy or download it again")
        return files

    def headers(self) -> dict[str, TensorHeader]:
        headers: dict[str, TensorHeader] = {}
        for name, tensor in self._stored():
            if name in headers:
                raise ValueError(f"{self.path} has {name} twice, in two files of {INDEX_FILE}: remove the older one")
            headers[name] = _header(tensor)
        if not (self.path / SINGLE_FILE).is_file():
            for name, file in weight_map(self.path / INDEX_FILE).items():
                if name not in headers:
                    raise ValueError(
                        f"{INDEX_FILE} of {self.path} puts {name} into {file}, but no file has it: copy both again"
                    )
        return headers

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._stored():
            yield name, _plain(tensor)

    def _stored(self) -> Iterator[tuple[str, Tensor]]:
        for file in self.files():
            yield from _read(file).items()


def _header(tensor: Tensor) -> TensorHeader:
    shape = tuple(tensor.shape)
    if not is_plain(tensor):
        return TensorHeader(shape, type(tensor).__name__, _bytes(tensor), quantized=True)
    return TensorHeader(shape, _DTYPES.get(tensor.dtype, str(tensor.dtype)), tensor.nbytes)


def _bytes(tensor: Tensor) -> int:
    if is_plain(tensor):
        return tensor.nbytes
    parts: Sequence[str] = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]  # torchao's have it
    return sum(_bytes(getattr(tensor, name)) for name in parts)


def _plain(tensor: Tensor) -> Tensor:
    """Return the tensor as a safetensors file would give it: not a Parameter, without gradients, contiguous, and alone
    in its storage.

    ExecuTorch's loader casts tensors of the exact class Tensor only, and its writer writes the whole storage of a
    constant.
    """
    tensor = tensor.detach()
    if not is_plain(tensor):
        return tensor
    tensor = tensor.resolve_neg().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _read(file: Path) -> dict[str, Tensor]:
    """Return the state dictionary in a file, memory-mapped where its format allows. No code in the file is run."""
    import executorch.extension.llm.export  # noqa: F401  (registers the classes of quantized tensors as data)
    from torchao.utils import TorchAOBaseTensor

    try:
        state = _load(file)
    except pickle.UnpicklingError as error:
        with file.open("rb") as opened:
            begins = opened.read(2)
        # The file has neither of torch.save's two formats: it may be a web page or a Git LFS pointer.
        if begins != b"PK" and begins[:1] != b"\x80":
            raise ValueError(
                f"{file} ({file.stat().st_size} bytes) is no PyTorch file: copy or download it again; in a clone, type "
                "git lfs pull"
            ) from error
        raise ValueError(
            f"{file} is a pickle of more than tensors, which may run code when it is loaded ({_first_line(error)}): "
            "save its state dictionary as safetensors"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise ValueError(
            f"{file} ({file.stat().st_size} bytes) is truncated or no PyTorch file ({_first_line(error)}): copy or "
            "download it again"
        ) from error
    state = state.get("state_dict", state) if isinstance(state, dict) else state
    if not isinstance(state, dict) or not all(_is_dense(name, value) for name, value in state.items()):
        raise ValueError(
            f"{file} holds no state dictionary (a dict of names to dense tensors): save the model's state_dict()"
        )
    for name, value in state.items():
        if not is_plain(value) and not isinstance(value, TorchAOBaseTensor):
            raise ValueError(
                f"{file}: {name} is a {type(value).__name__}, no plain tensor: save the model's state_dict() with its "
                "tensors converted (torch.Tensor)"
            )
    return state


def _is_dense(name: object, value: object) -> bool:
    dense = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta
    return isinstance(name, str) and dense


def _load(file: Path) -> object:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap can only be used" not in str(error):
            raise
        return torch.load(file, map_location="cpu", weights_only=True)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "Unsupported" in line or "GLOBAL" in line]
    return (telling or lines or [type(error).__name__])[0]
