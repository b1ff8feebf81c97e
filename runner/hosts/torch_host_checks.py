"""What must be so before PyTorch hosts a CUDA artifact: a GPU, its architecture, a driver, symbols, memory.

Each check raises ValueError with one line: the fact, both values, what to do. None of them loads anything.
"""

import ctypes
import re
import struct
from collections.abc import Iterable
from typing import Any

import torch

from eagle3.runner.inspect.cuda import Library, fatbin_entries

GIB = 1 << 30
HOSTS = (2, 11), (2, 13)
"""The first and the last PyTorch whose container is known to take its arguments as they are given."""


def check_torch() -> None:
    """The container is called by functions that PyTorch keeps to itself, some by ctypes, where a changed argument would
    end the process."""
    found = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if not HOSTS[0] <= found <= HOSTS[1]:
        first, last = (".".join(map(str, version)) for version in HOSTS)
        raise ValueError(
            f"PyTorch {torch.__version__} hosts no CUDA artifact, {first} to {last} do: type pip install "
            f"'torch=={last}.*', or run with ExecuTorch's CUDA build (--runtime executorch)"
        )


def check_gpu(manifest: dict[str, Any]) -> None:
    """A CUDA build of PyTorch, a GPU, a driver that fits PyTorch and the toolkit that made the kernels."""
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
    """The newest CUDA that the driver knows, as the driver counts: 13000 is 13.0."""
    found = ctypes.c_int(0)
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(found))
    return found.value


def check_driver(driver: int, nvcc: str | None) -> None:
    """Machine code of a toolkit runs on drivers of the same major version or a later one."""
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
    """``libraries`` by method: every kernel must have code that a GPU of this compute capability runs. ``arch`` is what
    the artifact says that it was made for, which goes for a kernel that is no fatbin but bare machine code."""
    for method, library in libraries.items():
        for kernel, code in library.kernels.items():
            images = _images(f"kernel {kernel} of {method}", code, arch)
            if not any(runs_on(form, made_for, capability) for form, made_for in images):
                gpu = "sm_{}{}".format(*capability)
                has = ", ".join(f"{form.upper()} {made_for}" for form, made_for in images)
                raise ValueError(
                    f"the GPU is {gpu}, kernel {kernel} of {method} is made for {has}: "
                    f"export it again with --cuda-arch {gpu}"
                )


def _images(what: str, code: bytes, arch: str | None) -> list[tuple[str, str]]:
    """Form and architecture of each image of a kernel."""
    if code.startswith(b"\x7fELF") and arch:
        return [("sass", arch)]
    try:
        return list(fatbin_entries(code))
    except (ValueError, struct.error) as error:
        raise ValueError(f"{what} is no fatbin ({error}): export it again") from error


def runs_on(form: str, arch: str, capability: tuple[int, int]) -> bool:
    """SASS runs on its major version from its minor version on, PTX on every later one. ``sm_90a`` is for that GPU
    alone, ``sm_100f`` for its family."""
    number, variant = re.fullmatch(r"sm_(\d+)([af]?)", arch).groups()
    made_for = int(number[:-1]), int(number[-1])
    if variant == "a":
        return made_for == capability
    return made_for <= capability and (form == "ptx" and not variant or made_for[0] == capability[0])


def check_symbols(needs: dict[str, list[str]]) -> None:
    """``needs`` by method: each must be among the symbols that this process gives to the libraries it loads."""
    missing = missing_symbols(name for names in needs.values() for name in names)
    if missing:
        methods = ", ".join(method for method, names in needs.items() if set(missing) & set(names))
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise ValueError(
            f"the libraries of {methods} need {shown}, which PyTorch {torch.__version__} and the CUDA driver lack: "
            "install a newer PyTorch, or run with ExecuTorch's CUDA build (--runtime executorch)"
        )


def missing_symbols(names: Iterable[str]) -> list[str]:
    """Those that the dynamic loader does not find, sorted: it is asked, as it will be when a library loads."""
    process = ctypes.CDLL(None)
    return sorted({name for name in names if not hasattr(process, name)})


def check_memory(kept: int, workspace: int, available: int, total: int) -> None:
    """Bytes of weights and caches, and of what methods make beside them, against those of the GPU."""
    lacking = kept + workspace - available
    if lacking > 0:
        raise ValueError(
            f"too little GPU memory: weights and caches take {kept / GIB:.2f} GiB, a run {workspace / GIB:.2f} more, "
            f"{available / GIB:.2f} of {total / GIB:.2f} GiB are free, {lacking / GIB:.2f} too few: free some, take a "
            "larger GPU, or export with --draft-qlinear default, a smaller --max-prefill or a smaller --max-seq-len"
        )
