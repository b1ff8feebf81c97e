"""Loads an artifact's methods, after choosing the host that runs them: ExecuTorch's runtime or PyTorch itself."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

from eagle3.runner.artifact.cuda_library import CUDA_BACKEND
from eagle3.runner.artifact.cuda_weights import WEIGHTS_FILE
from eagle3.runner.artifact.opening import Artifact
from eagle3.runner.contract import RUNTIMES
from eagle3.runner.hosts.executorch_host import ExecuTorchSession, load_llm_ops, load_runtime
from eagle3.runner.hosts.one_host import check_only_host
from eagle3.runner.hosts.packed_file import PackedFile, packed_weights_shared
from eagle3.runner.hosts.session import Session
from eagle3.runner.system.command import calm_stderr, verbose_note

EXECUTORCH, TORCH, AUTO = RUNTIMES
DELEGATES = {"mlx": "MLXBackend"}
"""Maps the name of a backend to the delegate that not every build of ExecuTorch has."""
CUDA_NEEDS = (
    "it needs an NVIDIA GPU with memory free and an ExecuTorch that reads its weight tables; --verbose shows its own "
    "reason, --runtime torch runs it without ExecuTorch"
)
"""Advice after a failed load. It names every cause, since ExecuTorch's error codes do not tell a GPU without free
memory from a CUDA build of another version."""


def open_session(
    artifact: Artifact,
    runtime: str = AUTO,
    cuda_graph: str = AUTO,
    lazily: bool = False,
    packed_weights: Path | None = None,
) -> Session:
    """Load the methods.

    Args:
        runtime: one of RUNTIMES
        cuda_graph: one of CUDA_GRAPHS
        lazily: load each method of an artifact for the CPU at its first call, which then raises the errors of loading
        packed_weights: the folder for files of packed weights (``packed_file.py``); only artifacts for the CPU use it

    Raises FileNotFoundError or ValueError if a file is missing or ends early, if the artifact needs something that this
    machine or the runtime lacks, or if the runtime does not run such artifacts.
    """
    host = choose_runtime(artifact, runtime)
    if artifact.is_cuda:
        verbose_note(f"{artifact.folder} holds native code for NVIDIA GPUs, which is loaded now with your rights")
    if host == TORCH:
        with calm_stderr():  # only CUDA artifacts need Inductor, whose import takes seconds
            from eagle3.runner.hosts.torch_host import open_torch_session

            return open_torch_session(artifact.model, _weights(artifact), artifact.metadata, cuda_graph == AUTO)
    if artifact.is_cuda:
        with _loading(artifact, nullcontext):
            check_only_host(torch=False)
            program = load_runtime().load_program(artifact.model, data_path=_weights(artifact))
            return ExecuTorchSession(program, artifact.metadata)
    sharing: Callable[[], AbstractContextManager[object]] = packed_weights_shared
    delegated = artifact.metadata.manifest.get("backend") in DELEGATES
    if delegated:  # such a program has neither LLM ops nor packed weights
        sharing = nullcontext
    elif packed_weights is not None:
        load_runtime()
        sharing = PackedFile(artifact.model, packed_weights).in_use
    with _loading(artifact, nullcontext):
        if not delegated:
            load_llm_ops(load_runtime())
        program = load_runtime().load_program(artifact.model)
    return ExecuTorchSession(program, artifact.metadata, loading=partial(_loading, artifact, sharing), lazily=lazily)


@contextmanager
def _loading(artifact: Artifact, sharing: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Load a program or a method within a context that ``sharing`` makes. Raises ValueError if it does not load."""
    with calm_stderr():
        try:
            with sharing():
                yield
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            advice = CUDA_NEEDS if artifact.is_cuda else "export it again"
            raise ValueError(f"{artifact.model}: a method does not load ({reason}): {advice}") from error


def _weights(artifact: Artifact) -> Path:
    """Return the file of a CUDA artifact's weights. Raises FileNotFoundError."""
    stored = artifact.folder / WEIGHTS_FILE
    if not stored.is_file():
        raise FileNotFoundError(f"{stored} is missing: it holds the artifact's weights, copy or export it again")
    return stored


def choose_runtime(artifact: Artifact, asked: str) -> str:
    """Return EXECUTORCH or TORCH. ExecuTorch is preferred if it registers the artifact's backend.

    Raises ValueError for a runtime that cannot run such an artifact.
    """
    if not artifact.is_cuda:
        made_for = artifact.metadata.manifest.get("backend")
        if asked == TORCH:
            raise ValueError(
                f"--runtime torch runs CUDA artifacts, {artifact.model} is for {made_for}: leave --runtime out"
            )
        if made_for in DELEGATES and not has_delegate(made_for):
            raise ValueError(
                f"{artifact.model} is for {made_for}, and this ExecuTorch has no {DELEGATES[made_for]}: run it on a "
                "Mac with Apple silicon, whose build of ExecuTorch has it"
            )
        return EXECUTORCH
    if asked == TORCH:
        return TORCH
    registry = load_runtime().backend_registry
    registered = registry.is_available(CUDA_BACKEND)
    if asked == EXECUTORCH and not registered:
        has = ", ".join(sorted(registry.registered_backend_names))
        raise ValueError(
            f"{artifact.model} needs {CUDA_BACKEND}, this ExecuTorch has {has}: type --runtime torch, or install "
            "ExecuTorch's CUDA build"
        )
    return EXECUTORCH if registered else TORCH


def has_delegate(backend: str) -> bool:
    """Return True if this ExecuTorch registers the delegate of ``backend``, a key of ``DELEGATES``."""
    return load_runtime().backend_registry.is_available(DELEGATES[backend])
