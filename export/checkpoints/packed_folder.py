"""Reads a folder of safetensors whose config.json says that a tool quantized it (``quantization_config``). The parts of
each packed linear are joined into one weight with the same codes."""

import json
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from eagle3.export.checkpoints.awq import Awq
from eagle3.export.checkpoints.compressed_tensors import CompressedTensors
from eagle3.export.checkpoints.gptq import Gptq
from eagle3.export.checkpoints.json_fields import Fields, read_object
from eagle3.export.checkpoints.packed import ANOTHER, Format, PackedLinear, Read
from eagle3.export.checkpoints.safetensors_folder import SafetensorsFolder
from eagle3.export.checkpoints.source import TensorHeader
from eagle3.targets.input_order import INPUT_ORDER


def auto_round(file: Path, config: dict[str, Any]) -> Format:
    """Return the format that AutoRound used: ``packing_format`` names GPTQ's or AWQ's layout, and GPTQ's is the default
    (vLLM's ``INCConfig``). ``extra_config`` overrides the bits of single linears."""
    fields, packed_as = Fields(file, config, "quantization_config"), config.get("packing_format") or AUTO_GPTQ
    where = fields.where
    if packed_as not in (AUTO_GPTQ, "auto_round:gptq", AUTO_AWQ):
        raise ValueError(
            f"{where} has packing_format {packed_as}, but only {AUTO_GPTQ} and {AUTO_AWQ} are read: {ANOTHER}"
        )
    backend = str(config.get("backend") or "")
    if "awq" in backend and packed_as != AUTO_AWQ:
        raise ValueError(
            f"{where} has packing_format {packed_as} and backend {backend}, which are of different formats: take the "
            "wrong one out"
        )
    if config.get("data_type") not in (None, "int"):
        raise ValueError(f"{where} has data_type {config['data_type']}, but only int is read: {ANOTHER}")
    if packed_as == AUTO_AWQ:
        symmetric = fields.boolean("sym")
        given = {key: config.get(key) for key in ("bits", "group_size")}
        return Awq(file, given | {"zero_point": None if symmetric is None else not symmetric})
    single = fields.nested("extra_config").items()
    # 16 bits mean that the linear is not packed
    packed = {name: each for name, each in single if isinstance(each, dict) and each.get("bits", 16) < 16}
    return Gptq(file, config | {"dynamic": packed})


AUTO_GPTQ, AUTO_AWQ = "auto_round:auto_gptq", "auto_round:auto_awq"
FORMATS: dict[str, Callable[[Path, dict[str, Any]], Format]] = {
    "compressed-tensors": CompressedTensors,
    "gptq": Gptq,
    "awq": Awq,
    "auto-round": auto_round,
}
"""Maps ``quant_method`` to the format, with the names of transformers' ``QuantizationMethod``."""
NEW_KEY, OLD_KEY = "quantization_config", "compression_config"
"""The keys of config.json that describe packed weights. compressed-tensors wrote the second until it became part of
transformers, and reads both."""
MLX = "quantization"
"""The key under which MLX describes its own packing. MLX writes ``quantization_config`` beside it, without a method."""


class PackedFolder(SafetensorsFolder):
    def __init__(self, path: Path):
        super().__init__(path)
        file, (key, config) = path / "config.json", described(path) or (NEW_KEY, {})
        method = config.get("quant_method")
        if method is None and MLX in read_object(file):
            raise ValueError(f"{file} has {MLX} {json.dumps(config)[:60]}, MLX's packing, which is not read: {ANOTHER}")
        if not isinstance(method, str) or method not in FORMATS:
            raise ValueError(f"{file}: {key} has quant_method {method}, which is not read: {ANOTHER}")
        try:
            self.format = FORMATS[method](file, config)
        except ValueError as error:
            raise ValueError(str(error).replace(NEW_KEY, key)) from error

    @staticmethod
    def recognizes(path: Path) -> bool:
        return described(path) is not None

    def headers(self) -> dict[str, TensorHeader]:
        joined = dict(self._raw)
        for linear, layout in self._layouts.items():
            parts = [joined.pop(f"{linear}.{part}") for part in self._parts[linear]]
            stored = sum(part.bytes for part in parts)
            joined[f"{linear}.weight"] = TensorHeader(
                (layout.rows, layout.columns), layout.tensor_class, stored, quantized=True, group=layout.group
            )
            if layout.order is not None:
                joined[f"{linear}.{INPUT_ORDER}"] = TensorHeader(layout.order.shape, INPUT_ORDER, layout.order.nbytes)
        return joined

    def some(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        first = self.format.REQUIRED[0]
        with self._opened() as read:
            for name in self._raw:
                linear, _, part = name.rpartition(".")
                if linear not in self._parts or part not in self._parts[linear]:
                    if wanted(name):
                        yield name, read(name)
                elif part == first and wanted(f"{linear}.weight"):
                    layout = self._layouts[linear]
                    if layout.order is not None:
                        yield f"{linear}.{INPUT_ORDER}", layout.order
                    yield f"{linear}.weight", self.format.unpack(linear, layout, _parts_of(linear, read))

    @cached_property
    def _parts(self) -> dict[str, tuple[str, ...]]:
        """Map each packed linear to the parts that it has. Raises ValueError if a part is missing."""
        found: dict[str, list[str]] = {}
        for name in self._raw:
            linear, _, part = name.rpartition(".")
            if part in (*self.format.REQUIRED, *self.format.OPTIONAL):
                found.setdefault(linear, []).append(part)
        for linear, parts in found.items():
            missing = [part for part in self.format.REQUIRED if part not in parts]
            if missing:
                raise ValueError(
                    f"{self.path} has {linear}.{parts[0]}, but its part {linear}.{missing[0]} is not there: is a shard "
                    "missing?"
                )
            if f"{linear}.weight" in self._raw:
                raise ValueError(f"{self.path} has {linear}.weight and {linear}.{parts[0]}: which one is meant?")
        return {linear: tuple(parts) for linear, parts in found.items()}

    @cached_property
    def _layouts(self) -> dict[str, PackedLinear]:
        with self._opened() as read:
            try:
                return {
                    linear: self.format.layout(
                        linear, {part: self._raw[f"{linear}.{part}"] for part in parts}, _parts_of(linear, read)
                    )
                    for linear, parts in self._parts.items()
                }
            except ValueError as error:
                raise ValueError(f"{self.path}: {error}") from error


def _parts_of(linear: str, read: Read) -> Read:
    return lambda part: read(f"{linear}.{part}")


def described(path: Path) -> tuple[str, dict[str, Any]] | None:
    """Return the key under which config.json, at its top level or in its text part, describes the quantization, and
    that description; None if there is none. Raises ValueError for two descriptions that differ."""
    if not (path / "config.json").is_file():
        return None
    fields = read_object(path / "config.json")
    found = []
    for part in (fields, fields.get("text_config")):
        for key in (NEW_KEY, OLD_KEY, MLX):
            said = part.get(key) if isinstance(part, dict) else None
            if said is not None and (key != MLX or (isinstance(said, dict) and "bits" in said)):
                found.append((key, said if isinstance(said, dict) else {"quant_method": said}))
    own = [each for each in found if each[0] != MLX]
    if any(said != own[0][1] for _, said in own):
        names = " and ".join(dict.fromkeys(key for key, _ in own))
        raise ValueError(
            f"{path / 'config.json'} describes its weights twice and differently ({names}, at the top and in "
            "text_config): take the wrong one out"
        )
    return found[0] if found else None
