"""Part 2: Triton compiles for the named GPU; nothing is loaded on a GPU or launched.

The code must run on later architectures as well. Triton would compile for sm_90a, whose PTX runs only on that
architecture (NVIDIA's PTX ISA, ".target"). Here it compiles for sm_90 with the matrix instructions of sm_89, because
LLVM would abort on wgmma and tcgen05. Kernels of many rows for sm_90 get code for sm_90a beside it
(``second_image``). LLVM would also abort on a warp-wide maximum of floats in one instruction, which
Triton uses for sm_100 although only sm_100a has it, so sm_100 is lowered to LLVM as sm_90 is. If a configuration still
needs such an instruction, the next configuration is tried.
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._inductor import config as inductor
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.runtime.hints import HeuristicType
from torch._inductor.runtime.triton_heuristics import (
    CachingAutotuner,
    CachingAutotunerPlugin,
    CompileResult,
    config_to_dict,
)
from triton import Config
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler
from triton.runtime import driver
from triton.runtime.errors import OutOfResources, PTXASError

from eagle3.export.lowering.cuda.inductor.registers import registers_kept
from eagle3.export.lowering.cuda.named_gpu.configurations import best, only
from eagle3.export.lowering.cuda.named_gpu.second_image import SecondImages, own_config, plain_config, plain_rows
from eagle3.export.patching.patches import all_replaced, environment
from eagle3.runner.system.gpus import REGISTERS, Gpu

TRITON, INDUCTOR = "triton.backends.nvidia.compiler.", "torch._inductor."
HEURISTICS = f"{INDUCTOR}runtime.triton_heuristics."

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


class OneConfiguration(CachingAutotunerPlugin):
    """Compiles each kernel with one configuration that fits ``gpu``, and keeps it instead of a launch: the first that
    fits for Inductor's own kernels, the one that ``configurations`` chooses for a hand-written kernel. ``images``
    compiles the second image of a kernel that gets one."""

    def __init__(self, gpu: Gpu, images: SecondImages):
        self.gpu, self.images = gpu, images

    def pre_compile(self, autotuner: CachingAutotuner) -> None:
        if not autotuner.compile_results:
            autotuner.compile_results, autotuner.configs = [self.chosen(autotuner)], None
        if not autotuner.launchers:
            (result,) = autotuner.compile_results
            result.kernel._init_handles = lambda: None  # it would load the kernel on the GPU
            autotuner.launchers = [result.make_launcher()]

    def pre_dispatch(self, autotuner: CachingAutotuner, *_args: object, stream: int, **_kwargs: object) -> None:
        if not autotuner.launchers:
            autotuner.precompile()
        autotuner.save_gpu_kernel(stream, autotuner.launchers[0])

    def chosen(self, autotuner: CachingAutotuner) -> CompileResult:
        """Return the compiled kernel, whose grid is in the metadata. Raises ValueError if no configuration fits."""
        gpu, second = self.gpu, self.images.wanted(autotuner)
        rows = plain_rows(autotuner) if second else 0
        refusals: list[str] = []

        def compiled(config: Config) -> CompileResult | None:
            try:
                result = autotuner._precompile_config(plain_config(config, rows))
            except (OutOfResources, PTXASError) as error:
                refusals.append(str(error))
                return None
            shared = result.kernel.metadata.shared
            if shared <= gpu.shared_memory_per_block:
                return result
            refusals.append(f"{shared} bytes of shared memory, {gpu.name} has {gpu.shared_memory_per_block}")
            return None

        if autotuner.heuristic_type != HeuristicType.USER_AUTOTUNE:
            result = next(filter(None, map(compiled, autotuner.configs)), None)
        elif len(autotuner.configs) > 1:
            result = best(autotuner.configs, compiled, gpu)
        else:
            (config,) = autotuner.configs
            result = only(config, compiled, gpu)
        if result is None:
            name = autotuner.fn.__name__
            raise ValueError(f"no configuration of the kernel {name} fits sm_{gpu.arch}: {refusals[-1]}")
        if second:
            self.images.add(autotuner, result, own_config(result.config))
        add_grid(autotuner.inductor_meta, result.config)
        return result


@contextmanager
def compiling(gpu: Gpu) -> Iterator[None]:
    """Make Triton compile plain code for ``gpu``, and Inductor each kernel as ``OneConfiguration`` says."""
    make_ttgir, make_llir = compiler.CUDABackend.make_ttgir, compiler.CUDABackend.make_llir
    own_arch = compiler.sm_arch_from_capability

    @contextmanager
    def own_code() -> Iterator[None]:
        values = {
            f"{TRITON}sm_arch_from_capability": own_arch,
            f"{TRITON}CUDABackend.make_ttgir": staticmethod(make_ttgir),
        }
        with all_replaced(values), environment({"TRITON_CACHE_DIR": str(Path(cache_dir()) / "triton-own")}):
            yield

    images = SecondImages(gpu, own_code)

    def make_plain_llir(
        self: compiler.CUDABackend, src: object, metadata: dict[str, Any], options: object, capability: int
    ) -> object:
        return make_llir(self, src, metadata, options, 90 if capability // 10 == 10 else capability)

    def make_plain_ttgir(mod: object, metadata: dict[str, Any], opt: object, capability: int) -> object:
        return make_ttgir(mod, metadata, opt, min(capability, LAST_PLAIN))

    earlier = driver._active
    driver.set_active(NamedDriver(gpu))
    try:
        with (
            registers_kept(),
            inductor.patch({"use_static_triton_launcher": False}),  # it would load the kernel on the GPU
            # Triton's cache key does not include the plain architecture, so this code needs a cache of its own.
            environment({"TRITON_CACHE_DIR": str(Path(cache_dir()) / "triton-portable")}),
            all_replaced(
                {
                    f"{TRITON}sm_arch_from_capability": lambda capability: f"sm_{capability}",
                    f"{TRITON}CUDABackend.make_ttgir": staticmethod(make_plain_ttgir),
                    f"{TRITON}CUDABackend.make_llir": make_plain_llir,
                    f"{INDUCTOR}codegen.cuda.compile_utils._nvcc_arch_as_compile_option": lambda: str(gpu.arch),
                    f"{INDUCTOR}runtime.triton_helpers.set_driver_to_gpu": lambda: None,
                    f"{HEURISTICS}get_caching_autotuner_plugins": lambda _autotuner: [OneConfiguration(gpu, images)],
                    f"{INDUCTOR}codecache.subprocess": SimpleNamespace(**vars(subprocess) | {"run": images.run}),
                }
            ),
        ):
            yield
    finally:
        driver._active = earlier
