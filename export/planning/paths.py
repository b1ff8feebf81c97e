"""Finds the folders and files of both checkpoints.

The command imports this module before it checks the output folder, when it should not wait for torch. So modules that
read checkpoints are imported in the functions that need them.
"""

import json
from contextlib import suppress
from pathlib import Path

from eagle3.export.configuration.config import NO_HEAD, OWN_LAYER, ExportConfig
from eagle3.runner.system.command import closest
from eagle3.targets import TARGETS, TargetSpec


def target_paths(config: ExportConfig, spec: TargetSpec) -> tuple[Path, Path]:
    """Return the path of the target's weights, and the folder with its configuration and tokenizer."""
    path, folder = config.checkpoint or spec.checkpoint, config.config_folder
    if path is None or not _is_gguf(path):
        if folder is not None:
            raise ValueError(
                f"--config {folder} is for a GGUF file, and this checkpoint has its own configuration: leave it out"
            )
        path = _folder(path, config.target_model, "--checkpoint")
        return path, path
    if not path.is_file():
        raise FileNotFoundError(
            f"--checkpoint {path} is not there: type a GGUF file on this machine, or ORG/NAME:{path.name} of the "
            "Hugging Face hub"
        )
    folder = folder or path.parent
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder} has no config.json, and {path.name} needs one and a tokenizer: type --config FOLDER or "
            "ORG/NAME with the Hugging Face folder of the model that the file was made from"
        )
    return path, folder


def draft_folder(config: ExportConfig) -> Path:
    """Return the folder of the draft head. Raises ValueError or FileNotFoundError if there is none."""
    path = config.draft or TARGETS[config.target_model].draft
    if path is not None and _is_gguf(path):
        from eagle3.export.draft.other_heads import GGUF_HEAD

        raise ValueError(f"--draft {path}: {GGUF_HEAD}")
    return _folder(path, config.target_model, "--draft")


def uses_own_layer(config: ExportConfig) -> bool:
    """Return True if the draft head is the MTP layer in the target's checkpoint: with ``--draft mtp``, or without
    ``--draft`` if the folder has such a layer and no head is listed for the target."""
    if config.draft is not None:
        return config.draft == Path(OWN_LAYER)
    spec = TARGETS[config.target_model]
    if spec.draft is not None or spec.heads or config.checkpoint is None or not config.checkpoint.is_dir():
        return False
    from eagle3.export.draft.kinds.mtp.own_layer import has_own_layer

    return has_own_layer(config.checkpoint)


def check_context(asked: int, most: float) -> None:
    """Raise ValueError for a context of more tokens than the target's."""
    if asked > most:
        raise ValueError(
            f"--max-seq-len {asked} is past the target's max_position_embeddings {most}: type --max-seq-len {most} or "
            "less"
        )


def written_context(checkpoint: Path) -> float:
    """Return the largest ``max_position_embeddings`` that a checkpoint's config.json has for the whole model or a part;
    infinity if it has none. transformers may read a smaller one."""
    with suppress(OSError, ValueError, AttributeError):
        fields = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        parts = [fields, *(value for value in fields.values() if isinstance(value, dict))]
        found = [part.get("max_position_embeddings") for part in parts]
        return max((length for length in found if type(length) is int), default=float("inf"))
    return float("inf")


def _is_gguf(path: Path) -> bool:
    """Return what ``GGUFFile.recognizes`` returns; its module imports torch."""
    return path.suffix.lower() == ".gguf" and not path.is_dir()


def _folder(path: Path | None, target: str, flag: str) -> Path:
    if path is None:
        raise ValueError(f"{target} does not ship with its weights: type {flag} FOLDER or ORG/NAME")
    if not path.is_dir():
        hint = closest(str(path), _heads(target)) if flag == "--draft" else ""
        raise FileNotFoundError(
            f"{flag} {path} is not a folder: type a checkpoint folder on this machine, or ORG/NAME[@REVISION] of the "
            f"Hugging Face hub{hint and '.' + hint}"
        )
    return path


def _heads(target: str) -> list[str]:
    """Return the names that may be typed after ``--draft``, apart from folders and numbers."""
    spec = TARGETS[target]
    return [*(path.name for path in spec.drafts), *(head.partition("/")[2] for head in spec.heads), OWN_LAYER, NO_HEAD]
