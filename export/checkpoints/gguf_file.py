"""Reads GGUF, llama.cpp's format, from a single file or a split one. Weights are quantized in blocks and stay
memory-mapped.

K-quants (Q4_K, Q5_K, Q6_K) become ExecuTorch's ``ExportableGGUFTensor`` with their blocks unchanged, matrices in Q4_0
and Q8_0 torchao's tensors with the same codes. Blocks of every other type are dequantized to float32, which is exact.
Configuration and tokenizer come from the original model's Hugging Face folder; the file's metadata must agree with them
(``gguf_metadata``).

Reads the headers of a GGUF file with gguf-py, but skips the vocabulary: gguf-py makes an object of every token,
which takes half a minute and 1.8 GB for Gemma's.
"""

import re
import struct
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType, ReaderField
from torch import Tensor

from eagle3.export.checkpoints.gguf_joined import Entry, entries
from eagle3.export.checkpoints.gguf_names import ARCHITECTURES, UNREAD, Architecture
from eagle3.export.checkpoints.gguf_states import by_rows, input_order, own_shape, restored
from eagle3.export.checkpoints.source import Source, TensorHeader
from eagle3.targets.input_order import INPUT_ORDER

if TYPE_CHECKING:
    from executorch.extension.llm.export.gguf import ExportableGGUFTensor
    from gguf import GGUFReader
    from gguf.gguf_reader import ReaderTensor

SUFFIX = ".gguf"
K_QUANTS = {"Q4_K": 4, "Q5_K": 5, "Q6_K": 6}
"""Maps each block type that a backend with kernels for it keeps quantized to its bits."""
GROUPS = dict.fromkeys(("Q4_0", "Q8_0", "Q4_K", "Q5_K"), 32)
"""The number of columns that share a scale in a matrix, by block type, if codes and scales have the usual form."""
BLOCKS = (*K_QUANTS, "Q2_K", "Q3_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "IQ4_XS")
"""All block types that can be read."""
_FLOATS = ("F32", "F16", "BF16")
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)


class GGUFFile(Source):
    """A GGUF file. Its tensors are renamed to the model's names; a tensor that the model does not have keeps its name
    in the file."""

    @staticmethod
    def recognizes(path: Path) -> bool:
        return path.suffix.lower() == SUFFIX and not path.is_dir()

    def files(self) -> list[Path]:
        """Return the file, or all parts of a split one. Raises FileNotFoundError if a part is missing, and ValueError
        if the path is not the first part."""
        split = _SPLIT.fullmatch(self.path.name)
        if split is None:
            return [self.path]
        parts = [self.path.with_name(name) for name in part_names(self.path.name)]
        if int(split[2]) != 1:
            raise ValueError(f"{self.path} is part {int(split[2])} of {len(parts)}: type --checkpoint {parts[0]}")
        for part in parts:
            if not part.is_file():
                raise FileNotFoundError(
                    f"{part} is missing: {self.path.name} is the first of {len(parts)}: copy it as well"
                )
        return parts

    def headers(self) -> dict[str, TensorHeader]:
        """Return the header of every tensor. Raises ValueError for a tensor of a block type that cannot be read."""
        headers = {}
        for name, entry in self._entries.items():
            headers[name] = self._header(name, entry)
            order = self._input_order(name)
            if order is not None:
                headers[order[0]] = TensorHeader(order[1].shape, INPUT_ORDER, order[1].nbytes)
        return headers

    def _header(self, name: str, entry: Entry) -> TensorHeader:
        """Parts of different types are dequantized when they are joined, except those of experts, which no backend
        keeps quantized."""
        for tensor in entry.tensors:
            if tensor.tensor_type.name not in (*_FLOATS, *BLOCKS):
                raise ValueError(
                    f"{self.path}: {tensor.name} is {tensor.tensor_type.name}, but only "
                    f"{', '.join((*_FLOATS, *BLOCKS))} are read: name a file of another quantization, such as Q4_K_M"
                )
        shapes = [tuple(reversed(tensor.shape.tolist())) for tensor in entry.tensors]
        shape = own_shape(name, entry.join.shape(shapes) if entry.join else shapes[0])
        kind, *others = sorted({tensor.tensor_type.name for tensor in entry.tensors})
        kind = "F32" if others and len(shape) == 2 else kind
        size, group = sum(tensor.n_bytes for tensor in entry.tensors), GROUPS.get(kind) if len(shape) == 2 else None
        return TensorHeader(shape, kind, size, quantized=kind in BLOCKS, group=group)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return self.some(lambda _name: True)

    def some(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        for name, entry in self._entries.items():
            if not wanted(name):
                continue
            order = self._input_order(name)
            if order is not None:
                yield order
            values = [self._as_trained(tensor.name, _value(tensor)) for tensor in entry.tensors]
            value = entry.join(values, self._number) if entry.join else values[0]
            yield name, restored(name, value, self._number, self.architecture.tiled_heads)

    def _input_order(self, name: str) -> tuple[str, Tensor] | None:
        return input_order(name, self._number) if self.architecture.tiled_heads else None

    @cached_property
    def architecture(self) -> Architecture:
        """The file's entry of ``ARCHITECTURES``. Raises ValueError for an unsupported architecture, and for a file that
        holds no language model."""
        name, kind = self.field("general.architecture"), self.field("general.type")
        if kind not in (None, "model") or name == "clip":
            raise ValueError(
                f"{self.path} holds no language model (general.type {kind or name}): name the model's own GGUF file"
            )
        if name not in ARCHITECTURES:
            raise ValueError(
                f"{self.path}: general.architecture is {name}, but only {', '.join(ARCHITECTURES)} are read from "
                "GGUF: name the model's Hugging Face folder"
            )
        return ARCHITECTURES[name]

    def field(self, key: str) -> Any:  # noqa: ANN401 - of whatever type the file gives it
        """Return a value of the file's metadata, an array as a list; None if the file lacks the key. ``{arch}`` stands
        for the architecture's name."""
        fields = self._readers[0].fields
        if "{arch}" in key:
            key = key.format(arch=self.field("general.architecture"))
        return fields[key].contents() if key in fields else None

    def own_fields(self) -> dict[str, Any]:
        """Return the metadata under the architecture's name, with that prefix removed from the keys."""
        prefix = f"{self.field('general.architecture')}."
        names = [key for key in self._readers[0].fields if key.startswith(prefix)]
        return {key.removeprefix(prefix): self.field(key) for key in names}

    def length(self, key: str) -> int | None:
        """Return the number of strings in an array of the metadata; None if there is no such array."""
        field = self._readers[0].fields.get(key)
        return None if field is None else text_count(field)

    def by_own_name(self, name: str) -> Tensor | None:
        """Return a plain tensor by its name in the file; None if the file lacks it."""
        found = (tensor for reader in self._readers for tensor in reader.tensors if tensor.name == name)
        return next((_value(tensor) for tensor in found), None)

    @cached_property
    def _readers(self) -> list["GGUFReader"]:
        readers = [open_gguf(file) for file in self.files()]
        count = readers[0].fields.get("split.count")
        if count is not None and count.contents() not in (0, len(readers)):
            raise ValueError(
                f"{self.path} is one of {count.contents()} parts, but its name is not that of a part "
                f"(NAME-00001-of-{count.contents():05}.gguf): name the parts as llama.cpp does"
            )
        return readers

    @cached_property
    def layers(self) -> int:
        """The number of decoder layers. llama.cpp counts MTP layers, which come last, in ``block_count`` as well."""
        return self._blocks - (self.field("{arch}.nextn_predict_layers") or 0)

    @cached_property
    def _blocks(self) -> int:
        blocks = self.field("{arch}.block_count") if self.architecture else None
        if not isinstance(blocks, int):
            raise ValueError(f"{self.path}: its metadata has no block_count, so it describes no model: copy it again")
        return blocks

    @cached_property
    def _entries(self) -> dict[str, Entry]:
        return entries(self._named(), self.architecture.joins)

    def _named(self) -> Iterator[tuple[str, "ReaderTensor"]]:
        """Yield each tensor with its name in the model, or its name as a part of such a tensor."""
        architecture, layers = self.field("general.architecture"), self.layers
        names = self.architecture.names(architecture, layers)
        if layers < self._blocks and self.architecture.mtp_names is not None:
            names |= self.architecture.mtp_names(architecture, layers, self._blocks)
        for tensor in (tensor for reader in self._readers for tensor in reader.tensors):
            if tensor.name not in UNREAD:
                yield names.get(tensor.name, tensor.name), tensor

    def _number(self, key: str) -> int:
        """Return a number of the metadata under the architecture's name. Raises ValueError if there is none."""
        found = self.field(f"{{arch}}.{key}")
        if not isinstance(found, int) or found < 1:
            raise ValueError(f"{self.path}: its metadata has {found} for {key}, but must have a number: copy it again")
        return found

    def _as_trained(self, name: str, value: Tensor) -> Tensor:
        """Return a tensor as it was before llama.cpp's converter changed it; ``name`` is its name in the file."""
        if self.architecture.norm_shift and name.endswith("norm.weight") and not name.endswith("ssm_norm.weight"):
            return value.float() - self.architecture.norm_shift
        if self.architecture.rotary_rows and re.fullmatch(r"blk\.\d+\.attn_[qk]\.(weight|bias)", name):
            heads = self._heads("attention.head_count")
            if ".attn_k." in name:
                heads = self._heads("attention.head_count_kv", heads)
            return _halves_apart(value, heads)
        return value

    def _heads(self, key: str, default: int | None = None) -> int:
        """Return the number of heads. Raises ValueError if layers with attention differ in it: llama.cpp reorders rows
        only in models in which all have the same number."""
        found = self.field(f"{{arch}}.{key}")
        heads = set(found) - {0} if isinstance(found, list) else {default if found is None else found}
        number = heads.pop() if len(heads) == 1 else None
        if number is None:
            raise ValueError(
                f"{self.path}: its metadata has {found} for {key}, but must have one number: copy it again"
            )
        return number


def part_names(file: str) -> list[str]:
    """Return the names of all parts of a split file, given the name of one. For a file that is not split, return its
    name alone."""
    split = _SPLIT.fullmatch(file)
    if split is None:
        return [file]
    stem, count, suffix = split[1], max(1, int(split[3])), file[-len(SUFFIX) :]
    return [f"{stem}-{part:05}-of-{count:05}{suffix}" for part in range(1, count + 1)]


def super_scales(value: "ExportableGGUFTensor") -> Tensor:
    """Return the float16 numbers of a K-quant, as views of its blocks: the scale of each 256 weights and, except in
    Q6_K, the scale of their minima. The shape is [N, K / 256, 2], or [N, K / 256] for Q6_K."""
    n, k = value.shape
    blocks = value.raw.view(n, k // 256, -1)
    of_minima = value.ggml_type != "q6_k"
    return blocks[..., :4].view(torch.float16) if of_minima else blocks[..., -2:].view(torch.float16).squeeze(-1)


def _value(tensor: "ReaderTensor") -> Tensor:
    """Return a GGUF tensor in PyTorch's order of dimensions, [N, K]; a matrix of K-quants keeps its blocks."""
    import gguf
    from executorch.extension.llm.export.gguf import ExportableGGUFTensor

    kind, data = tensor.tensor_type.name, tensor.data
    if kind in ("F32", "F16"):
        return torch.from_numpy(data)
    if kind == "BF16":
        return torch.from_numpy(data).view(torch.bfloat16)
    if kind in K_QUANTS and data.ndim == 2:
        return ExportableGGUFTensor(torch.from_numpy(data), kind.lower(), torch.float32)
    if kind in GROUPS and data.ndim == 2:
        return _grouped(kind, torch.from_numpy(data))
    return torch.from_numpy(gguf.dequantize(data, tensor.tensor_type))


def _grouped(kind: str, blocks: Tensor) -> Tensor:
    """Return a matrix of Q4_0 or Q8_0, uint8 [N, bytes of a row], as torchao's tensor with the same codes and scales.
    A block is a float16 scale, then 32 codes; of 4 bits, byte i has those of columns i and i + 16."""
    from torchao.quantization import IntxUnpackedToInt8Tensor

    four, group = kind == "Q4_0", GROUPS[kind]
    by_block = blocks.unflatten(1, (-1, 2 + (group // 2 if four else group)))
    scale, codes = by_block[..., :2].contiguous().view(torch.float16).squeeze(-1).float(), by_block[..., 2:]
    codes = torch.cat((codes & 0xF, codes >> 4), dim=-1).to(torch.int8) - 8 if four else codes.view(torch.int8)
    zero, held = torch.zeros_like(scale, dtype=torch.int8), torch.int4 if four else torch.int8  # type: ignore[attr-defined]
    return IntxUnpackedToInt8Tensor(codes.flatten(1), scale, zero, held, (1, group), torch.float32, None)


def _halves_apart(value: Tensor, heads: int) -> Tensor:
    """Move rows of q or k from llama.cpp's order, in which the two rows of a rotated pair are neighbours, to
    transformers' order, in which they are half a head apart."""
    return by_rows(value, lambda rows: rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2))


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
