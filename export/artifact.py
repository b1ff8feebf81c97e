"""What an artifact holds beside its program: the tokenizer's files and ``export.json``, the record of its making."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from eagle3.runner.contract import EXPORT_RECORD, MODEL_FILE
from eagle3.runner.contract.versions import version_of

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
PACKAGES = ("eagle3-export", "torch", "executorch", "torchao", "transformers", "safetensors")


def copy_tokenizer(checkpoint: Path, folder: Path) -> list[str]:
    """Copy the tokenizer's files that the checkpoint has; returns their names."""
    names = [name for name in TOKENIZER_FILES if (checkpoint / name).is_file()]
    for name in names:
        shutil.copyfile(checkpoint / name, folder / name)
    return names


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def package_versions() -> dict[str, str]:
    return {name: version_of(name) for name in PACKAGES}


def program_digest(model: Path) -> dict[str, Any]:
    """``{"program": {"bytes", "sha256"}}`` of the program at the head of a ``.pte``, up to its first segment: what a
    runner can check of a file of any size at once. Empty for a file without ExecuTorch's extended header."""
    from executorch.exir._serialize._program import _ExtendedHeader, _get_extended_header

    with model.open("rb") as file:
        header = _get_extended_header(file.read(_ExtendedHeader.NUM_HEAD_BYTES))
        if header is None:
            return {}
        file.seek(0)
        program = file.read(header.program_size)
    return {"program": {"bytes": len(program), "sha256": hashlib.sha256(program).hexdigest()}}


def write_record(folder: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Write ``export.json``, the record with size and sha256 of every other file, and return what it holds."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.iterdir())
        if path.name != EXPORT_RECORD
    }
    if MODEL_FILE in files:
        files[MODEL_FILE] |= program_digest(folder / MODEL_FILE)
    record = record | {"files": files}
    (folder / EXPORT_RECORD).write_text(json.dumps(record, indent=2) + "\n")
    return record
