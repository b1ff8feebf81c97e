"""The memory of this machine."""

from contextlib import suppress
from pathlib import Path


def free_memory() -> int | None:
    """Return the bytes of memory that are free on this machine; None on systems other than Linux."""
    return linux_bytes("/proc/meminfo", "MemAvailable")


def linux_bytes(file: str, key: str) -> int | None:
    """Return the bytes in the line ``key`` of a file of Linux's /proc; None if there is no such line or file."""
    with suppress(OSError):
        for line in Path(file).read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return None
