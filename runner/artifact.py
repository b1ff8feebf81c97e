"""Open an artifact: find its files, check that it is one and undamaged, choose what runs it, load its methods."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from eagle3.runner.contract import METHODS, MODEL_FILE, RUNTIMES, Metadata
from eagle3.runner.contract.console import calm_stderr
from eagle3.runner.hosts.executorch_host import ExecuTorchSession, load_llm_ops, load_runtime
from eagle3.runner.hosts.xnnpack_options import packed_weights_shared
from eagle3.runner.inspect.cuda_weights import WEIGHTS_FILE
from eagle3.runner.inspect.program import CUDA_BACKEND
from eagle3.runner.record import compare, silent
from eagle3.runner.session import Session

EXECUTORCH, TORCH, AUTO = RUNTIMES


@dataclass(frozen=True)
class Artifact:
    """An opened artifact. ``program`` is ``executorch.runtime``'s; methods load when a session is made. ``checked``:
    its files were compared with its ``export.json``; a ``model.pte`` alone has none."""

    folder: Path
    model: Path
    program: object
    metadata: Metadata
    checked: bool

    @property
    def tokenizer_file(self) -> Path:
        return self.folder / "tokenizer.json"


def find_model(path: Path) -> Path:
    """The ``model.pte`` of an artifact's folder, or the file itself.

    Raises FileNotFoundError, and ValueError for a file that is no ExecuTorch program.
    """
    model = path / MODEL_FILE if path.is_dir() else path
    if not model.is_file():
        raise FileNotFoundError(
            f"{model} is missing: ARTIFACT is a folder that eagle3-export made, or its {MODEL_FILE}"
        )
    with model.open("rb") as file:
        head = file.read(8)
    if head[4:6] != b"ET" or not head[6:].isdigit():  # ET12, so far; the runtime aborts over what is no number
        raise ValueError(
            f"{model} is no ExecuTorch program (no ET identifier in its header): damaged or another file, copy or "
            "export it again"
        )
    return model


def open_artifact(path: Path, verify: bool = False, say: Callable[[str], None] = silent) -> Artifact:
    """Open an artifact's folder or its ``model.pte``, once its files are as ``export.json`` says (``record.py``).

    Args:
        verify: read and hash every file, however large
        say: takes a line for the user before anything is loaded: that there is no record, what is being verified

    Raises:
        FileNotFoundError: no ``model.pte``
        ValueError: a damaged or foreign file, a record that is not ours, nothing to verify against
        MissingMetadata: a foreign program
    """
    model = find_model(path)
    comparison = compare(model, verify, say)
    comparison.refuse_faults()
    return load_artifact(model, comparison.recorded)


def load_artifact(model: Path, checked: bool) -> Artifact:
    """Give a program to ExecuTorch, which may end the process over a damaged one. Raises as ``open_artifact``."""
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
    return Artifact(model.parent, model, program, metadata, checked)


def open_session(artifact: Artifact, runtime: str = AUTO, cuda_graph: str = AUTO) -> Session:
    """Load the methods. ``runtime`` is one of RUNTIMES, ``cuda_graph`` one of CUDA_GRAPHS.

    Raises FileNotFoundError or ValueError where a file ends early or is missing, the artifact needs what this machine
    or the runtime lacks, or the runtime does not run such artifacts.
    """
    if choose_runtime(artifact, runtime) == TORCH:
        with calm_stderr():  # reading a program imports ExecuTorch's compiler: seconds, for CUDA artifacts alone
            from eagle3.runner.hosts.torch_host import open_torch_session

            return open_torch_session(artifact.model, _weights(artifact), artifact.metadata, cuda_graph == AUTO)
    with calm_stderr():
        try:
            program = artifact.program
            if is_cuda(artifact):
                program = load_runtime().load_program(artifact.model, data_path=_weights(artifact))
            else:
                load_llm_ops(load_runtime())
            with nullcontext() if is_cuda(artifact) else packed_weights_shared():
                return ExecuTorchSession(program, artifact.metadata)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            advice = "it needs an NVIDIA GPU with memory free" if is_cuda(artifact) else "export it again"
            raise ValueError(f"{artifact.model}: a method does not load ({reason}): {advice}") from error


def _weights(artifact: Artifact) -> Path:
    """The file of a CUDA artifact's weights. Raises FileNotFoundError."""
    stored = artifact.folder / WEIGHTS_FILE
    if not stored.is_file():
        raise FileNotFoundError(f"{stored} is missing: it holds the artifact's weights, copy or export it again")
    return stored


def is_cuda(artifact: Artifact) -> bool:
    return artifact.metadata.manifest.get("backend") == "cuda"


def choose_runtime(artifact: Artifact, asked: str) -> str:
    """EXECUTORCH or TORCH. ExecuTorch goes first where it registers the artifact's backend.

    Raises ValueError for a runtime that cannot run such an artifact.
    """
    if not is_cuda(artifact):
        if asked == TORCH:
            made_for = artifact.metadata.manifest.get("backend")
            raise ValueError(
                f"--runtime torch runs CUDA artifacts, {artifact.model} is for {made_for}: leave --runtime out"
            )
        return EXECUTORCH
    registry = load_runtime().backend_registry
    registered = registry.is_available(CUDA_BACKEND)
    if asked == EXECUTORCH and not registered:
        has = ", ".join(sorted(registry.registered_backend_names))
        raise ValueError(
            f"{artifact.model} needs {CUDA_BACKEND}, this ExecuTorch has {has}: type --runtime torch, or install "
            "ExecuTorch's CUDA build"
        )
    return EXECUTORCH if registered and asked != TORCH else TORCH
