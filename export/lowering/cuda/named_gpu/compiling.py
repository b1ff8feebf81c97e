"""Part 2: Triton compiles for the named GPU; nothing is loaded on a GPU or launched.

The code must run on later architectures as well. Triton would compile for sm_90a, whose PTX runs only on that
architecture (NVIDIA's PTX ISA, ".target"). Here it compiles for sm_90 with the matrix instructions of sm_89, because
LLVM would abort on wgmma and tcgen05. Kernels of many rows for sm_90 get code for sm_90a beside it
(``second_image``). LLVM would also abort on a warp-wide maximum of floats in one instruction, which
Triton uses for sm_100 although only sm_100a has it, so sm_100 is lowered to LLVM as sm_90 is. If a configuration still
needs such an instruction, the next configuration is tried.
"""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._inductor import config as inductor
from torch._inductor.codecache import CudaKernelParamCache
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

from eagle3.export.lowering.cuda.inductor.card_launches import (
    CARDS,
    CardLaunch,
    Image,
    launches_by_card,
    launches_of_images,
)
from eagle3.export.lowering.cuda.inductor.registers import registers_kept
from eagle3.export.lowering.cuda.kernels.sums import Division, own_division
from eagle3.export.lowering.cuda.named_gpu.configurations import best, only
from eagle3.export.lowering.cuda.named_gpu.fatbins import (
    PLAIN_CODE,
    Fatbins,
    Packed,
    common_gpu,
    on_card,
    retargeted,
    with_own_images,
)
from eagle3.export.lowering.cuda.named_gpu.second_image import (
    ARCH,
    OwnImage,
    SecondImages,
    own_config,
    plain_configs,
    plain_gpu,
    plain_rows,
)
from eagle3.export.patching.patches import all_replaced, environment
from eagle3.runner.system.gpus import REGISTERS, Gpu

TRITON, INDUCTOR = "triton.backends.nvidia.compiler.", "torch._inductor."
HEURISTICS = f"{INDUCTOR}runtime.triton_heuristics."

SPLITS, WHOLE = "SPLITS", "WHOLE"
"""The constants of a matmul's kernel: the programs that K of a tile is divided among, and the first tiles, which are
not divided."""
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


def grids_of(inductor_meta: dict[str, Any], config: Config) -> list[dict[str, Any]]:
    """Return the entries of a kernel's metadata with the grid of a configuration's tile."""
    tile = {name: value for name, value in config.kwargs.items() if name not in (SPLITS, WHOLE)}.items()
    return [grid for grid in inductor_meta.get("precomputed_grids", ()) if tile <= grid["config"].items()]


def add_grid(inductor_meta: dict[str, Any], config: Config) -> None:
    """Add a configuration's grid to a kernel's metadata. A configuration with other warps or stages has the grid of the
    same tile."""
    tiles, named = grids_of(inductor_meta, config), config_to_dict(config)
    if tiles and all(grid["config"] != named for grid in inductor_meta["precomputed_grids"]):
        inductor_meta["precomputed_grids"].append(tiles[0] | {"config": named})


def with_constants(config: Config, constants: dict[str, int]) -> Config:
    """Return a configuration with other constants."""
    other = copy(config)
    other.kwargs = config.kwargs | constants
    return other


def grid_of(inductor_meta: dict[str, Any], config: Config) -> Any:  # noqa: ANN401 - Inductor's expressions
    """Return the grid of a configuration's tile; None if it does not depend on the configuration."""
    return next((grid["cpp"] for grid in grids_of(inductor_meta, config)), None)


class OneConfiguration(CachingAutotunerPlugin):
    """Compiles a kernel with one configuration for each of ``gpus``, and keeps it instead of a launch: the first that
    fits all for Inductor's own kernels, the one that ``configurations`` chooses for a hand-written kernel. All have one
    grid, but for a matmul's own parts of K. ``second`` compiles the second image of a kernel that gets one, ``fatbins``
    packs all images; ``cards`` are their launches if they differ."""

    def __init__(self, gpus: Sequence[Gpu], second: SecondImages, fatbins: Fatbins):
        self.gpus, self.second, self.fatbins = gpus, second, fatbins
        self.cards: tuple[CardLaunch, ...] = ()
        self.divisions: dict[Gpu, Division | None] = {}
        """The division of K of a matmul on each GPU of a list; None: as its constants say."""
        self.compiled: dict[str, CompileResult | str] = {}
        """The kernel for the first GPU by configuration, or why it has none."""

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
        if self.cards:
            CudaKernelParamCache.cache[autotuner.inductor_meta["kernel_name"]][CARDS] = self.cards

    def chosen(self, autotuner: CachingAutotuner) -> CompileResult:
        """Return the kernel compiled for the first GPU, whose grid is in the metadata; the images for the others are
        kept. Raises ValueError if no configuration fits."""
        second = self.second.wanted(autotuner)
        rows = plain_rows(autotuner) if second else 0
        given = plain_configs(autotuner) if rows else autotuner.configs
        constants = autotuner.triton_meta["constants"]
        self.divisions = {gpu: own_division(f"sm_{gpu.arch}", constants) for gpu in self.gpus if len(self.gpus) > 1}
        gpu, *others = with_own_images(self.gpus, self.divisions)
        if others and (
            autotuner.heuristic_type != HeuristicType.USER_AUTOTUNE
            or len({str(grid_of(autotuner.inductor_meta, config)) for config in given}) > 1
        ):
            gpu = common_gpu(self.gpus)  # all take one configuration, or one grid
            self.divisions = {}
        elif rows and not others:
            gpu = plain_gpu(gpu)
        first = self._best(autotuner, given, gpu)
        own = own_config(autotuner.configs[0] if rows else first.config)
        image = self.second.compiled(autotuner, first, own) if second else None
        if image is not None:
            others = [each for each in others if each is not self.second.gpu]
        self._keep(autotuner, given, first, others, None if image is None else (image, own))
        add_grid(autotuner.inductor_meta, first.config)
        return first

    def _keep(
        self,
        autotuner: CachingAutotuner,
        given: list[Config],
        first: CompileResult,
        others: list[Gpu],
        second: tuple[OwnImage, Config] | None,
    ) -> None:
        """Keep the images of a kernel beside ``first``, and their launches if they differ."""
        if autotuner.heuristic_type == HeuristicType.USER_AUTOTUNE:
            grid = grid_of(autotuner.inductor_meta, first.config)
            same = [config for config in given if grid_of(autotuner.inductor_meta, config) == grid]
            results = {gpu: self._best(autotuner, same, gpu) for gpu in others}
            packed = [Packed("elf", str(gpu.arch), result.kernel.asm["cubin"]) for gpu, result in results.items()]
        else:
            results = dict.fromkeys(others, first)
            packed = [Packed("elf", str(gpu.arch), self.fatbins.start(first.kernel, gpu)) for gpu in others]
        named = {name for each in (first, *results.values()) for name in each.config.kwargs}
        named |= set(second[1].kwargs) if second else set()
        constants = autotuner.triton_meta["constants"]

        def image(form: str, arch: int | str, warps: int, shared: int, config: Config) -> Image:
            values = {name: config.kwargs.get(name, constants.get(name)) for name in sorted(named)}
            kept = tuple((name, value) for name, value in values.items() if isinstance(value, int))
            divided = (config.kwargs.get(name, 0) for name in (SPLITS, WHOLE))
            return Image(form, f"sm_{arch}", warps, shared, kept, *divided)

        def of(form: str, gpu: Gpu, result: CompileResult) -> Image:
            launched = result.kernel.metadata
            return image(form, gpu.arch, launched.num_warps, launched.shared, result.config)

        images = [of(form, self.gpus[0], first) for form in ("sass", "ptx")]
        images += (of("sass", gpu, result) for gpu, result in results.items())
        if others and (last := results[others[-1]]).kernel.asm["ptx"] != first.kernel.asm["ptx"]:
            packed.append(Packed("ptx", str(others[-1].arch), retargeted(last.kernel.asm["ptx"], others[-1])))
            images.append(of("ptx", others[-1], last))
        if second:
            packed.append(Packed("elf", ARCH, second[0].cubin))
            images.append(image("sass", ARCH, second[0].warps, second[0].shared, second[1]))
        self.fatbins.keep(first.kernel.asm["cubin"], packed)
        cards = launches_by_card(images)
        self.cards = cards if len(cards) > 1 else ()

    def _best(self, autotuner: CachingAutotuner, given: list[Config], gpu: Gpu) -> CompileResult:
        """Return the kernel compiled for ``gpu`` with the best of the ``given`` configurations."""
        refusals: list[str] = []
        if (own := self.divisions.get(gpu)) is not None:
            given = [with_constants(config, {SPLITS: own.parts, WHOLE: own.whole}) for config in given]

        def compiled(config: Config) -> CompileResult | None:
            result = self._first(autotuner, config)
            if isinstance(result, str):
                refusals.append(result)
            elif (shared := result.kernel.metadata.shared) > gpu.shared_memory_per_block:
                refusals.append(f"{shared} bytes of shared memory, {gpu.name} has {gpu.shared_memory_per_block}")
            elif gpu.arch == self.gpus[0].arch:
                return result
            else:
                try:
                    return on_card(result, gpu)
                except PTXASError as error:
                    refusals.append(str(error))
            return None

        if autotuner.heuristic_type != HeuristicType.USER_AUTOTUNE:
            result = next(filter(None, map(compiled, given)), None)
        elif len(given) > 1:
            result = best(given, compiled, gpu)
        else:
            result = only(given[0], compiled, gpu)
        if result is None:
            name = autotuner.fn.__name__
            raise ValueError(f"no configuration of the kernel {name} fits sm_{gpu.arch}: {refusals[-1]}")
        return result

    def _first(self, autotuner: CachingAutotuner, config: Config) -> CompileResult | str:
        """Return the kernel compiled for the first GPU, or why it cannot be."""
        if (known := self.compiled.get(str(config))) is None:
            try:
                known = autotuner._precompile_config(config)
            except (OutOfResources, PTXASError) as error:
                known = str(error)
            self.compiled[str(config)] = known
        return known


@contextmanager
def compiling(first: Gpu, *others: Gpu) -> Iterator[None]:
    """Make Triton compile plain code for the ``first`` GPU, the one with the lowest architecture, and Inductor each
    kernel as ``OneConfiguration`` says."""
    make_ttgir, make_llir = compiler.CUDABackend.make_ttgir, compiler.CUDABackend.make_llir
    own_arch = compiler.sm_arch_from_capability

    @contextmanager
    def own_code() -> Iterator[None]:
        values = {
            f"{TRITON}sm_arch_from_capability": own_arch,
            f"{TRITON}CUDABackend.make_ttgir": staticmethod(make_ttgir),
        }
        cache = environment({"TRITON_CACHE_DIR": str(Path(cache_dir()) / "triton-own")})
        with PLAIN_CODE, all_replaced(values), cache:
            yield

    gpus, fatbins = (first, *others), Fatbins()
    second = SecondImages(gpus, own_code)

    def make_plain_llir(
        self: compiler.CUDABackend, src: object, metadata: dict[str, Any], options: object, capability: int
    ) -> object:
        return make_llir(self, src, metadata, options, 90 if capability // 10 == 10 else capability)

    def make_plain_ttgir(mod: object, metadata: dict[str, Any], opt: object, capability: int) -> object:
        return make_ttgir(mod, metadata, opt, min(capability, LAST_PLAIN))

    earlier = driver._active
    driver.set_active(NamedDriver(first))
    try:
        with (
            registers_kept(),
            launches_of_images(),
            inductor.patch({"use_static_triton_launcher": False}),  # it would load the kernel on the GPU
            # Triton's cache key does not include the plain architecture, so this code needs a cache of its own.
            environment({"TRITON_CACHE_DIR": str(Path(cache_dir()) / "triton-portable")}),
            all_replaced(
                {
                    f"{TRITON}sm_arch_from_capability": lambda capability: f"sm_{capability}",
                    f"{TRITON}CUDABackend.make_ttgir": staticmethod(make_plain_ttgir),
                    f"{TRITON}CUDABackend.make_llir": make_plain_llir,
                    f"{INDUCTOR}codegen.cuda.compile_utils._nvcc_arch_as_compile_option": lambda: str(first.arch),
                    f"{INDUCTOR}runtime.triton_helpers.set_driver_to_gpu": lambda: None,
                    f"{HEURISTICS}get_caching_autotuner_plugins": lambda _: [OneConfiguration(gpus, second, fatbins)],
                    f"{INDUCTOR}codecache.subprocess": SimpleNamespace(**vars(subprocess) | {"run": fatbins.run}),
                }
            ),
        ):
            yield
    finally:
        driver._active = earlier
