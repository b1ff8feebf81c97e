"""Checks that the runtimes for CUDA artifacts have the symbols that the artifact's libraries need.

For PyTorch, the installed libraries are searched, and the headers that declare the functions of its CUDA build.
ExecuTorch's CUDA runtime is not in a CPU wheel, so its functions are listed here: all ``aoti_torch_`` names that
``nm -D`` shows of ``libaoti_cuda_shims.so``, built from the sources of August 2026, before the release of 1.5.1
(``backends/aoti/common_shims_slim.cpp``, ``backends/cuda/runtime``). The functions of CUDA are those of CUDA 13.0 that
AOTInductor's code calls. Both runtimes link libcudart. PyTorch's host here also loads the driver's libcuda;
ExecuTorch's does not, so a library must list it as needed.
"""

import ctypes
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

DRIVER = "libcuda.so.1"
_NAMES = (
    "_reinterpret_tensor assign_tensors_out check clone clone_preserve_strides copy_ create_cuda_guard "
    "create_cuda_stream_guard create_tensor_from_blob create_tensor_from_blob_v2 cuda__weight_int4pack_mm "
    "cuda_guard_set_index cuda_int4_plain_mm cuda_int5_plain_mm cuda_int6_plain_mm cuda_int8_plain_mm "
    "cuda_rand cuda_randint_low_out cuda_sort_stable delete_cuda_guard delete_cuda_stream_guard "
    "delete_tensor_object device_type_cpu device_type_cuda dtype_bfloat16 dtype_bool dtype_float16 "
    "dtype_float32 dtype_int16 dtype_int32 dtype_int64 dtype_int8 dtype_uint8 empty_strided "
    "get_current_cuda_stream get_data_ptr get_device_index get_device_type get_dim get_dtype get_numel "
    "get_sizes get_storage_offset get_storage_size get_strides grad_mode_is_enabled grad_mode_set_enabled "
    "item_bool layout_strided new_tensor_handle warn"
)
EXECUTORCH = frozenset(f"aoti_torch_{name}" for name in _NAMES.split())
CUDA_DRIVER = frozenset(
    [
        "cuDeviceGet",
        "cuDeviceGetAttribute",
        "cuFuncGetAttribute",
        "cuFuncSetAttribute",
        "cuGetErrorString",
        "cuLaunchKernel",
        "cuLaunchKernelEx",
        "cuModuleGetFunction",
        "cuModuleLoad",
        "cuModuleLoadData",
        "cuModuleUnload",
    ]
)
CUDA_RUNTIME = frozenset(
    [
        "cudaDeviceSynchronize",
        "cudaEventCreate",
        "cudaEventCreateWithFlags",
        "cudaEventDestroy",
        "cudaEventQuery",
        "cudaEventRecord",
        "cudaEventSynchronize",
        "cudaFree",
        "cudaGetDevice",
        "cudaGetErrorString",
        "cudaGetLastError",
        "cudaMalloc",
        "cudaMemcpy",
        "cudaMemcpyAsync",
        "cudaMemset",
        "cudaSetDevice",
        "cudaStreamSynchronize",
    ]
)


def lacking(needs: Iterable[str], asks_for: Iterable[str]) -> list[str]:
    """Return a line for each runtime that lacks symbols of a library.

    ``needs`` are the symbols that the library needs; ``asks_for`` are the libraries that it asks the loader for.
    """
    wanted = sorted(needs)
    found = []
    for runtime, has in (("PyTorch's libraries", of_pytorch), ("ExecuTorch's CUDA libraries", EXECUTORCH.__contains__)):
        missing = [name for name in wanted if not has(name) and name not in CUDA_DRIVER | CUDA_RUNTIME]
        if missing:
            found.append(f"{_listed(missing)}, which {runtime} lack")
    of_driver = [name for name in wanted if name in CUDA_DRIVER]
    if of_driver and DRIVER not in asks_for:
        not_loaded = f"does not ask for {DRIVER}, which ExecuTorch's CUDA runtime does not load"
        found.append(f"{_listed(of_driver)} of the driver, but {not_loaded}")
    return found


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


@cache
def of_pytorch(name: str) -> bool:
    """Return True if the installed PyTorch, or the CUDA build of the same version, has the function ``name``."""
    return any(hasattr(library, name) for library in _pytorch()) or name in _declared()


@cache
def _pytorch() -> list[ctypes.CDLL]:
    import torch

    folder = Path(torch.__file__).parent / "lib"
    names = ("libc10.so", "libtorch_cpu.so", "libc10_cuda.so", "libtorch_cuda.so")
    return [ctypes.CDLL(str(folder / name)) for name in names if (folder / name).is_file()]


@cache
def _declared() -> frozenset[str]:
    """Return the CUDA functions that the headers of AOTInductor's C interface declare."""
    import torch

    folder = Path(torch.__file__).parent / "include" / "torch" / "csrc" / "inductor" / "aoti_torch"
    headers = (folder / "c" / "shim.h", folder / "generated" / "c_shim_cuda.h")
    texts = [header.read_text(errors="replace") for header in headers if header.is_file()]
    return frozenset(name for text in texts for name in re.findall(r"\b(aoti_torch_\w*cuda\w*)\s*\(", text))
