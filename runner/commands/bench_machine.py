"""Describes the machine of a measurement: the processor or GPU, and the versions of the packages."""

import os
import platform
from pathlib import Path

from eagle3.runner.system.versions import version_of

PACKAGES = "eagle3-export", "executorch", "torch"


def machine(backend: str | None) -> str:
    """Return a line with the GPU (for CUDA artifacts), the processor, the cores that this process may use, and the
    system."""
    parts = [f"{processor()}, {cores()} cores", f"{platform.system()} {platform.machine()}"]
    return ", ".join(([gpu()] if backend == "cuda" else []) + parts)


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpu() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


def versions() -> dict[str, str]:
    return {"Python": platform.python_version()} | {name: version_of(name) for name in PACKAGES}
