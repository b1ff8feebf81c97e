"""Reads a folder of safetensors with linears in FP8, as DeepSeek and Qwen publish them: E4M3 codes with a scale for
each block of 128 x 128 weights.

The product of a code and its scale is computed in float32, as transformers does. Servers that keep the codes also round
the inputs of these linears to FP8, so their tokens may differ.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle3.export.checkpoints.packed import ANOTHER
from eagle3.export.checkpoints.packed_folder import described
from eagle3.export.checkpoints.safetensors_folder import SafetensorsFolder
from eagle3.export.checkpoints.source import TensorHeader

QUANT_METHOD = "fp8"  # transformers' name
SCALES = "_scale_inv"
"""The end of the name of a weight's scales, which multiply the codes in spite of the name."""
CODES, SCALE_DTYPES = "F8_E4M3", ("F32", "BF16", "F16", "F8_E8M0")
"""The dtypes of codes and of scales. E8M0 holds powers of two (``scale_fmt`` ue8m0)."""


class Fp8Folder(SafetensorsFolder):
    """Joins ``X.weight`` in E4M3 [N, K], or [E, N, K] for experts, and ``X.weight_scale_inv``, with one scale for each
    block, into ``X.weight`` in float32. Other tensors stay as they are."""

    def __init__(self, path: Path):
        super().__init__(path)
        _, config = described(path) or ("", {})
        self.block: tuple[int, int] = _block(path / "config.json", config)

    @staticmethod
    def recognizes(path: Path) -> bool:
        _, config = described(path) or ("", {})
        return config.get("quant_method") == QUANT_METHOD

    def headers(self) -> dict[str, TensorHeader]:
        joined = dict(self._raw)
        for name in self._coded:
            stored = joined[name].bytes + joined.pop(name + SCALES).bytes
            joined[name] = TensorHeader(joined[name].shape, "F32", stored)
        return joined

    def notes(self) -> list[str]:
        return [
            f"{len(self._coded)} weights are in FP8 and are dequantized as they are read; a server that keeps FP8 also "
            "rounds the inputs of these linears, so its tokens may differ"
        ]

    def some(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        with self._opened() as read:
            for name in self._raw:
                if name.removesuffix(SCALES) in self._coded and name.endswith(SCALES):
                    continue
                if wanted(name):
                    coded = name in self._coded
                    yield name, scaled(read(name), read(name + SCALES), self.block) if coded else read(name)

    @cached_property
    def _coded(self) -> set[str]:
        """Return the names of the weights in FP8. Raises ValueError for codes and scales that do not fit each other."""
        coded = {
            name for name, header in self._raw.items() if header.dtype.startswith("F8_") and not name.endswith(SCALES)
        }
        coded |= {name.removesuffix(SCALES) for name in self._raw if name.endswith(SCALES)}
        for name in sorted(coded):
            codes, scales = self._raw.get(name), self._raw.get(name + SCALES)
            if codes is None or scales is None:
                has, lacks = (name, name + SCALES) if scales is None else (name + SCALES, name)
                other = next((each for each in self._raw if each.startswith(f"{name}_scale") and each != has), None)
                cause = f"it has {other}, a form that is not read: {ANOTHER}" if other else "is a shard missing?"
                raise ValueError(f"{self.path} has {has}, but {lacks} is not there: {cause}")
            rows, columns = codes.shape[-2:] if len(codes.shape) > 1 else (0, 0)
            blocks = -(-rows // self.block[0]), -(-columns // self.block[1])
            fits = (*codes.shape[:-2], *blocks) == scales.shape and rows and columns
            if not fits or codes.dtype != CODES or scales.dtype not in SCALE_DTYPES:
                raise ValueError(
                    f"{self.path}: {name} is {codes.dtype} {list(codes.shape)} with scales {scales.dtype} "
                    f"{list(scales.shape)}, but only {CODES} in blocks of {self.block[0]} x {self.block[1]} "
                    "(weight_block_size) is read: name the original checkpoint"
                )
        return coded


def scaled(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Return codes [..., N, K] times the scales of their blocks, in float32. ``block`` has the rows and columns of a
    block; the last one of a row or column may be narrower."""
    rows, columns = codes.shape[-2:]
    spread = scales.float().repeat_interleave(block[0], -2)[..., :rows, :]
    return codes.float() * spread.repeat_interleave(block[1], -1)[..., :columns]


def _block(file: Path, config: dict[str, Any]) -> tuple[int, int]:
    """Return the rows and columns of a block, from the quantization_config of ``file``. Raises ValueError for weights
    that are not stored in blocks."""
    found = config.get("weight_block_size")
    if not isinstance(found, list) or len(found) != 2 or not all(isinstance(each, int) and each > 0 for each in found):
        raise ValueError(
            f"{file}: quantization_config has weight_block_size {found}, but fp8 is read in blocks alone, such as "
            "[128, 128]: name the original checkpoint"
        )
    return found[0], found[1]
