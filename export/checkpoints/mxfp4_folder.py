"""Reads a folder of safetensors with its experts in MXFP4, as gpt-oss is published: blocks of 32 codes of 4 bits, with
a power of two as each block's scale. transformers' own code dequantizes them as they are read. This is exact: bfloat16
holds every product."""

from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

from torch import Tensor

from eagle3.export.checkpoints.json_fields import read_object
from eagle3.export.checkpoints.safetensors_file import open_safetensors
from eagle3.export.checkpoints.safetensors_folder import SafetensorsFolder
from eagle3.export.checkpoints.source import TensorHeader

QUANT_METHOD = "mxfp4"  # transformers' name
BLOCKS, SCALES = "_blocks", "_scales"
BLOCK_BYTES, BLOCK = 16, 32  # the bytes of a block, and the columns that they encode
ROWS = 1 << 20  # the number of blocks that are dequantized at once; each takes 200 bytes beside the result


class Mxfp4Folder(SafetensorsFolder):
    """A folder with MXFP4 experts. It joins ``gate_up_proj_blocks`` [experts, rows, blocks, 16] and
    ``gate_up_proj_scales`` [experts, rows, blocks] into ``gate_up_proj`` [experts, 32 * blocks, rows] in bfloat16;
    other tensors stay as they are."""

    @staticmethod
    def recognizes(path: Path) -> bool:
        if not (path / "config.json").is_file():
            return False
        said = read_object(path / "config.json").get("quantization_config")
        return isinstance(said, dict) and said.get("quant_method") == QUANT_METHOD

    def headers(self) -> dict[str, TensorHeader]:
        given = {}
        for name, header in self._raw.items():
            if not name.endswith((BLOCKS, SCALES)):
                given[name] = header
        for name in self._packed:
            experts, rows, blocks, _ = self._raw[name + BLOCKS].shape
            shape = (experts, blocks * BLOCK, rows)
            given[name] = TensorHeader(shape, "BF16", 2 * experts * blocks * BLOCK * rows)
        return given

    def some(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        packed = self._packed
        for name, value in super().some(lambda name: wanted(name.removesuffix(BLOCKS))):
            if name.endswith(BLOCKS):
                own = name.removesuffix(BLOCKS)
                scales = self._scales(own)
                yield own, convert_moe_packed_tensors(value, scales, rows_per_chunk=ROWS)
            elif not (name.endswith(SCALES) and name.removesuffix(SCALES) in packed):
                yield name, value

    @cached_property
    def _packed(self) -> list[str]:
        """Return the names of the weights in blocks. Raises ValueError if a weight's blocks and scales do not fit each
        other."""
        names = dict.fromkeys(
            name.removesuffix(part) for name in self._raw for part in (BLOCKS, SCALES) if name.endswith(part)
        )
        for name in names:
            blocks, scales = (self._raw.get(name + part) for part in (BLOCKS, SCALES))
            if blocks is None or scales is None:
                has, lacks = (SCALES, BLOCKS) if blocks is None else (BLOCKS, SCALES)
                raise ValueError(f"{self.path} has {name}{has}, but {name}{lacks} is not there: is a shard missing?")
            fits = len(blocks.shape) == 4 and blocks.shape == (*scales.shape, BLOCK_BYTES)
            if not fits or {blocks.dtype, scales.dtype} != {"U8"}:
                raise ValueError(
                    f"{self.path}: {name} has blocks {list(blocks.shape)} ({blocks.dtype}) and scales "
                    f"{list(scales.shape)} ({scales.dtype}), which are no MXFP4 weight: copy the file again"
                )
        return list(names)

    def _scales(self, name: str) -> Tensor:
        for path in self.files():
            with open_safetensors(path) as file:
                if name + SCALES in file.keys():  # noqa: SIM118 (not a dict)
                    return file.get_tensor(name + SCALES)
        raise ValueError(f"{self.path} lacks {name}{SCALES}: is a shard missing?")
