"""Checks made before PyTorch runs a CUDA artifact: the GPU and its architecture, the driver, the size of blocks,
symbols, free memory.

Each check raises ValueError with one line: the fact, both values, what to do. None of them loads anything.
"""

import ctypes
import platform
from collections.abc import Iterable
from typing import Any

import torch

from eagle3.runner.artifact.cuda_library import Library, images_of, runs_on, served
from eagle3.runner.system.gpus import excesses, launches_on

GIB = 1 << 30
HOSTS = (2, 11), (2, 13)
"""The first and the last PyTorch whose container is known to take the arguments that are passed here."""


def check_torch() -> None:
    """Check PyTorch's version. The container is called through private functions, some of them by ctypes, where a
    changed argument would crash the process."""
    found = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if not HOSTS[0] <= found <= HOSTS[1]:
        first, last = (".".join(map(str, version)) for version in HOSTS)
        raise ValueError(
            f"PyTorch {torch.__version__} hosts no CUDA artifact, {first} to {last} do: type pip install "
            f"'torch=={last}.*', or run with ExecuTorch's CUDA build (--runtime executorch)"
        )


def check_machine(libraries: dict[str, Library]) -> None:
    """Check that the libraries, by method, are for this processor: the loader would name no reason."""
    for method, library in libraries.items():
        if library.machine != platform.machine():
            raise ValueError(
                f"the library of {method} is for {library.machine} hosts, this one is {platform.machine()}: export it "
                f"again with --host-arch {library.machine},{platform.machine()}"
            )


def check_gpu(manifest: dict[str, Any]) -> None:
    """Check for a CUDA build of PyTorch, a GPU, and a driver that fits PyTorch and the toolkit that built the
    kernels."""
    arch = manifest.get("cuda_arch")
    needs = f"the artifact is for NVIDIA GPUs ({arch})" if arch else "the artifact is for NVIDIA GPUs"
    if torch.version.cuda is None:
        raise ValueError(
            f"{needs} and this PyTorch {torch.__version__} is not a CUDA build: on a machine with such a GPU install "
            "PyTorch's CUDA build (https://pytorch.org/get-started/locally), or export with --backend xnnpack"
        )
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split(". ")[0].strip().rstrip(".")
        raise ValueError(
            f"{needs} and PyTorch {torch.__version__} (CUDA {torch.version.cuda}) finds none that it can use: {reason}"
        ) from error
    check_driver(driver_version(), manifest.get("toolchain", {}).get("nvcc"))


def driver_version() -> int:
    """Return the newest CUDA version that the driver supports, as the driver counts: 13000 is 13.0."""
    found = ctypes.c_int(0)
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(found))
    return found.value


def check_driver(driver: int, nvcc: str | None) -> None:
    """Check that the driver's CUDA major version is the toolkit's or a later one, so that its machine code runs."""
    if nvcc is None:
        return
    major = int(nvcc.split(".")[0])
    if driver // 1000 < major:
        has = f"{driver // 1000}.{driver % 1000 // 10}"
        raise ValueError(
            f"the NVIDIA driver is too old: it runs CUDA {has}, the artifact's kernels are of CUDA {nvcc}: install a "
            f"driver for CUDA {major} or later"
        )


def check_architectures(libraries: dict[str, Library], capability: tuple[int, int], arch: str | None) -> None:
    """Check that every kernel has code for a GPU of this compute capability. ``libraries`` is keyed by method.

    ``arch`` is the architecture that the artifact was compiled for. It holds for kernels that are bare machine code
    instead of a fatbin.
    """
    images = {
        f"kernel {kernel} of {method}": images_of(f"kernel {kernel} of {method}", code, arch)
        for method, library in libraries.items()
        for kernel, code in library.kernels.items()
    }
    for kernel, made_for in images.items():
        if not any(runs_on(*image, capability) for image in made_for):
            gpu = "sm_{}{}".format(*capability)
            has = ", ".join(f"{form.upper()} {architecture}" for form, architecture in made_for)
            runs = ", ".join(served(images.values())) or "no GPU"
            raise ValueError(
                f"the GPU is {gpu}, {kernel} is made for {has} (the artifact serves {runs}): export it again with "
                f"--cuda-arch {gpu}"
            )


def check_launches(launches: dict[str, list[dict[str, Any]]], capability: tuple[int, int], shared_bytes: int) -> None:
    """Check that no block takes more than the GPU allows. Code for sm_80 runs on sm_86 and sm_89, which allow less.

    ``launches`` are those that the exporter recorded, by method. ``shared_bytes`` is the most shared memory that the
    GPU gives to a block.
    """
    gpu, own = "sm_{}{}".format(*capability), launches_on(launches, 10 * capability[0] + capability[1])
    excess = next(excesses(own, f"the GPU ({gpu})", shared_bytes), None)
    if excess:
        raise ValueError(f"{excess}: export it again with --cuda-arch {gpu}")


def check_symbols(needs: dict[str, list[str]]) -> None:
    """Check that this process has the symbols that each method's library needs. ``needs`` is keyed by method."""
    missing = missing_symbols(name for names in needs.values() for name in names)
    if missing:
        methods = ", ".join(method for method, names in needs.items() if set(missing) & set(names))
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise ValueError(
            f"the libraries of {methods} need {shown}, which PyTorch {torch.__version__} and the CUDA driver lack: "
            "install a newer PyTorch, or run with ExecuTorch's CUDA build (--runtime executorch)"
        )


def missing_symbols(names: Iterable[str]) -> list[str]:
    """Return the names that the dynamic loader does not find, sorted. It searches as it does when a library loads."""
    process = ctypes.CDLL(None)
    return sorted({name for name in names if not hasattr(process, name)})


def check_memory(kept: int, workspace: int, available: int, total: int) -> None:
    """Check that the GPU has room: ``kept`` bytes of weights and caches, ``workspace`` bytes of intermediate tensors,
    ``available`` bytes free out of ``total``."""
    lacking = kept + workspace - available
    if lacking > 0:
        raise ValueError(
            f"too little GPU memory: weights and caches take {kept / GIB:.2f} GiB, a run {workspace / GIB:.2f} more, "
            f"{available / GIB:.2f} of {total / GIB:.2f} GiB are free, {lacking / GIB:.2f} too few: free some, take a "
            "larger GPU, or export with --draft-qlinear default, a smaller --max-prefill or a smaller --max-seq-len"
        )
