"""Opens an artifact: finds its files, checks that they are undamaged, reads its metadata. Executes nothing."""

import json
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from eagle3.runner.artifact.pte import read_constants
from eagle3.runner.artifact.record import compare, silent
from eagle3.runner.contract import DRAFT_DECODE, HOST_MODEL_FILE, METHODS, MODEL_FILE, Metadata


@dataclass(frozen=True)
class Artifact:
    """An opened artifact. Its methods are loaded when a session is opened (``hosts/opening.py``). ``checked`` is True
    if its files were compared with its ``export.json``, False if there is no such file."""

    folder: Path
    model: Path
    metadata: Metadata
    checked: bool

    @property
    def tokenizer_file(self) -> Path:
        return self.folder / "tokenizer.json"

    @property
    def is_cuda(self) -> bool:
        return self.metadata.manifest.get("backend") == "cuda"


def find_model(path: Path) -> Path:
    """Return the program of an artifact's folder, or the file itself: ``model.pte``, unless there is one for this
    processor.

    Raises FileNotFoundError, and ValueError for a file that is no ExecuTorch program.
    """
    own = path / HOST_MODEL_FILE.format(platform.machine())
    model = (own if own.is_file() else path / MODEL_FILE) if path.is_dir() else path
    if not model.is_file():
        raise FileNotFoundError(
            f"{model} is missing: ARTIFACT is a folder that eagle3-export made, or its {MODEL_FILE}"
        )
    with model.open("rb") as file:
        head = file.read(8)
    if head[4:6] != b"ET" or not head[6:].isdigit():  # the runtime aborts unless digits follow "ET"
        raise ValueError(
            f"{model} is no ExecuTorch program (no ET identifier in its header): damaged or another file, copy or "
            "export it again"
        )
    return model


def open_artifact(path: Path, verify: bool = False, say: Callable[[str], None] = silent) -> Artifact:
    """Open an artifact's folder or its ``model.pte``, after comparing its files with ``export.json`` (``record.py``).

    Args:
        verify: read and hash every file, however large
        say: called with a line for the user before anything is loaded: there is no record, or a file is being verified

    Raises:
        FileNotFoundError: no ``model.pte``
        ValueError: a damaged file, a file or record that eagle3-export did not write, nothing to verify against
        MissingMetadata: a program that eagle3-export did not write
    """
    model = find_model(path)
    comparison = compare(model, verify, say)
    comparison.refuse_faults()
    return load_artifact(model, comparison.recorded)


def load_artifact(model: Path, checked: bool) -> Artifact:
    """Read the metadata of a program. Raises the errors of ``open_artifact``."""
    constants, methods = read_constants(model)
    try:
        metadata = Metadata.read(set(constants), constants.__getitem__)
    except json.JSONDecodeError as error:
        raise ValueError(f"{model} is damaged (its manifest is no JSON: {error}): export it again") from error
    needed = [metadata.method_for(name) for name in METHODS if metadata.has_draft or name != DRAFT_DECODE]
    missing = [name for name in needed if name not in methods]
    if missing:
        raise ValueError(f"{model} has no method {missing[0]}: export it again")
    return Artifact(model.parent, model, metadata, checked)
