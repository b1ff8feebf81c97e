"""Builds, loads and calls the stand-in for CUDA's driver and runtime (``device/driver.cpp``) from Python.

It needs neither PyTorch nor Triton. It is loaded into the process under the name of the driver's own library, before
any code looks for that library.
"""

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from eagle3.runner.system.gpus import BY_ARCH

SOURCES = Path(__file__).with_name("device")
HANDLES = ("block", "stream", "event", "module", "function", "graph", "executable", "pinned", "capture")

LAUNCHED = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int64, *[ctypes.c_uint] * 3, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, ctypes.c_int
)
FOUND = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_char_p)


class Device(NamedTuple):
    """The properties of a device: ``arch`` (90 is sm_90), the bytes of shared memory that a block may have, the bytes
    of memory, and the number of multiprocessors."""

    arch: int
    most_shared: int
    total: int = 8 << 30
    multiprocessors: int = 132

    @classmethod
    def of(cls, arch: str) -> "Device":
        """Return the device that code for ``arch``, such as "sm_90", is compiled for."""
        gpu = BY_ARCH[arch]
        return cls(gpu.arch, gpu.shared_memory_per_block, multiprocessors=gpu.multiprocessors)


H100 = Device(90, 232448)
A100 = Device(80, 166912)
RTX_3090 = Device(86, 101376)


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


class CudaError(RuntimeError):
    """The error of a call, with its code and the driver's text."""

    def __init__(self, name: str, code: int, text: str):
        super().__init__(f"{name}: {text}")
        self.code = code


def built(library: str, source: str, options: Iterable[str] = ()) -> Path:
    """Return the shared library of ``source``. It is built once, in a folder named by a hash of its inputs."""
    command = ["g++", "-std=c++20", "-shared", "-fPIC", *options]
    read = b"".join(file.read_bytes() for file in sorted(SOURCES.iterdir()))
    name = hashlib.sha256(read + " ".join(command).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"stand-in-{os.getuid()}-{name}"
    folder.mkdir(exist_ok=True)
    if not (folder / library).exists():
        made = folder / f"{library}.{os.getpid()}"
        subprocess.run([*command, "-o", made, SOURCES / source], check=True)
        made.rename(folder / library)
    return folder / library


class StandIn:
    """The device of this process. The driver's calls are methods that raise errors, such as
    ``device.cudaFree(pointer)``."""

    def __init__(self):
        path = built("libcuda.so.1", "driver.cpp", ("-O1", "-Wl,-soname,libcuda.so.1"))
        self.library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        for name in ("stand_in_journal", "stand_in_place", "cudaGetErrorString"):
            getattr(self.library, name).restype = ctypes.c_char_p
        for name in ("stand_in_count", "stand_in_calls", "stand_in_access"):
            getattr(self.library, name).restype = ctypes.c_int64
        self.library.stand_in_shown.restype = ctypes.c_void_p
        self.library.stand_in_shown.argtypes = [ctypes.c_void_p]
        self.library.stand_in_place.argtypes = [ctypes.c_uint64]
        self.library.stand_in_label.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
        self._access = self.library.stand_in_access
        self._access.argtypes = [*[ctypes.c_void_p] * 2, ctypes.c_int64, ctypes.c_uint, *[ctypes.c_void_p] * 2]
        self._kept: tuple = ()
        self.arch = H100.arch
        self.start()

    def start(self, found: Callable[..., int] | None = None, launched: Callable[..., int] | None = None) -> None:
        """Start the device. ``found(image, size, name)`` returns a kernel's number; ``launched(number, x, y, z,
        arguments, count, early)`` runs the kernel and returns 0 or CUDA's error code. Without both, launches are
        checked and compute nothing.
        """
        self._kept = FOUND(found) if found else FOUND(), LAUNCHED(launched) if launched else LAUNCHED()
        self.library.stand_in_start(*self._kept)

    def become(self, device: Device) -> None:
        self.arch = device.arch
        given = device.arch, device.most_shared, ctypes.c_uint64(device.total), device.multiprocessors
        self.library.stand_in_device(*given)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return functools.partial(self._call, name, getattr(self.library, name))

    def _call(self, name: str, function: Callable[..., int], *arguments) -> None:
        fitting = (ctypes.c_size_t(each) if type(each) is int else each for each in arguments)
        if code := function(*fitting):
            text = self.library.cudaGetErrorString(code).decode()
            self.library.cudaGetLastError()
            raise CudaError(name, code, text)

    def fail(self, name: str = "", at: int = 1, code: int = 2) -> None:
        """Make a call of ``name`` fail: the ``at``-th from now, or every call if ``at`` is 0."""
        self.library.stand_in_fail(name.encode(), ctypes.c_int64(at), code)

    def calls(self, name: str) -> int:
        return self.library.stand_in_calls(name.encode())

    def recover(self) -> None:
        """Recover from a kernel error, which on a GPU needs a new process."""
        self.library.stand_in_recover()

    def say(self, text: str) -> None:
        """Make the current launch fail, with ``text`` as the reason."""
        self.library.stand_in_say(text.encode())

    def journal(self) -> list[str]:
        """Return the refused calls and the faults, one line each."""
        return self.library.stand_in_journal().decode().splitlines()

    def counts(self) -> dict[str, int]:
        """Return the number of handles of each kind that were not released."""
        return {kind: self.library.stand_in_count(kind.encode()) for kind in HANDLES}

    # --- addresses

    def place(self, address: int) -> str:
        """Return a description of an address: its allocation and the byte within it."""
        return self.library.stand_in_place(address).decode()

    def allocation(self, address: int) -> tuple[int, int, bool] | None:
        """Return the allocation that contains an address or precedes it: its first address, its bytes, and True if it
        is live."""
        begin, size, live = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_int()
        given = ctypes.byref(begin), ctypes.byref(size), ctypes.byref(live)
        if not self.library.stand_in_allocation(ctypes.c_uint64(address), *given):
            return None
        return begin.value, size.value, bool(live.value)

    def label(self, address: int, name: str) -> None:
        """Name an allocation for error messages."""
        self.library.stand_in_label(address, name.encode())

    def shown(self, address: int, size: int) -> ctypes.Array:
        """Return the memory at a device address, for tests to read and corrupt. Code under test has no access to it."""
        return (ctypes.c_char * size).from_address(self.library.stand_in_shown(address))
