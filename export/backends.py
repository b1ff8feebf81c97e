"""Backends: a record each. A new one is a folder in ``lowering`` with a ``Backend`` and a line in ``BACKENDS``."""

import importlib
import importlib.util
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from eagle3.export.planning.config import CUDA_RECIPES, XNNPACK_RECIPES

if TYPE_CHECKING:
    import torch
    from executorch.exir import ExecutorchProgramManager
    from torch import Tensor
    from torch.export import ExportedProgram

    from eagle3.export.planning.memory import GpuMemory
    from eagle3.export.planning.plan import Plan
    from eagle3.export.speculator import Eagle3Speculator
    from eagle3.targets.attention import AttentionFactory


class WeightConversion(Protocol):
    """What becomes of the target's tensors, each as it is read."""

    def __call__(self, name: str, value: "Tensor", /) -> "Tensor":
        """What the model holds of a tensor."""

    def record(self) -> dict[str, Any]:
        """What the manifest says of it, once all tensors were read."""


class Backend(Protocol):
    """What a backend does for an export, in the order in which it is asked."""

    dtype: "torch.dtype"
    """Of activations and caches."""
    eager_on_host: bool
    """Whether the prepared module runs eagerly on this machine, for the check of the artifact."""

    @property
    def attention(self) -> "AttentionFactory":
        """What the layers of both models attend by."""

    def local_arch(self) -> str | None:
        """The architecture of the GPU at hand, such as "sm_90". None without a GPU, and for backends that use none."""

    def check(self, plan: "Plan") -> None:
        """Raise ValueError or FileNotFoundError for what cannot be lowered here, before any weight is read."""

    def memory(self, plan: "Plan", /) -> tuple[int, str]:
        """Bytes of what will run the artifact, or of this machine, and its name."""

    def footprint(self, plan: "Plan", /) -> "GpuMemory | None":
        """What a run takes of a GPU; None for a CPU, where weights are mapped."""

    def suggest_flags(self, plan: "Plan", has: int, /) -> str | None:
        """Flags with which a run takes no more than ``has`` bytes; None where none do."""

    def export_bytes(self, plan: "Plan", /) -> int | None:
        """What the export takes of this machine's memory; None where weights stay mapped."""

    def conversion(self, plan: "Plan") -> WeightConversion: ...

    def prepare(self, speculator: "Eagle3Speculator", plan: "Plan") -> None:
        """Rewrite the draft head's weights in place, once they are loaded."""

    def tracing(self, speculator: "Eagle3Speculator", plan: "Plan", /) -> AbstractContextManager[None]:
        """A context around each trace."""

    def runs_here(self) -> bool:
        """Whether this machine runs the artifacts."""

    def describe(self, programs: "Mapping[str, ExportedProgram]", plan: "Plan", /) -> dict[str, Any]:
        """What the manifest says of the kernels. Raises ValueError for a graph that must not be."""

    def lower(
        self, programs: "Mapping[str, ExportedProgram]", constant_methods: Mapping[str, Any], plan: "Plan", /
    ) -> "tuple[ExecutorchProgramManager, dict[str, Any]]":
        """The program, and what ``export.json`` says of what was compiled."""


@dataclass(frozen=True)
class BackendEntry:
    """``module`` is imported on use and has the ``BACKEND``: lowering pulls in torch and the delegate's compiler."""

    summary: str
    module: str
    quantizes: bool = False
    """Whether weights are quantized unless a recipe says otherwise, and a quantized checkpoint keeps its codes, which
    the others dequantize as it loads."""
    recipes: tuple[str, ...] = ("none",)
    """What ``--qlinear`` and ``--draft-qlinear`` may name: what there are kernels for."""
    draft_recipe: str = "none"
    """The draft's unless said: the tokens do not depend on it, acceptance may."""
    speculates: bool = False
    """Whether a greedy round is one method by default: where each call costs copies and waits that it saves."""
    flags: frozenset[str] = frozenset()
    """Fields of ``ExportConfig`` that mean something to this backend alone; given to another one they are refused."""

    packages: tuple[str, ...] = ()
    """Packages that the extra of the backend's name installs."""

    def load(self) -> Backend:
        """Raises ValueError for a package that is not installed."""
        for package in self.packages:
            if importlib.util.find_spec(package) is None:
                (name,) = (name for name, backend in BACKENDS.items() if backend is self)
                raise ValueError(f"--backend {name} needs {package}: type pip install 'eagle3-export[{name}]'")
        return cast(Backend, importlib.import_module(self.module).BACKEND)


BACKENDS: dict[str, BackendEntry] = {
    "cuda": BackendEntry(
        "NVIDIA GPUs in bfloat16 with INT4 weights (AOTInductor), with a GPU at hand or without",
        "eagle3.export.lowering.cuda.backend",
        flags=frozenset({"cuda_arch"}),
        recipes=CUDA_RECIPES,
        quantizes=True,
        speculates=True,
        packages=("triton",),
    ),
    "xnnpack": BackendEntry(
        "the CPU in float32 or with weights of 8 or 4 bits (XNNPACK, ExecuTorch's LLM ops)",
        "eagle3.export.lowering.xnnpack.backend",
        flags=frozenset({"qembedding", "group_size"}),
        recipes=XNNPACK_RECIPES,
        draft_recipe="8da8w",
    ),
}
