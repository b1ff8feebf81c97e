"""The table of backends, with the facts that flags, plan and methods depend on. ``lowering/backend.py`` defines the
functions of a backend in an export. A new backend is a folder in ``lowering`` with a ``Backend``, and an entry in
``BACKENDS``."""

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from eagle3.export.configuration.config import CUDA_RECIPES, GROUPED, MLX_RECIPES, XNNPACK_RECIPES
from eagle3.runner.system.cpu_features import lacks_avx512
from eagle3.targets.spec import DELTA_RULE, KIMI_DELTA, MAMBA_2, SHORT_CONVOLUTION

SMALL_M_ROWS = (8, 16)
"""The most rows of the two sizes of CUDA's small-M kernels, which read a weight once."""


@dataclass(frozen=True)
class BackendEntry:
    """The static facts of a backend. ``module`` defines its ``BACKEND``. ``lowering/backend.py`` imports the module on
    use, since that imports torch and the delegate's compiler."""

    summary: str
    module: str
    dtype: str = "float32"
    """The dtype of activations and caches."""
    quantizes: bool = False
    """True if weights are quantized unless a recipe says otherwise, and a quantized checkpoint keeps its codes. Other
    backends dequantize a quantized checkpoint while it loads, except for ``kept_group``."""
    kept_group: int = 0
    """The codes of a quantized checkpoint's matrix are kept, unless ``--qlinear`` is typed, if its groups of columns
    that share a scale are multiples of this."""
    recipes: tuple[str, ...] = ("none",)
    """The values of ``--qlinear`` and ``--draft-qlinear`` for which there are kernels."""
    grouped: tuple[str, ...] = ()
    """The recipes in which groups of inputs share a scale, so that ``--group-size`` has an effect."""
    draft_recipe: str = "none"
    """The default of ``--draft-qlinear``. The tokens do not depend on it, but acceptance may."""
    small_recipe: str | None = None
    """The recipe that a warning suggests for a large target if the default does not quantize it."""
    fuses_below: float = 0
    """The method ``speculate``, a fused round, is exported by default if the target's checkpoint has fewer bytes than
    this. That method saves the fixed costs of a round's calls; it takes time to export and space in the file."""
    shares_caches: bool = True
    """True if the methods of a program share caches. Otherwise the target has one method (``TARGET_ROWS`` of the
    contract), and the draft head keeps a cache of its own in another."""
    fast_rows: Mapping[str, int] = field(default_factory=dict)
    """The number of rows that the kernels compute in one pass, by recipe; adding rows up to this number costs nothing.
    For a recipe without an entry, the first of ``window_rows`` counts."""
    window_rows: tuple[int, ...] = (8, 16)
    """The possible limits of a verify window's rows. Prefill takes more rows than the smallest limit that the window
    fits into."""
    sessions: bool = True
    """True if the methods that read and write the state can be exported."""
    states: frozenset[str] = frozenset()
    """The kinds of layers with a state that the backend computes (``eagle3.targets.spec.states_of``)."""
    flags: frozenset[str] = frozenset()
    """Fields of ``ExportConfig`` that only this backend reads; they are refused with another backend."""

    check_extra: str = ""
    """The pip extra that checks artifacts on a machine that cannot run them."""
    packages: tuple[str, ...] = ()
    """Packages that the pip extra with the backend's name installs."""
    gpu: str | None = None
    """The module that defines ``local_arch``; None for a backend that does not lower for GPUs. Importing it is quick,
    unlike importing ``module``."""

    def local_arch(self) -> str | None:
        """Return the architecture of this machine's GPU, such as "sm_90". Returns None if there is no GPU, or if the
        backend does not lower for GPUs."""
        return importlib.import_module(self.gpu).local_arch() if self.gpu is not None else None

    def few_rows(self, window: int) -> int:
        """Return the smallest of ``window_rows`` that a verify window of ``window`` rows fits into; prefill takes more
        rows than this."""
        return next((rows for rows in self.window_rows if window <= rows), self.window_rows[-1])


FAST_ROWS_OF_AVX512 = {"none": 7, "8da8w": 5, "8da4w": 4}
FAST_ROWS_OF_AVX2 = {"none": 6, "8da8w": 4, "8da4w": 3}
"""Rows that XNNPACK's kernels take at once, by recipe (``scripts/bench/bench_cpu_kernels.py``). The processor that
exports selects the table, as in ``split_k.py``."""


BACKENDS: dict[str, BackendEntry] = {
    "cuda": BackendEntry(
        "NVIDIA GPUs in bfloat16 with INT4 weights (AOTInductor), exported with or without a GPU",
        "eagle3.export.lowering.cuda.backend",
        dtype="bfloat16",
        flags=frozenset({"cuda_arch", "host_arch", "int4_layout", "kv_cache", "weight_table"}),
        states=frozenset({DELTA_RULE, KIMI_DELTA, MAMBA_2, SHORT_CONVOLUTION}),
        recipes=CUDA_RECIPES,
        quantizes=True,
        fuses_below=math.inf,
        window_rows=SMALL_M_ROWS,
        packages=("triton",),
        gpu="eagle3.export.lowering.cuda.kernels.local_gpu",
    ),
    "xnnpack": BackendEntry(
        "the CPU in float32 or with weights of 8 or 4 bits (XNNPACK, ExecuTorch's LLM ops)",
        "eagle3.export.lowering.xnnpack.backend",
        flags=frozenset({"qembedding", "group_size"}),
        recipes=XNNPACK_RECIPES,
        grouped=(GROUPED,),
        states=frozenset({DELTA_RULE, KIMI_DELTA, MAMBA_2, SHORT_CONVOLUTION}),
        small_recipe="8da8w",
        draft_recipe="8da8w",
        # ``speculate`` makes a round of one millisecond a twelfth shorter, and saves nothing at the widths of a 4B
        # model.
        fuses_below=1e8,
        fast_rows=FAST_ROWS_OF_AVX2 if lacks_avx512() else FAST_ROWS_OF_AVX512,
    ),
    "mlx": BackendEntry(
        "Apple silicon in bfloat16 or with weights of 4 or 8 bits (MLX), exported on Linux or on a Mac",
        "eagle3.export.lowering.mlx.backend",
        dtype="bfloat16",
        flags=frozenset({"qembedding", "group_size", "allow_fallback"}),
        recipes=MLX_RECIPES,
        grouped=MLX_RECIPES[1:],
        kept_group=32,
        states=frozenset({DELTA_RULE, KIMI_DELTA, MAMBA_2, SHORT_CONVOLUTION}),
        shares_caches=False,
        sessions=False,
        check_extra="mlx",
    ),
}

MEANT = {"cpu": "xnnpack", "gpu": "cuda", "nvidia": "cuda", "apple": "mlx", "mac": "mlx", "metal": "mlx"}
"""Other words for backends, which the error of ``--backend`` understands."""
