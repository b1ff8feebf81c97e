"""GPTQ's packing, as AutoGPTQ and GPTQModel write it: codes of 4 or 8 bits, packed along the inputs.

The parts are ``qweight`` int32 [K / per word, N], ``qzeros`` int32 [groups, N / per word], ``scales`` [groups, N] and
``g_idx`` [K]. Words hold the lowest bits first. The format ``gptq`` (v1) stores zero points less 1; ``gptq_v2`` stores
them as they are. ``sym`` implies zero points of the middle code: vLLM's Marlin kernels read no ``qzeros`` then. Tools
disagree on whether that code is stored less 1, so both forms of it are read alike, and another zero point is refused.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3.export.checkpoints.json_fields import Fields
from eagle3.export.checkpoints.packed import (
    ANOTHER,
    BITS,
    FLOAT_SCALES,
    Format,
    PackedLinear,
    Parts,
    Read,
    agreed,
    as_tensor,
    check_bits,
    check_group,
    check_middle,
    expect,
    input_order,
    matrix,
    unpacked,
)

QWEIGHT, QZEROS, SCALES, G_IDX = "qweight", "qzeros", "scales", "g_idx"


class Gptq(Format):
    REQUIRED, OPTIONAL = (QWEIGHT, QZEROS, SCALES), (G_IDX,)

    def __init__(self, file: Path, config: dict[str, Any]):
        fields = Fields(file, config, "quantization_config")
        self._fields = fields
        self.bits = check_bits(fields, BITS)
        self.group = check_group(fields)
        # linears then differ in bits and group size, which follow from the shapes of their parts
        self.dynamic = fields.nested("dynamic")
        self._sym, self._ordered = fields.boolean("sym"), fields.boolean("desc_act") is False
        kind = agreed(fields, "checkpoint_format", "format") or "gptq"
        if kind not in ("gptq", "gptq_v2") or fields.boolean("is_marlin_format"):
            raise ValueError(f"{fields.where} has the format {kind}, but only gptq and gptq_v2 are read: {ANOTHER}")
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
            if layout.order is not None and self._ordered and not self._reordered(linear):
                raise ValueError(
                    f"{linear}.{G_IDX} puts columns into groups out of their order, but quantization_config says "
                    f"desc_act: false, with which vLLM does not read {G_IDX}: correct config.json, or {ANOTHER}"
                )
        if self._symmetric(linear):
            self._check_symmetric(linear, layout, read)
            return replace(layout, symmetric=True)
        if self.less_one:
            self._check_zeros(linear, layout, read)
        return layout

    def unpack(self, _linear: str, layout: PackedLinear, read: Read) -> Tensor:
        codes = read(QWEIGHT).t().contiguous().view(torch.uint8)
        if layout.symmetric:
            return as_tensor(layout, codes, read(SCALES).t(), None)
        zero = self._stored_zeros(layout, read) + int(self.less_one)
        return as_tensor(layout, codes, read(SCALES).t(), zero.t())

    def _symmetric(self, linear: str) -> bool | None:
        return self._override(linear).boolean("sym", self._sym)

    def _reordered(self, linear: str) -> bool | None:
        return self._override(linear).boolean("desc_act")

    def _override(self, linear: str) -> Fields:
        """Return the settings of the first rule of ``dynamic`` for a linear. GPTQModel's rules are patterns after
        ``+:``, AutoRound's are names or patterns."""
        for rule, settings in self.dynamic.items():
            if isinstance(settings, dict) and (rule == linear or _matches(rule.removeprefix("+:"), linear)):
                return replace(self._fields, content=settings)
        return replace(self._fields, content={})

    def _check_symmetric(self, linear: str, layout: PackedLinear, read: Read) -> None:
        """Raise ValueError unless all zero points are the middle code, stored as it is or less 1."""
        zero, middle = self._stored_zeros(layout, read), 1 << (layout.bits - 1)
        if not (zero == middle - 1).all():
            check_middle(linear, QZEROS, layout, zero if (zero == middle).all() else zero + self.less_one, "sym: true")

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


def _matches(pattern: str, linear: str) -> bool:
    try:
        return re.match(pattern, linear) is not None
    except re.error:
        return False
