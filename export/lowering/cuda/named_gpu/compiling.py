"""Part 2: Triton compiles for the named GPU; nothing is loaded on a GPU or launched.

The code must run on later architectures as well. Triton would compile for sm_90a, whose PTX runs only on that
architecture (NVIDIA's PTX ISA, ".target"). Here it compiles for sm_90 with the matrix instructions of sm_89, because
LLVM would abort on wgmma and tcgen05. LLVM would also abort on a warp-wide maximum of floats in one instruction, which
Triton uses for sm_100 although only sm_100a has it, so sm_100 is lowered to LLVM as sm_90 is. If a configuration still
needs such an instruction, the next configuration is tried.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.runtime.hints import HeuristicType
from torch._inductor.runtime.triton_heuristics import CachingAutotuner, CompileResult, config_to_dict
from triton import Config
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler
from triton.runtime import driver
from triton.runtime.errors import OutOfResources, PTXASError

from eagle3.export.lowering.cuda.named_gpu.configurations import best, only
from eagle3.export.patching.patches import all_replaced, environment
from eagle3.runner.hardware.gpus import REGISTERS, Gpu

TRITON, INDUCTOR = "triton.backends.nvidia.compiler.", "torch._inductor."
HEURISTICS = f"{INDUCTOR}runtime.triton_heuristics."
AUTOTUNER = f"{HEURISTICS}CachingAutotuner."

LAST_PLAIN = 89  # the last architecture whose matrix instructions every later one has


class NamedDriver:
    """Stands in for Triton's CUDA driver: it names the target and has no device."""

    def __init__(self, gpu: Gpu):
        properties = {
            "max_shared_mem": gpu.shared_memory_per_block,
            "multiprocessor_count": gpu.multiprocessors,
            "warpSize": 32,
            "max_num_regs": REGISTERS,
        }
        self.target = GPUTarget("cuda", gpu.arch, 32)
        self.utils = type("utils", (), {"get_device_properties": staticmethod(lambda _device: properties)})

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


def add_grid(inductor_meta: dict[str, Any], config: Config) -> None:
    """Add a configuration's grid to a kernel's metadata. A configuration with other warps or stages has the grid of the
    same tile."""
    grids = inductor_meta.get("precomputed_grids", ())
    named = config_to_dict(config)
    tiles = [grid for grid in grids if config.kwargs.items() <= grid["config"].items()]
    if tiles and all(grid["config"] != named for grid in grids):
        grids.append(tiles[0] | {"config": named})


@contextmanager
def compiling(gpu: Gpu) -> Iterator[None]:
    """Compile each kernel with one configuration that fits ``gpu``, and keep it: the first that fits for Inductor's own
    kernels, the one that ``configurations`` chooses for a hand-written kernel."""

    make_options = CachingAutotuner._create_compile_options
    make_ttgir, make_llir = compiler.CUDABackend.make_ttgir, compiler.CUDABackend.make_llir

    def make_all_options(self: CachingAutotuner, config: Config, meta: dict[str, Any]) -> dict[str, Any]:
        return make_options(self, config, meta) | {"maxnreg": config.maxnreg}  # Inductor leaves it out

    def make_plain_llir(
        self: compiler.CUDABackend, src: object, metadata: dict[str, Any], options: object, capability: int
    ) -> object:
        return make_llir(self, src, metadata, options, 90 if capability // 10 == 10 else capability)

    def make_plain_ttgir(mod: object, metadata: dict[str, Any], opt: object, capability: int) -> object:
        return make_ttgir(mod, metadata, opt, min(capability, LAST_PLAIN))

    def compile_one(self: CachingAutotuner) -> None:
        if self.compile_results:
            return
        refusals: list[str] = []

        def compiled(config: Config) -> CompileResult | None:
            try:
                result = self._precompile_config(config)
            except (OutOfResources, PTXASError) as error:
                refusals.append(str(error))
                return None
            shared = result.kernel.metadata.shared
            if shared <= gpu.shared_memory_per_block:
                return result
            refusals.append(f"{shared} bytes of shared memory, {gpu.name} has {gpu.shared_memory_per_block}")
            return None

        if self.heuristic_type != HeuristicType.USER_AUTOTUNE:
            result = next(filter(None, map(compiled, self.configs)), None)
        elif len(self.configs) > 1:
            result = best(self.configs, compiled, gpu)
        else:
            (config,) = self.configs
            result = only(config, compiled, gpu)
        if result is None:
            raise ValueError(f"no configuration of the kernel {self.fn.__name__} fits sm_{gpu.arch}: {refusals[-1]}")
        add_grid(self.inductor_meta, result.config)
        self.compile_results, self.configs = [result], None

    def make_launchers(self: CachingAutotuner) -> None:
        if not self.launchers:
            (result,) = self.compile_results
            result.kernel._init_handles = lambda: None  # it would load the kernel on the GPU
            self.launchers = [result.make_launcher()]

    def keep_instead_of_launch(self: CachingAutotuner, *_args: object, stream: int, **_kwargs: object) -> None:
        if not self.launchers:
            self.precompile()
        self.save_gpu_kernel(stream, self.launchers[0])

    earlier = driver._active
    driver.set_active(NamedDriver(gpu))
    try:
        with (
            # Triton's cache key does not include the plain architecture, so this code needs a cache of its own.
            environment({"TRITON_CACHE_DIR": str(Path(cache_dir()) / "triton-portable")}),
            all_replaced(
                {
                    f"{TRITON}sm_arch_from_capability": lambda capability: f"sm_{capability}",
                    f"{TRITON}CUDABackend.make_ttgir": staticmethod(make_plain_ttgir),
                    f"{TRITON}CUDABackend.make_llir": make_plain_llir,
                    f"{INDUCTOR}codegen.cuda.compile_utils._nvcc_arch_as_compile_option": lambda: str(gpu.arch),
                    f"{INDUCTOR}runtime.triton_helpers.set_driver_to_gpu": lambda: None,
                    f"{AUTOTUNER}_create_compile_options": make_all_options,
                    f"{AUTOTUNER}_precompile_worker": compile_one,
                    f"{AUTOTUNER}_make_launchers": make_launchers,
                    f"{AUTOTUNER}_dynamic_scale_rblock": lambda _self: None,  # it would query the occupancy
                    f"{AUTOTUNER}run": keep_instead_of_launch,
                    f"{HEURISTICS}StaticTritonCompileResult.can_statically_launch": staticmethod(
                        lambda *_a, **_k: None
                    ),
                }
            ),
        ):
            yield
    finally:
        driver._active = earlier
