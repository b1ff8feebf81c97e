"""The output folder that a command without ``--output-dir`` makes, in the working folder."""

import os
from pathlib import Path

from eagle3.export.backends import BACKENDS
from eagle3.export.hub.names import hub_name
from eagle3.export.planning.config import ExportConfig


def output_name(config: ExportConfig) -> Path:
    """Target, backend and architecture; for ``auto`` the checkpoint's own name is the target's."""
    arch = config.cuda_arch
    if arch is None and "cuda_arch" in BACKENDS[config.backend].flags:
        arch = BACKENDS[config.backend].load().architecture(config)
    target = config.target_model
    if target == "auto" and config.checkpoint is not None:
        target = own_name(config.checkpoint)
    return Path("-".join(filter(None, (target, config.backend, arch))))


def own_name(checkpoint: Path) -> str:
    """Of a folder, a GGUF file, or a repository on the hub."""
    name = None if os.path.exists(checkpoint) else hub_name(str(checkpoint))
    if name is not None and name.file is None:
        return name.repository.partition("/")[2]
    path = checkpoint.resolve() if name is None else Path(name.file)
    return path.stem if path.suffix.lower() == ".gguf" else path.name
