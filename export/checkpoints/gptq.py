"""GPTQ's packing, as AutoGPTQ and GPTQModel write it: codes of 4 or 8 bits, packed along the inputs.

The parts are ``qweight`` int32 [K / per word, N], ``qzeros`` int32 [groups, N / per word], ``scales`` [groups, N] and
``g_idx`` [K]. Words hold the lowest bits first. The format ``gptq`` (v1) stores zero points less 1; ``gptq_v2`` stores
them as they are.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3.export.checkpoints.json_fields import boolean
from eagle3.export.checkpoints.packed import (
    ANOTHER,
    BITS,
    FLOAT_SCALES,
    Format,
    PackedLinear,
    Parts,
    Read,
    as_tensor,
    check_bits,
    check_group,
    expect,
    input_order,
    matrix,
    unpacked,
)

QWEIGHT, QZEROS, SCALES, G_IDX = "qweight", "qzeros", "scales", "g_idx"


class Gptq(Format):
    REQUIRED, OPTIONAL = (QWEIGHT, QZEROS, SCALES), (G_IDX,)

    def __init__(self, file: Path, config: dict[str, Any]):
        where = f"{file}: quantization_config"
        self.bits = check_bits(where, config, BITS)
        self.group = check_group(where, config)
        # linears then differ in bits and group size, which follow from the shapes of their parts
        self.dynamic = bool(config.get("dynamic"))
        kind = config.get("checkpoint_format") or config.get("format") or "gptq"
        if kind not in ("gptq", "gptq_v2") or boolean(config, "is_marlin_format", False, where):
            raise ValueError(f"{where} has the format {kind}, but only gptq and gptq_v2 are read: {ANOTHER}")
        self.less_one = kind == "gptq"

    def layout(self, linear: str, parts: Parts, read: Read) -> PackedLinear:
        bits, (words, rows) = self.bits, matrix(linear, QWEIGHT, parts[QWEIGHT])
        groups, _ = matrix(linear, SCALES, parts[SCALES])
        columns = parts[G_IDX].elements if G_IDX in parts else words * 32 // bits
        group = columns if self.group == -1 else self.group
        if self.dynamic:
            bits, group = words * 32 // max(1, columns), columns // groups
        if bits not in BITS or not group or columns % group or columns % (32 // bits):
            raise ValueError(
                f"{linear} has {columns} inputs of {bits} bits, which do not fit quantization_config with groups of "
                f"{group}: config.json and the weights are of different checkpoints"
            )
        layout = PackedLinear(rows, columns, bits, group)
        why = f"{linear} of {rows} x {columns} with {bits} bits in groups of {group} (quantization_config)"
        expect(linear, QWEIGHT, parts[QWEIGHT], (columns // layout.per_word, rows), ("I32",), why)
        expect(linear, QZEROS, parts[QZEROS], (layout.groups, -(-rows // layout.per_word)), ("I32",), why)
        expect(linear, SCALES, parts[SCALES], (layout.groups, rows), FLOAT_SCALES, why)
        if G_IDX in parts:
            expect(linear, G_IDX, parts[G_IDX], (columns,), ("I32", "I64"), why)
            layout = replace(layout, order=input_order(linear, G_IDX, layout, read(G_IDX)))
        if self.less_one:
            self._check_zeros(linear, layout, read)
        return layout

    def unpack(self, _linear: str, layout: PackedLinear, read: Read) -> Tensor:
        codes = read(QWEIGHT).t().contiguous().view(torch.uint8)
        zero = self._stored_zeros(layout, read) + int(self.less_one)
        return as_tensor(layout, codes, read(SCALES).t(), zero.t())

    def _stored_zeros(self, layout: PackedLinear, read: Read) -> Tensor:
        return unpacked(read(QZEROS), layout.bits)[:, : layout.rows]

    def _check_zeros(self, linear: str, layout: PackedLinear, read: Read) -> None:
        """Raise ValueError for a stored zero point of all ones. Format v1 stores zero points less 1, and tools differ
        in how they store -1."""
        largest = (1 << layout.bits) - 1
        if (self._stored_zeros(layout, read) == largest).any():
            raise ValueError(
                f"{linear}.{QZEROS} stores a zero point of {largest} in the format gptq (v1), which means 0 to some "
                f"tools and {largest + 1} to others: save it in the format gptq_v2"
            )
