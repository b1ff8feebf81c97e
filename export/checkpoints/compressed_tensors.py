"""The format pack-quantized of compressed-tensors, as llm-compressor writes it (w4a16, w8a16): only weights are
quantized.

Codes are packed along a row into int32 words, the lowest bits first. Signed codes are stored with half their range
added. Zero points are stored in the same way, but packed along the rows
(``compressed_tensors/compressors/pack_quantized`` of compressed-tensors 0.20).
"""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3.export.checkpoints.packed import (
    ANOTHER,
    BITS,
    FLOAT_SCALES,
    Format,
    PackedLinear,
    Parts,
    Read,
    as_tensor,
    expect,
    input_order,
    unpacked,
)

UNREADABLE = {
    "kv_cache_scheme": "quantizes the KV cache, which is kept in the activations' dtype here",
    "transform_config": "rotates weights and activations, a computation that the export lacks",
    "sparsity_config": "stores the weights without their zeros, a format that is not read",
}
"""The fields of a description that change more than the weights' codes, and what they do."""
PACKED, SCALE, SHAPE, ZERO, G_IDX = (f"weight_{part}" for part in ("packed", "scale", "shape", "zero_point", "g_idx"))


@dataclass(frozen=True)
class Scheme:
    """One group of ``config_groups``: ``group`` columns share a scale; -1 means that a whole row shares one."""

    targets: tuple[str, ...]
    bits: int
    group: int
    symmetric: bool
    scattered: bool
    """True if ``actorder`` is "group": a group's columns are scattered, and ``weight_g_idx`` says where."""


class CompressedTensors(Format):
    REQUIRED, OPTIONAL = (PACKED, SCALE, SHAPE), (ZERO, G_IDX)

    def __init__(self, file: Path, config: dict[str, Any]):
        refuse_fields(file, config, *UNREADABLE)
        groups = config.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise ValueError(f"{file}: quantization_config has no config_groups: copy config.json again")
        self.schemes = [_scheme(f"{file}: {name} of config_groups", group, config) for name, group in groups.items()]

    def layout(self, linear: str, parts: Parts, read: Read) -> PackedLinear:
        scheme = self._scheme_of(linear)
        expect(linear, SHAPE, parts[SHAPE], (2,), ("I64", "I32"), "a linear")
        rows, columns = map(int, read(SHAPE))
        group = columns if scheme.group == -1 else scheme.group
        if min(rows, columns) < 1 or columns % group or columns % (32 // scheme.bits):
            raise ValueError(
                f"{linear}.{SHAPE} says {rows} x {columns}, which does not fit quantization_config with groups of "
                f"{group}: config.json and the weights are of different checkpoints"
            )
        layout = PackedLinear(rows, columns, scheme.bits, group, scheme.symmetric)
        why = f"{linear}.{SHAPE} {rows} x {columns} with {scheme.bits} bits in groups of {group} (quantization_config)"
        expect(linear, PACKED, parts[PACKED], (rows, columns // layout.per_word), ("I32",), why)
        expect(linear, SCALE, parts[SCALE], (rows, layout.groups), FLOAT_SCALES, why)
        if scheme.symmetric == (ZERO in parts):
            has, says = ("no ", "false") if ZERO not in parts else ("", "true")
            raise ValueError(
                f"{linear} has {has}{ZERO}, but quantization_config says symmetric: {says}: is a shard missing, or is "
                "config.json another checkpoint's?"
            )
        if ZERO in parts:
            expect(linear, ZERO, parts[ZERO], (-(-rows // layout.per_word), layout.groups), ("I32",), why)
        if G_IDX in parts:
            expect(linear, G_IDX, parts[G_IDX], (columns,), ("I32", "I64"), why)
            layout = replace(layout, order=input_order(linear, G_IDX, layout, read(G_IDX)))
        if scheme.scattered != (G_IDX in parts) and (scheme.scattered or layout.order is not None):
            has, says = ("no ", "group") if scheme.scattered else ("", "not group")
            raise ValueError(
                f"{linear} has {has}{G_IDX}, but quantization_config's actorder is {says}: is a shard missing, or is "
                "config.json another checkpoint's?"
            )
        return layout

    def unpack(self, _linear: str, layout: PackedLinear, read: Read) -> Tensor:
        zero = None
        if not layout.symmetric:
            zero = unpacked(read(ZERO).t(), layout.bits)[:, : layout.rows].t()
        return as_tensor(layout, read(PACKED).view(torch.uint8), read(SCALE), zero)

    def _scheme_of(self, linear: str) -> Scheme:
        """Return a linear's scheme. Names match before patterns, and patterns before classes, as in
        compressed-tensors."""
        for matches in (
            lambda target: target == linear,
            lambda target: target.startswith("re:") and re.match(target.removeprefix("re:"), linear),
            lambda target: target == "Linear",
        ):
            for scheme in self.schemes:
                if any(matches(target) for target in scheme.targets):
                    return scheme
        targets = ", ".join(target for scheme in self.schemes for target in scheme.targets)
        raise ValueError(
            f"{linear} is packed, but no group of quantization_config is for it (targets {targets}): config.json and "
            "the weights are of different checkpoints"
        )


def refuse_fields(file: Path, config: dict[str, Any], *fields: str) -> None:
    """Raise ValueError if ``config``, the quantization_config of ``file``, has one of these keys of ``UNREADABLE``."""
    for field in fields:
        value = config.get(field)
        if value and not (isinstance(value, dict) and value.get("format") == "dense"):
            raise ValueError(f"{file}: quantization_config has a {field}, which {UNREADABLE[field]}: {ANOTHER}")


def _scheme(where: str, group: object, config: dict[str, Any]) -> Scheme:
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise ValueError(f"{where} does not describe weights: copy config.json again")
    stored, weights = group.get("format") or config.get("format"), group["weights"]
    if stored != "pack-quantized":
        raise ValueError(f"{where} has the format {_shown(stored)}, but only pack-quantized is read: {ANOTHER}")
    for field in ("input_activations", "output_activations"):
        if group.get(field):
            raise ValueError(f"{where} has {field}, but activations are not quantized here: {ANOTHER}")
    size = weights.get("group_size")
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    for field, value, known in (
        ("type", weights.get("type", "int"), ("int",)),
        ("num_bits", weights.get("num_bits", 8), BITS),
        ("strategy", strategy, ("group", "channel")),
        ("symmetric", weights.get("symmetric", True), (True, False)),
        ("dynamic", weights.get("dynamic", False), (False,)),
    ):
        if isinstance(value, bool) != isinstance(known[0], bool) or value not in known:
            taken = " or ".join(map(_shown, known))
            raise ValueError(f"{where} has {field} {_shown(value)}, but must have {taken} to be read: {ANOTHER}")
    if strategy == "group" and (type(size) is not int or size < 1):
        raise ValueError(
            f"{where} has group_size {_shown(size)}, which is not a number of columns: copy config.json again"
        )
    if strategy == "channel" and size not in (None, -1):
        raise ValueError(
            f"{where} has group_size {_shown(size)} and strategy channel, which compressed-tensors refuses: take the "
            "wrong one out"
        )
    targets = group.get("targets")
    if not isinstance(targets, list) or not all(map(_is_target, targets)):
        raise ValueError(
            f"{where} has targets {_shown(targets)}, which is not a list of names and patterns: copy config.json again"
        )
    return Scheme(
        targets=tuple(targets),
        bits=weights.get("num_bits", 8),
        group=size if strategy == "group" else -1,
        symmetric=weights.get("symmetric", True),
        scattered=weights.get("actorder") in (True, "group"),  # true is an older form of "group"
    )


def _is_target(target: object) -> bool:
    if not isinstance(target, str):
        return False
    try:
        re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
    except re.error:
        return False
    return True


def _shown(value: object) -> str:
    return json.dumps(value, default=str)[:60]
