"""Reports this machine's memory and the versions of installed packages, formats sizes, and sets torch's number of
threads.

It imports nothing of torch, because it must run before torch is imported.
"""

import importlib.metadata
import os
import time
from contextlib import suppress
from functools import cache
from pathlib import Path


def free_memory() -> int | None:
    """Return the bytes of memory that are free on this machine; None on systems other than Linux."""
    return linux_bytes("/proc/meminfo", "MemAvailable")


def size_text(count: int) -> str:
    """Return a number of bytes in the largest unit that does not round it to nothing."""
    if count >= 1e9:
        return f"{count / 1e9:,.1f} GB"
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count:,} bytes"


@cache
def slowness() -> float:
    """Return how many times a hundredth of a second this machine takes for a loop of Python, at best of several times:
    1 on a core of 2023 beside little other work. It is measured once."""

    def seconds() -> float:
        start = time.perf_counter()
        for number in range(100_000):
            number * number % 7
        return time.perf_counter() - start

    return min(seconds() for _ in range(5)) / 0.01


def linux_bytes(file: str, key: str) -> int | None:
    """Return the bytes in the line ``key`` of a file of Linux's /proc; None if there is no such line or file."""
    with suppress(OSError):
        for line in Path(file).read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return None


def version_of(package: str) -> str:
    """Return a version such as "2.13.0", or "not installed" if there is no metadata, as for an uninstalled source
    tree."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def leave_threads_to_xnnpack() -> None:
    """Start torch with one OpenMP thread, unless ``OMP_NUM_THREADS`` is set. Call it before torch is imported.

    XNNPACK and ExecuTorch's attention share a thread pool with one thread per core. In attention, each of these threads
    multiplies through torch's BLAS, which would start OpenMP threads of its own. On 2 cores that doubles the time of
    ``target_verify``. ``torch.set_num_threads`` does not help, because it affects the calling thread alone.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
