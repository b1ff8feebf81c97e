"""Reads a folder of safetensors with linears in FP8 or NVFP4, as NVIDIA's Model Optimizer and llm-compressor write
it.

An FP8 weight has codes in E4M3 and a scale for the whole weight, for each row, or for each block; the shape of the
scales decides. Model Optimizer stores blocks of 128 x 128 as [R, 1, C, 1] (``FP8_PB_WO``; vLLM's ``modelopt.py``). An
NVFP4 weight has codes of 4 bits (E2M1), an E4M3 scale for each 16 of them along a row, and a float32 scale for the
whole weight, by which llm-compressor divides and Model Optimizer multiplies (``compressors/nvfp4`` of
compressed-tensors 0.20; vLLM's ``modelopt.py``).

Products are computed in float32. Servers that keep the codes also round the inputs of these linears, so their tokens
may differ.
"""

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle3.export.checkpoints.compressed_tensors import refuse_fields
from eagle3.export.checkpoints.fp8_folder import CODES, SCALE_DTYPES, scaled
from eagle3.export.checkpoints.packed import ANOTHER
from eagle3.export.checkpoints.packed_folder import described
from eagle3.export.checkpoints.safetensors_folder import SafetensorsFolder
from eagle3.export.checkpoints.source import TensorHeader

MODEL_OPTIMIZER, COMPRESSED_TENSORS = "modelopt", "compressed-tensors"  # transformers' names
FORMATS = ("float-quantized", "nvfp4-pack-quantized")
"""The formats of compressed-tensors that are read here."""
FP8, NVFP4 = "FP8", "NVFP4"
GROUP = 16
"""The columns that share a scale in NVFP4."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of the codes from 0 to 7. The codes from 8 to 15 have these values with the other sign."""
MODEL_OPTIMIZER_BLOCK = 128, 128
WEIGHT_SCALES = "weight_scale", "weight_scale_inv"
"""The names of the scales. They multiply the codes under both."""
UNREAD = ("input_scale", "input_global_scale", "k_scale", "v_scale")
"""The last parts of the names of tensors that round inputs and caches, which the export does not do."""


class Coded(NamedTuple):
    """The names and the shapes of one weight's parts."""

    codes: str
    scales: str
    whole: str | None
    """The scale of the whole weight, in NVFP4."""
    divides: bool
    shape: tuple[int, int]
    block: tuple[int, int]
    """The rows and columns that share one of the scales."""

    @property
    def kind(self) -> str:
        return FP8 if self.whole is None else NVFP4

    @property
    def blocks(self) -> tuple[int, int]:
        """The rows and columns of the scales."""
        return -(-self.shape[0] // self.block[0]), -(-self.shape[1] // self.block[1])

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.codes, self.scales) if self.whole is None else (self.codes, self.scales, self.whole)


class FloatFolder(SafetensorsFolder):
    """Joins the parts of each weight in FP8 or NVFP4 into ``X.weight`` in float32. Other tensors stay as they are."""

    def __init__(self, path: Path):
        super().__init__(path)
        _, self.config = described(path) or ("", {})
        refuse_fields(path / "config.json", self.config, "transform_config", "sparsity_config")

    @staticmethod
    def recognizes(path: Path) -> bool:
        _, config = described(path) or ("", {})
        method = config.get("quant_method")
        return method == MODEL_OPTIMIZER or (method == COMPRESSED_TENSORS and config.get("format") in FORMATS)

    def headers(self) -> dict[str, TensorHeader]:
        found = {name: header for name, header in self._raw.items() if not _is_unread(name)}
        for name, coded in self._coded.items():
            stored = sum(found.pop(part).bytes for part in coded.parts)
            found[name] = TensorHeader(coded.shape, "F32", stored)
        return found

    def notes(self) -> list[str]:
        kinds = sorted({coded.kind for coded in self._coded.values()})
        caches = any(name.endswith((".k_scale", ".v_scale")) for name in self._raw)
        also = " and keys and values" if caches else ""
        return [
            f"{len(self._coded)} weights are in {' and '.join(kinds)} and are dequantized as they are read; a server "
            f"that keeps these formats also rounds the inputs of these linears{also}, so its tokens may differ"
        ]

    def some(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        parts = {part for coded in self._coded.values() for part in coded.parts}
        with self._opened() as read:
            for name in self._raw:
                if name not in parts and not _is_unread(name) and wanted(name):
                    yield name, read(name)
            for name, coded in self._coded.items():
                if wanted(name):
                    yield name, _decoded(coded, read)

    @cached_property
    def _coded(self) -> dict[str, Coded]:
        """Map the name of each weight to its parts. Raises ValueError for parts that do not fit each other."""
        found = {}
        for name, header in self._raw.items():
            linear, _, part = name.rpartition(".")
            is_coded = header.dtype == "U8" or header.dtype.startswith("F8_")
            if part == "weight_packed" or (part == "weight" and is_coded):
                found[f"{linear}.weight"] = self._coded_of(linear, name, header)
        return found

    def _coded_of(self, linear: str, codes: str, header: TensorHeader) -> Coded:
        named = [name for name in WEIGHT_SCALES if f"{linear}.{name}" in self._raw]
        if len(named) > 1:
            raise ValueError(f"{self.path} has {linear}.{named[0]} and {linear}.{named[1]}: which one is meant?")
        scale = f"{linear}.{named[0] if named else WEIGHT_SCALES[0]}"
        scales = self._part(codes, scale)
        rows, columns = header.shape if len(header.shape) == 2 else (0, 0)
        if header.dtype == "U8":
            divides = codes.endswith("weight_packed")
            whole = f"{linear}.weight_global_scale" if divides else f"{linear}.weight_scale_2"
            shape, block = (rows, 2 * columns), (1, GROUP)
            fits = scales.dtype == CODES and self._part(codes, whole).elements == 1
            coded = Coded(codes, scale, whole, divides, shape, block)
        else:
            shape, block = (rows, columns), self._block(scale, rows, columns)
            fits = header.dtype == CODES and scales.dtype in SCALE_DTYPES
            coded = Coded(codes, scale, None, False, shape, block)
        if not (rows and columns and fits) or scales.elements != math.prod(coded.blocks):
            raise ValueError(
                f"{self.path}: {codes} is {header.dtype} {list(header.shape)} with scales {scales.dtype} "
                f"{list(scales.shape)}, which is neither NVFP4 nor FP8 with a scale for a weight, a row or a block: "
                f"{ANOTHER}"
            )
        return coded

    def _part(self, codes: str, name: str) -> TensorHeader:
        if name not in self._raw:
            raise ValueError(f"{self.path} has {codes}, but {name} is not there: is a shard missing?")
        return self._raw[name]

    def _block(self, scale: str, rows: int, columns: int) -> tuple[int, int]:
        """Return the rows and columns that share one of the scales ``scale`` of an FP8 weight; (1, 1), which fits no
        scales, if no known block has their shape. Raises ValueError if several do."""
        scales = self._raw[scale]
        if scales.elements == 1:
            return rows, columns
        if scales.shape in ((rows,), (rows, 1)):
            return 1, columns
        shape = scales.shape
        if len(shape) == 4 and shape[1] == shape[3] == 1:
            shape = shape[::2]
        fits = [block for block in self._known_blocks if shape == (-(-rows // block[0]), -(-columns // block[1]))]
        if len(fits) > 1:
            raise ValueError(
                f"{self.path}: {scale} is {list(scales.shape)}, which blocks of {' and '.join(map(str, fits))} "
                f"(quantization_config) have in a weight of {rows} x {columns}: {ANOTHER}"
            )
        return fits[0] if fits else (1, 1)

    @cached_property
    def _known_blocks(self) -> list[tuple[int, int]]:
        """The rows and columns of blocks: those in the configuration, or else Model Optimizer's."""
        groups: dict[str, Any] = self.config.get("config_groups") or {}
        said = [(group.get("weights") or {}).get("block_structure") for group in groups.values()]
        said += [self.config.get("weight_block_size")]
        found = dict.fromkeys(
            (each[0], each[1])
            for each in said
            if isinstance(each, list) and len(each) == 2 and all(isinstance(size, int) and size > 0 for size in each)
        )
        return list(found) or [MODEL_OPTIMIZER_BLOCK] * (self.config.get("quant_method") == MODEL_OPTIMIZER)


def _is_unread(name: str) -> bool:
    return name.rpartition(".")[2] in UNREAD


def _decoded(coded: Coded, read: Callable[[str], Tensor]) -> Tensor:
    codes, scales = read(coded.codes), read(coded.scales).float()
    if coded.whole is not None:
        whole = read(coded.whole).float()
        scales = scales / whole if coded.divides else scales * whole
        codes = e2m1(codes)
    return scaled(codes, scales.view(coded.blocks), coded.block)


def e2m1(packed: Tensor) -> Tensor:
    """Return float32 [N, 2 * K] of codes in bytes, uint8 [N, K], the first code of a byte in its low half."""
    values = torch.tensor([*E2M1, *(-value for value in E2M1)])
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
    return values[codes.int()]
