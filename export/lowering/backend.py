"""The interface of a backend in an export. ``configuration/backends.py`` lists the backends."""

import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from eagle3.export.configuration.backends import BACKENDS
from eagle3.runner.contract import MODEL_FILE

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from executorch.exir import ExecutorchProgramManager
    from torch import Tensor
    from torch.export import ExportedProgram

    from eagle3.export.output.contents import Writable
    from eagle3.export.planning.memory import GpuMemory
    from eagle3.export.planning.plan import Plan
    from eagle3.export.speculator.speculator import Eagle3Speculator
    from eagle3.export.speculator.state import RowAccess
    from eagle3.runner.artifact.opening import Artifact
    from eagle3.targets.attention import AttentionFactory


class WeightConversion(Protocol):
    """Converts the target's tensors, each as it is read."""

    def __call__(self, name: str, value: "Tensor", /) -> "Tensor":
        """Return the tensor that the model holds in place of ``value``."""

    def record(self) -> dict[str, Any]:
        """Return the manifest's entry on the conversion, after all tensors have been read."""


@dataclass(frozen=True)
class StandIn:
    """Computes artifacts on a machine that lacks the runtime for them."""

    methods: str
    """The argument ``--methods`` of ``eagle3.runner.loop.smoke_run``, for methods that compute in float32."""
    compare: "Callable[[Artifact, Eagle3Speculator], float]"
    """Returns the largest difference of an artifact's outputs from those of the eager module, in standard deviations.
    Raises ValueError if it is more than rounding."""


class Backend(Protocol):
    """The interface through which an export uses a backend, in the order of the calls."""

    dtype: "torch.dtype"
    """The dtype of activations and caches."""
    eager_on_host: bool
    """True if the prepared module runs eagerly on this machine, which the check of the artifact needs."""

    @property
    def attention(self) -> "AttentionFactory":
        """Return the factory of the attention modules of both models' layers."""

    def check(self, plan: "Plan") -> None:
        """Raise ValueError or FileNotFoundError for a plan that cannot be lowered here, before any weight is read."""

    def memory(self, plan: "Plan", /) -> tuple[int, str]:
        """Return the bytes of memory of the GPU that will run the artifact, or of this machine, and its name."""

    def footprint(self, plan: "Plan", /) -> "GpuMemory | None":
        """Return the GPU memory that a run takes; None for a CPU, where weights are mapped."""

    def suggest_flags(self, plan: "Plan", has: int, /) -> str | None:
        """Return flags with which a run takes no more than ``has`` bytes; None if there are none."""

    def export_bytes(self, plan: "Plan", /) -> int | None:
        """Return the memory that the export takes on this machine in addition to ``held_bytes``; None if weights stay
        mapped."""

    def held_bytes(self, plan: "Plan", /) -> int:
        """Return the bytes of the target's prepared weights, which may lie in files instead of memory."""

    def artifact_bytes(self, plan: "Plan", /) -> int | None:
        """Return the bytes of ``model.pte`` with its weights, which a run on a CPU keeps in memory; None for a GPU."""

    def export_seconds(self, plan: "Plan", /) -> float | None:
        """Return a guess of the seconds of an export on a machine with a ``slowness`` of 1; None if there is none."""

    def conversion(self, plan: "Plan") -> WeightConversion: ...

    def prepare(self, speculator: "Eagle3Speculator", plan: "Plan") -> None:
        """Rewrite the draft head's weights in place, once they are loaded."""

    def pack(self, speculator: "Eagle3Speculator", plan: "Plan", folder: "Path", /) -> dict[str, Any]:
        """Rearrange merged weights in place, large ones in files on the disk of ``folder``. Return the manifest's entry
        on their layouts."""

    def tracing(self, speculator: "Eagle3Speculator", plan: "Plan", /) -> AbstractContextManager[None]:
        """Return the context in which each method is traced."""

    def state_access(self) -> "RowAccess | None":
        """Return the functions with which ``read_state`` and ``write_state`` read and write rows of a buffer; None if
        there are no such methods for this backend (``BackendEntry.sessions``)."""

    def exact_activations(self, speculator: "Eagle3Speculator", /) -> AbstractContextManager[object]:
        """Return a context in which the prepared module neither quantizes nor rounds activations, with empty caches if
        it would round them; used only if ``eager_on_host``."""

    def runs_here(self) -> bool:
        """Return True if this machine can run the artifacts, or stand in for a machine that can."""

    def stand_in(self) -> "StandIn | None":
        """Return what computes artifacts here in place of their runtime; None if this machine can run them."""

    def describe(self, programs: "Mapping[str, ExportedProgram]", plan: "Plan", /) -> dict[str, Any]:
        """Return the manifest's entry on the kernels. Raises ValueError for a graph that must not be lowered."""

    def lower(
        self, programs: "Mapping[str, ExportedProgram]", constant_methods: Mapping[str, Any], plan: "Plan", /
    ) -> "tuple[dict[str, Writable], dict[str, Any]]":
        """Lower the traced methods. Return the program's files by name, and entries for ``export.json`` about the
        compiled code."""


def files_of(program: "ExecutorchProgramManager") -> "dict[str, Writable]":
    """Return ``model.pte``, and the files with tensor data that lie beside it, by name."""
    beside = program._tensor_data.items()
    return {MODEL_FILE: program} | {name if name.endswith(".ptd") else f"{name}.ptd": data for name, data in beside}


class OnThisMachine:
    """The part of a backend whose artifacts run in the memory of a machine such as this one, with weights as they are
    loaded."""

    def memory(self, _plan: "Plan", /) -> tuple[int, str]:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine"

    def footprint(self, _plan: "Plan", /) -> None:
        return None

    def suggest_flags(self, _plan: "Plan", _has: int, /) -> None:
        return None

    def pack(self, _speculator: "Eagle3Speculator", _plan: "Plan", _folder: "Path", /) -> dict[str, Any]:
        return {}


def load_backend(name: str) -> Backend:
    """Import and return a backend. Raises ValueError for a package that is not installed."""
    entry = BACKENDS[name]
    for package in entry.packages:
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"--backend {name} needs {package}: type pip install 'eagle3-export[{name}]'")
    return cast(Backend, importlib.import_module(entry.module).BACKEND)
