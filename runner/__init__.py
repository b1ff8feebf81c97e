"""Runs an artifact of eagle3-export in three lines::

    from eagle3.runner import load

    model = load("out")
    print(model.generate("def main(", temperature=0.7).text)

``Options`` lists the options of ``generate``. A ``Conversation`` keeps the turns of a dialogue in the KV cache. All
other names in this package may change.
"""

import importlib
import importlib.metadata
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.runner.system.cpu_features import check_cpu_features
from eagle3.runner.system.machine import leave_threads_to_xnnpack

if TYPE_CHECKING:
    from eagle3.runner.conversation import Conversation
    from eagle3.runner.model import BusyError, Model, Result
    from eagle3.runner.options import Options

    __version__: str

__all__ = ["BusyError", "Conversation", "Model", "Options", "Result", "load"]

_MODULES = {"BusyError": "model", "Conversation": "conversation", "Model": "model", "Options": "options"}
_MODULES |= {"Result": "model"}


def __getattr__(name: str) -> object:
    """Import a class, and torch with it, when it is first used. Importing this package alone takes no time."""
    if name == "__version__":
        return importlib.metadata.version("eagle3-export")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    leave_threads_to_xnnpack()
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def load(
    path: str | Path,
    runtime: str = "auto",
    verify: bool = False,
    defer: bool = False,
    cuda_graph: str = "auto",
    packed_weights: str | Path | None = None,
) -> "Model":
    """Open an artifact and load its methods.

    Import torch after this call, or set ``OMP_NUM_THREADS=1``. XNNPACK has threads of its own, and torch's threads in
    addition halve the speed.

    Args:
        path: the artifact's folder or its ``model.pte``
        runtime: "executorch", "torch" (CUDA artifacts alone) or "auto"
        verify: read every file first, however large, and compare it with ``export.json``
        defer: load a method when it is first needed, so that a prompt that does not fit is refused before
        packed_weights: a folder for files of packed weights, which make later starts on the CPU fast
        cuda_graph: "auto" replays rounds as CUDA graphs if PyTorch runs the methods on a GPU, "off" never does

    Raises:
        FileNotFoundError: there is no artifact at ``path``, or one of its files is missing
        ValueError: a file is damaged or was not made by eagle3-export; this machine or ``runtime`` cannot run it
    """
    check_cpu_features()
    if "torch" in sys.modules and "OMP_NUM_THREADS" not in os.environ:
        warnings.warn(
            "torch was imported before eagle3.runner.load: set OMP_NUM_THREADS=1 before, or load first; its threads "
            "and XNNPACK's halve the speed",
            stacklevel=2,
        )
    leave_threads_to_xnnpack()

    from eagle3.runner.artifact.opening import open_artifact
    from eagle3.runner.system.command import tell

    artifact = open_artifact(Path(path), verify, say=tell)

    from eagle3.runner.artifact.record import model_sha256
    from eagle3.runner.hosts.opening import open_session
    from eagle3.runner.model import Model

    packed = None if packed_weights is None else Path(packed_weights)
    model = Model(
        artifact.metadata,
        lambda: open_session(artifact, runtime, cuda_graph, defer, packed),
        artifact.folder,
        lambda: model_sha256(artifact.model),
    )
    if not defer:
        _ = model.session
    return model
