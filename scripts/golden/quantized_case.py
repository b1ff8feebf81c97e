"""Writes a case of a quantized linear, for ``make_quantized_golden.py`` and ``make_float_golden.py``."""

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def save(folder: Path, config: dict, parts: dict[str, Tensor], dense: Tensor) -> None:
    """Write a checkpoint of one linear with its quantization_config, and its weight as the tool dequantizes it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}, indent=2) + "\n")
    save_file({f"model.proj.{part}": value.contiguous() for part, value in parts.items()}, folder / "model.safetensors")
    save_file({"model.proj.weight": dense.contiguous()}, folder / "dense.safetensors")
