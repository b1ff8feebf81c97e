"""Names the output folder of a command without ``--output-dir``."""

import os
from pathlib import Path

from eagle3.export.backends import BACKENDS
from eagle3.export.hub.names import hub_name


def output_name(target: str, checkpoint: Path | None, backend: str, cuda_arch: str | None) -> Path:
    """Return TARGET-BACKEND-ARCHITECTURE, a folder in the working folder. For ``auto`` it begins with the checkpoint's
    own name."""
    if cuda_arch is None and "cuda_arch" in BACKENDS[backend].flags:
        cuda_arch = BACKENDS[backend].load().local_arch()
    if target == "auto" and checkpoint is not None:
        target = own_name(checkpoint)
    return Path("-".join(filter(None, (target, backend, cuda_arch))))


def own_name(checkpoint: Path) -> str:
    """Return the name of a folder, a GGUF file without its suffix, or a repository on the hub without its owner."""
    name = None if os.path.exists(checkpoint) else hub_name(str(checkpoint))
    if name is not None and name.file is None:
        return name.repository.partition("/")[2]
    path = checkpoint.resolve() if name is None or name.file is None else Path(name.file)
    return path.stem if path.suffix.lower() == ".gguf" else path.name
