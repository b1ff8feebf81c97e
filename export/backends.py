"""Backends: a record each. A new one is a folder in ``lowering`` and a line in ``BACKENDS``.

The module is imported only when it is used and has, in the order of an export,

- ``check(plan)``: raise for what cannot be lowered here, before any weight is read;
- ``memory(plan) -> (bytes, whose)``: of what will run the artifact, or of this machine;
- ``footprint(plan) -> GpuMemory``, None for a CPU, where weights are mapped; ``cure(plan, bytes)``: the flags with
  which a run takes no more than that, None where none do;
- ``export_bytes(plan)``: what the export takes of this machine's memory, None where weights stay mapped;
- ``DTYPE`` of activations and ``attention``, an ``AttentionFactory``;
- ``conversion(plan)``: called with name and value of each of the target's tensors as it is read, it returns what the
  model is to hold; its ``record()`` is what the manifest says of that;
- ``prepare(speculator, plan)``: rewrite the draft head's weights, once they are loaded; linears of one input become one
  product then;
- ``tracing(speculator, plan)``: a context manager around each trace;
- ``runs_here()``: whether this machine runs the artifacts; ``EAGER_ON_HOST``: whether the prepared module runs eagerly;
- ``describe(programs, plan) -> dict``: what the manifest says of the kernels; raise for a graph that must not be;
- ``lower(programs, constant_methods, plan) -> (ExecutorchProgramManager, dict)``: the program, and what
  ``export.json`` says of what was compiled.
"""

import importlib
import importlib.util
from dataclasses import dataclass
from types import ModuleType

from eagle3.export.config import CUDA_RECIPES, XNNPACK_RECIPES


@dataclass(frozen=True)
class Backend:
    """``module`` is imported on use: lowering pulls in torch and the delegate's compiler."""

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

    def load(self) -> ModuleType:
        """Raises ValueError for a package that is not installed."""
        for package in self.packages:
            if importlib.util.find_spec(package) is None:
                (name,) = (name for name, backend in BACKENDS.items() if backend is self)
                raise ValueError(f"--backend {name} needs {package}: type pip install 'eagle3-export[{name}]'")
        return importlib.import_module(self.module)


BACKENDS: dict[str, Backend] = {
    "cuda": Backend(
        "NVIDIA GPUs in bfloat16 with INT4 weights (AOTInductor), with a GPU at hand or without",
        "eagle3.export.lowering.cuda.backend",
        flags=frozenset({"cuda_arch"}),
        recipes=CUDA_RECIPES,
        quantizes=True,
        speculates=True,
        packages=("triton",),
    ),
    "xnnpack": Backend(
        "the CPU in float32 or with weights of 8 or 4 bits (XNNPACK, ExecuTorch's LLM ops)",
        "eagle3.export.lowering.xnnpack.backend",
        flags=frozenset({"qembedding", "group_size"}),
        recipes=XNNPACK_RECIPES,
        draft_recipe="8da8w",
    ),
}
