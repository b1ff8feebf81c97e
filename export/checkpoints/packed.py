"""Reads linears that another tool quantized and packed into int32 words. Their codes become quantized tensors of
torchao or ExecuTorch without rounding.

The weight is ``w[n, k] = (code[n, k] - zero[n, g]) * scale[n, g]`` with unsigned codes and zero points; ``g`` is the
group of column k. Each format orders the codes of a word differently and has its own file: ``compressed_tensors``,
``gptq``, ``awq``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3.export.checkpoints.json_fields import Fields
from eagle3.export.checkpoints.source import TensorHeader

BITS = (4, 8)
FLOAT_SCALES = ("F16", "BF16", "F32")
ANOTHER = "name the original checkpoint, or one by compressed-tensors (pack-quantized), GPTQ or AWQ (gemm)"


@dataclass(frozen=True)
class PackedLinear:
    """The storage of a linear of ``rows`` outputs and ``columns`` inputs."""

    rows: int
    columns: int
    bits: int
    group: int
    """The number of columns that share a scale; all columns if each row has one scale."""
    symmetric: bool = False
    """True if there are no zero points: the middle code stands for zero."""

    order: Tensor | None = field(default=None, compare=False)
    """int64 [columns]: for each column of the weight, sorted by groups, the input column that it multiplies."""

    @property
    def groups(self) -> int:
        return self.columns // self.group

    @property
    def per_word(self) -> int:
        return 32 // self.bits

    @property
    def tensor_class(self) -> str:
        return "ExportableInt4Tensor" if self.bits == 4 else "IntxUnpackedToInt8Tensor"


Parts = Mapping[str, TensorHeader]
Read = Callable[[str], Tensor]


class Format(ABC):
    """A packing format, read from the quantization_config of ``file``. Raises ValueError for a setting that is not
    supported."""

    REQUIRED: tuple[str, ...]
    """The parts that every packed linear has, by the last component of their names."""
    OPTIONAL: tuple[str, ...] = ()

    @abstractmethod
    def __init__(self, file: Path, config: dict[str, Any]): ...

    @abstractmethod
    def layout(self, linear: str, parts: Parts, read: Read, /) -> PackedLinear:
        """Return the storage of ``linear``. ``read`` returns a part; only small parts may be read here. Raises
        ValueError for parts that do not fit together."""

    @abstractmethod
    def unpack(self, linear: str, layout: PackedLinear, read: Read, /) -> Tensor:
        """Return the weight as ``as_tensor`` makes it."""


def as_tensor(layout: PackedLinear, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Return the weight as a tensor of ExecuTorch (4 bits) or torchao (8 bits), with the same codes, scales and zero
    points. Its columns are sorted by groups.

    Args:
        codes: uint8 [rows, columns]; with 4 bits [rows, columns / 2], even columns in the low half of each byte
        scale: [rows, groups], of any floating dtype
        zero: uint8 [rows, groups]; None stands for the middle code
    """
    from executorch.extension.llm.export.int4 import ExportableInt4Tensor
    from torchao.quantization import IntxUnpackedToInt8Tensor

    if layout.order is not None:
        codes = _sorted(codes, layout)
    if zero is None:
        zero = torch.full(scale.shape, 1 << (layout.bits - 1), dtype=torch.uint8)
    if layout.bits == 4:
        zero = zero.to(scale.dtype).t().contiguous()
        return ExportableInt4Tensor(codes, scale.t().contiguous(), zero, layout.group, scale.dtype)
    signed = (codes ^ 0x80).view(torch.int8), (zero ^ 0x80).contiguous().view(torch.int8)
    block = (1, layout.group)
    return IntxUnpackedToInt8Tensor(
        signed[0], scale.contiguous(), signed[1], torch.int8, block, scale.dtype, activation_quantization=None
    )


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack the codes of each word, the lowest bits first: int32 [R, C] -> uint8 [R, C * 32 / bits]. Words may also
    be uint8."""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 0xF, octets >> 4), dim=-1).flatten(1)


def check_bits(fields: Fields, known: tuple[int, ...]) -> int:
    """Return the checked ``bits`` of a quantization_config."""
    agreed(fields, "bits", "w_bit")
    bits = fields.count("bits")
    if bits is None or bits not in known:
        raise ValueError(
            f"{fields.where} has bits {bits}, but must have {' or '.join(map(str, known))} to be read: {ANOTHER}"
        )
    return bits


def check_group(fields: Fields) -> int:
    """Return the checked ``group_size`` of a quantization_config; -1 means that a row has one scale."""
    agreed(fields, "group_size", "q_group_size")
    return fields.count("group_size", 128) if fields.get("group_size") != -1 else -1


def agreed(fields: Fields, *keys: str) -> Any:  # noqa: ANN401 - of the field's type
    """Return the value of the keys, which are names of one field: tools differ in which of them they read. Raises
    ValueError if two of them have different values; None if no key has one."""
    found = {key: fields[key] for key in keys if fields.get(key) is not None}
    if len(set(map(repr, found.values()))) > 1:
        (first, one), (second, other) = list(found.items())[:2]
        raise ValueError(
            f"{fields.where} has {first} {one} and {second} {other}, but they mean the same: take the wrong one out"
        )
    return next(iter(found.values()), None)


def check_middle(linear: str, part: str, layout: "PackedLinear", zero: Tensor, says: str) -> None:
    """Raise ValueError unless all zero points are the middle code, as ``says`` of quantization_config implies."""
    middle = 1 << (layout.bits - 1)
    other = zero[zero != middle]
    if other.numel():
        raise ValueError(
            f"{linear}.{part} has a zero point of {int(other[0])}, but quantization_config says {says}, which implies "
            f"{middle}: tools differ in which of them they read: correct config.json, or {ANOTHER}"
        )


def matrix(linear: str, part: str, header: TensorHeader) -> tuple[int, int]:
    """Return the shape of a part that must be a matrix."""
    if len(header.shape) != 2 or not header.elements:
        raise ValueError(f"{linear}.{part} is {list(header.shape)}, but packed weights are matrices: copy it again")
    return header.shape


def expect(
    linear: str, part: str, found: TensorHeader, shape: tuple[int, ...], dtypes: tuple[str, ...], why: str
) -> None:
    """Raise ValueError unless a part has this shape and one of these dtypes. ``why`` names the source of both in the
    message."""
    if found.shape != shape or found.dtype not in dtypes:
        raise ValueError(
            f"{linear}.{part} is {found.dtype} {list(found.shape)}, but {why} implies {'/'.join(dtypes)} {list(shape)}"
            ": config.json and the weights are of different checkpoints, or another tool packed them"
        )


def input_order(linear: str, part: str, layout: PackedLinear, g_idx: Tensor) -> Tensor | None:
    """Return int64 [columns], the columns sorted by their groups; None if they are sorted already.

    Tools that quantize in the order of activations (desc_act, actorder group) scatter a group's columns. Raises
    ValueError for groups of unequal sizes.
    """
    g_idx = g_idx.long()
    if torch.equal(g_idx, torch.arange(layout.columns) // layout.group):
        return None
    sizes = torch.bincount(g_idx.clamp(0, layout.groups), minlength=layout.groups)[: layout.groups]
    if (sizes != layout.group).any():
        wrong = int((sizes != layout.group).nonzero()[0])
        raise ValueError(
            f"{linear}.{part} puts {int(sizes[wrong])} columns into group {wrong}, but quantization_config says "
            f"{layout.group}: config.json and the weights are of different checkpoints"
        )
    return g_idx.argsort(stable=True)


def _sorted(codes: Tensor, layout: PackedLinear) -> Tensor:
    if layout.bits == 8:
        return codes[:, layout.order]
    codes = unpacked(codes, 4)[:, layout.order]
    return codes[:, ::2] | codes[:, 1::2] << 4
