"""The memory of this machine."""

from contextlib import suppress
from pathlib import Path


def free_memory() -> int | None:
    """Return the bytes that programs may still take on this machine; None on other systems than Linux."""
    return linux_bytes("/proc/meminfo", "MemAvailable")


def linux_bytes(file: str, key: str) -> int | None:
    """Return the bytes in the line ``key`` of one of Linux's own files; None without such a line or file."""
    with suppress(OSError):
        for line in Path(file).read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return None
