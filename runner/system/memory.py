"""The memory of this machine, and sizes in words."""

from contextlib import suppress
from pathlib import Path


def free_memory() -> int | None:
    """Return the bytes of memory that are free on this machine; None on systems other than Linux."""
    return linux_bytes("/proc/meminfo", "MemAvailable")


def size_text(count: int) -> str:
    """Return a number of bytes in the largest unit that does not round it to nothing."""
    if count >= 1e9:
        return f"{count / 1e9:,.1f} GB"
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count:,} bytes"


def linux_bytes(file: str, key: str) -> int | None:
    """Return the bytes in the line ``key`` of a file of Linux's /proc; None if there is no such line or file."""
    with suppress(OSError):
        for line in Path(file).read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return None
