"""Saves a golden case: a checkpoint, and the tensors that the reference implementation made with it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def save_case(
    folder: Path, save: Callable[[Path], object], tensors: dict[str, Tensor], made_with: str, shown: str
) -> None:
    """Replace ``folder`` by a checkpoint, which ``save`` writes, and golden.safetensors; print the tensor named
    ``shown``. Source that a trainer copies beside its checkpoints and a generation_config.json are removed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    save(folder)
    for name in ("config.py", "generation_config.json"):
        (folder / name).unlink(missing_ok=True)
    tensors = {key: value.contiguous() for key, value in tensors.items()}
    save_file(tensors, folder / "golden.safetensors", {"made_with": made_with})
    print(folder.name, shown, tensors[shown].tolist())


def save_linear(folder: Path, config: dict, parts: dict[str, Tensor], dense: Tensor) -> None:
    """Write a checkpoint of one linear with its quantization_config, and its weight as the tool dequantizes it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}, indent=2) + "\n")
    save_file({f"model.proj.{part}": value.contiguous() for part, value in parts.items()}, folder / "model.safetensors")
    save_file({"model.proj.weight": dense.contiguous()}, folder / "dense.safetensors")
