"""Open an artifact: find its files, check that it is one, load its methods."""

import json
from dataclasses import dataclass
from pathlib import Path

from eagle3.runner.contract import METHODS, MODEL_FILE, Metadata
from eagle3.runner.contract.console import calm_stderr
from eagle3.runner.runtime import load_runtime
from eagle3.runner.session import ExecuTorchSession


@dataclass(frozen=True)
class Artifact:
    """An opened artifact. ``program`` is ``executorch.runtime``'s; methods load when a session is made."""

    folder: Path
    model: Path
    program: object
    metadata: Metadata

    @property
    def tokenizer_file(self) -> Path:
        return self.folder / "tokenizer.json"


def find_model(path: Path) -> Path:
    """The ``model.pte`` of an artifact's folder, or the file itself. Raises FileNotFoundError."""
    model = path / MODEL_FILE if path.is_dir() else path
    if not model.is_file():
        raise FileNotFoundError(
            f"{model} is missing: ARTIFACT is a folder that eagle3-export made, or its {MODEL_FILE}"
        )
    return model


def open_artifact(path: Path) -> Artifact:
    """Raises FileNotFoundError, ValueError for a damaged or foreign file, MissingMetadata for a foreign program."""
    model = find_model(path)
    with model.open("rb") as file:
        head = file.read(8)
    if head[4:6] != b"ET":
        raise ValueError(f"{model} is no ExecuTorch program (no ET identifier in its header): damaged or another file")
    runtime = load_runtime()
    with calm_stderr():
        try:
            program = runtime.load_program(model)
            metadata = Metadata.read(program.method_names, lambda name: program.load_method(name).execute(()))
        except (RuntimeError, json.JSONDecodeError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{model} is damaged or of another ExecuTorch ({reason}): export it again") from error
    missing = [name for name in METHODS if name not in program.method_names]
    if missing:
        raise ValueError(f"{model} has no method {missing[0]}: export it again")
    return Artifact(model.parent, model, program, metadata)


def open_session(artifact: Artifact) -> ExecuTorchSession:
    """Load the methods. Raises ValueError where the file ends early or needs what this runtime lacks."""
    with calm_stderr():
        try:
            return ExecuTorchSession(artifact.program, artifact.metadata)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{artifact.model}: a method does not load ({reason}): export it again") from error
