"""Compiles launches of Triton kernels without a GPU, and launches the machine code on one.

A launch function of ``export/lowering/cuda/kernels`` takes a kernel as its first argument. ``Compiling`` in its place
compiles the kernel for each launch; ``Launching`` launches the compiled code by CUDA's driver. Both identify a launch
by its kernel, its arguments' types and its constants, so the machine with the GPU needs no particular Triton.
"""

import ctypes
import hashlib
import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
import triton
from torch import Tensor

MANIFEST = "manifest.json"
OPTIONS = ("num_warps", "num_stages", "maxnreg")
EARLY = "EARLY"
"""The constant that marks a kernel which itself waits for the previous launch, and may be launched early."""
BULK = "BULK"
"""The constant that marks a launch of the records' image for sm_90a, by bulk copies, in place of Triton's code."""
TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.uint8: "*u8", torch.int8: "*i8",
    torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
SERIALIZATION, MOST_SHARED = 6, 8  # CU_LAUNCH_ATTRIBUTE_..., CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
FREE_SHARED = 48 << 10


class Kernel(Protocol):
    """A stand-in for a Triton kernel, which launch functions accept."""

    def __getitem__(self, grid: tuple[Any, ...], /) -> Callable[..., None]: ...


def types_of(arguments: tuple[Any, ...]) -> list[str]:
    return [TYPES[each.dtype] if isinstance(each, Tensor) else "i32" for each in arguments]


def key_of(name: str, arguments: tuple[Any, ...], constants: dict[str, Any], own: bool = False) -> str:
    """Return the name of a launch's machine code. ``own``: it is for its architecture alone, such as sm_90a."""
    named = json.dumps([name, types_of(arguments), sorted(constants.items())])
    return f"{name.strip('_')}-{hashlib.sha256(named.encode()).hexdigest()[:16]}{'-own' if own else ''}"


class Compiling:
    """A kernel that writes the machine code of its launches for ``arch`` to ``folder``, and adds them to
    ``manifest``. ``own``: the code is for that architecture alone (sm_90a), as Triton makes it beside a GPU."""

    def __init__(
        self, kernel: triton.JITFunction, folder: Path, manifest: dict[str, Any], arch: str = "sm_90", own: bool = False
    ):
        self.kernel, self.folder, self.manifest, self.arch, self.own = kernel, folder, manifest, arch, own

    def __getitem__(self, _grid: tuple[Any, ...]) -> Callable[..., None]:
        return self._compile

    def _compile(self, *arguments: Any, **constants: Any) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        from eagle3.export.lowering.cuda.named_gpu.compiling import compiling
        from eagle3.runner.system.gpus import BY_ARCH

        name = self.kernel.fn.__name__
        key = key_of(name, arguments, constants, self.own)
        if key in self.manifest:
            return
        options = {each: constants.pop(each) for each in OPTIONS if constants.get(each) is not None}
        if constants.pop(BULK, False):
            from eagle3.export.lowering.cuda.kernels.int4.records import bulk_copy

            shared = bulk_copy.shared_bytes(constants["BLOCK_M"])
            self._keep(key, bulk_copy.cubin(constants), name, options["num_warps"], shared, constants)
            return
        names, types = self.kernel.arg_names, types_of(arguments)
        signature = dict(zip(names, types, strict=False)) | dict.fromkeys(constants, "constexpr")
        aligned = {(i,): [["tt.divisibility", 16]] for i, type in enumerate(types) if type.startswith("*")}
        values = {(names.index(each),): value for each, value in constants.items()}
        os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # keeps paths of this machine out of the code
        gpu = BY_ARCH[self.arch]
        with nullcontext() if self.own else compiling(gpu):
            source = ASTSource(self.kernel, signature, values, aligned)
            made = triton.compile(source, target=GPUTarget("cuda", gpu.arch, 32), options=options)
        about = made.metadata
        self._keep(key, made.asm["cubin"], about.name, about.num_warps, about.shared, constants)

    def _keep(self, key: str, cubin: bytes, entry: str, warps: int, shared: int, constants: dict[str, Any]) -> None:
        (self.folder / f"{key}.cubin").write_bytes(cubin)
        self.manifest[key] = {
            "entry": entry, "threads": 32 * warps, "shared": shared, "early": bool(constants.get(EARLY)),
            "constants": constants,
        }  # fmt: skip


class Attribute(ctypes.Structure):
    """``CUlaunchAttribute``."""

    _fields_ = (
        ("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_byte * 60),
    )  # fmt: skip


class Configuration(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("x", "y", "z", "threads_x", "threads_y", "threads_z", "shared", "pad")),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    )  # fmt: skip


class Driver:
    """CUDA's driver. A call that fails raises RuntimeError."""

    def __init__(self, library: str = "libcuda.so.1"):
        self.library = ctypes.CDLL(library)

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            if code := getattr(self.library, name)(*arguments):
                text = ctypes.c_char_p()
                self.library.cuGetErrorString(code, ctypes.byref(text))
                raise RuntimeError(f"{name}: {code}, {(text.value or b'').decode()}")

        return call


class Cubins:
    """The machine code in ``folder``, and the sizes and activations of the ``linears`` that it is for. ``driver``: an
    object with the driver's calls. ``stream``: returns the stream of a launch."""

    def __init__(self, folder: Path, driver: "Driver", stream: Callable[[], int]):
        self.folder, self.driver, self.stream = folder, driver, stream
        found = json.loads((folder / MANIFEST).read_text())
        self.manifest: dict[str, Any] = found["kernels"]
        self.linears: dict[str, tuple[int, int, str]] = {name: tuple(of) for name, of in found["linears"].items()}
        self.functions: dict[str, ctypes.c_void_p] = {}

    def function(self, key: str) -> ctypes.c_void_p:
        """Return a loaded kernel. Raises ValueError for a launch that was not compiled."""
        if key not in self.manifest:
            raise ValueError(f"{key} is not in {self.folder}: make the cubins again with the same sources")
        if key not in self.functions:
            module, function, about = ctypes.c_void_p(), ctypes.c_void_p(), self.manifest[key]
            self.driver.cuModuleLoadData(ctypes.byref(module), (self.folder / f"{key}.cubin").read_bytes())
            self.driver.cuModuleGetFunction(ctypes.byref(function), module, about["entry"].encode())
            if about["shared"] > FREE_SHARED:
                self.driver.cuFuncSetAttribute(function, MOST_SHARED, about["shared"])
            self.functions[key] = function
        return self.functions[key]

    def launch(self, key: str, grid: tuple[int, ...], values: list[Any]) -> None:
        """Launch a kernel. ``values`` are its arguments as ctypes values; Triton's own two pointers are appended."""
        about, function = self.manifest[key], self.function(key)
        held = [*values, ctypes.c_void_p(0), ctypes.c_void_p(0)]
        places = (ctypes.c_void_p * len(held))(*(ctypes.addressof(each) for each in held))
        attribute = Attribute(id=SERIALIZATION, value=1)
        early = about["early"]
        x, y, z = (*grid, 1, 1)[:3]
        configuration = Configuration(
            x, y, z, about["threads"], 1, 1, about["shared"], 0, self.stream(),
            ctypes.addressof(attribute) if early else None, int(early),
        )  # fmt: skip
        self.driver.cuLaunchKernelEx(ctypes.byref(configuration), function, places, None)


class Launching:
    """A kernel that launches the machine code in ``cubins`` with the name of its function, or its ``own`` code."""

    def __init__(self, kernel: triton.JITFunction, cubins: Cubins, own: bool = False):
        self.name, self.cubins, self.own = kernel.fn.__name__, cubins, own

    def __getitem__(self, grid: tuple[Any, ...]) -> Callable[..., None]:
        def run(*arguments: Any, **constants: Any) -> None:
            if 0 in grid:
                return
            values = [
                ctypes.c_void_p(each.data_ptr()) if isinstance(each, Tensor) else ctypes.c_int(each)
                for each in arguments
            ]
            self.cubins.launch(key_of(self.name, arguments, constants, self.own), grid, values)

        return run
