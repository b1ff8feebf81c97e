"""AWQ's packing, version gemm, as AutoAWQ writes it: 4-bit codes, packed along the outputs, eight to a word in AWQ's
own order.

The parts are ``qweight`` int32 [K, N / 8], ``qzeros`` int32 [groups, N / 8] and ``scales`` [groups, N].
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from eagle3.export.checkpoints.json_fields import Fields
from eagle3.export.checkpoints.packed import (
    ANOTHER,
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
    matrix,
    unpacked,
)

QWEIGHT, QZEROS, SCALES = "qweight", "qzeros", "scales"
PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""The place of each of the eight outputs in a word, counted from its lowest bits."""


class Awq(Format):
    REQUIRED = (QWEIGHT, QZEROS, SCALES)

    def __init__(self, file: Path, config: dict[str, Any]):
        fields = Fields(file, config, "quantization_config")
        check_bits(fields, (4,))
        self.group = check_group(fields)
        self.symmetric = fields.boolean("zero_point", True) is False
        names = {key: str(config[key]).lower() for key in ("version", "format") if config.get(key) is not None}
        version = agreed(Fields(file, names, fields.part), "version", "format") or "gemm"
        if version != "gemm" or config.get("backend") == "llm-awq":
            raise ValueError(f"{fields.where} has the version {version}, but only gemm is read: {ANOTHER}")

    def layout(self, linear: str, parts: Parts, read: Read) -> PackedLinear:
        columns, words = matrix(linear, QWEIGHT, parts[QWEIGHT])
        rows, group = 8 * words, columns if self.group == -1 else self.group
        if columns % group or columns % 8:
            raise ValueError(
                f"{linear}.{QWEIGHT} is {columns} x {words}, which does not fit quantization_config with groups of "
                f"{group}: config.json and the weights are of different checkpoints"
            )
        layout = PackedLinear(rows, columns, 4, group)
        why = f"{linear} of {rows} x {columns} in groups of {group} (quantization_config)"
        expect(linear, QWEIGHT, parts[QWEIGHT], (columns, rows // 8), ("I32",), why)
        expect(linear, QZEROS, parts[QZEROS], (layout.groups, rows // 8), ("I32",), why)
        expect(linear, SCALES, parts[SCALES], (layout.groups, rows), FLOAT_SCALES, why)
        if self.symmetric:  # AutoAWQ's kernels read the zero points nevertheless
            check_middle(linear, QZEROS, layout, _in_order(read(QZEROS)), "zero_point: false")
        return layout

    def unpack(self, _linear: str, layout: PackedLinear, read: Read) -> Tensor:
        codes = _in_order(read(QWEIGHT)).t().contiguous()  # [N, K]
        codes = codes[:, ::2] | codes[:, 1::2] << 4
        return as_tensor(layout, codes, read(SCALES).t(), _in_order(read(QZEROS)).t())


def _in_order(words: Tensor) -> Tensor:
    """Unpack int32 [R, N / 8] to uint8 [R, N], with the outputs in order."""
    return unpacked(words, 4).unflatten(1, (-1, 8))[:, :, PLACES].flatten(1)
