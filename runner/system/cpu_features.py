"""Checks that this processor has the CPU features that a package's wheels are built with.

Without them, importing the package kills the process without a message. Kernels that use further features are chosen at
run time. The check must run before NumPy is imported, and before torch, which imports NumPy.
"""

import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from eagle3.runner.system.machine import version_of

CPUINFO = Path("/proc/cpuinfo")
CORE_FIELDS = (
    *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),  # x86
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features"),  # Arm
)


@dataclass(frozen=True)
class Need:
    """The CPU features that the wheels of ``package`` need: ``names``, which Linux lists in ``field`` of /proc/cpuinfo.

    ``import_test`` is Python code. It succeeds if the installed package works without them, because it was built here.
    """

    package: str
    field: str
    names: tuple[str, ...]
    import_test: str
    advice: str


NEEDS = (
    Need(  # NumPy wheels need x86-64-v2 since 2.4
        "numpy",
        "flags",
        ("pni", "ssse3", "sse4_1", "sse4_2", "popcnt", "cx16", "lahf_lm"),
        "import numpy",
        "give a virtual machine the CPU type of its host, or type pip install 'numpy<2.4'",
    ),
    Need(  # the custom ops of ExecuTorch 1.5 need Armv8.1
        "executorch",
        "Features",
        ("atomics",),
        "from eagle3.runner.hosts.executorch_host import load_llm_ops, load_runtime; load_llm_ops(load_runtime())",
        "take a processor of Armv8.2 or later (a Raspberry Pi 5, not a 4), or build ExecuTorch on this one",
    ),
)


def check_cpu_features() -> None:
    """Raise ValueError if a package cannot be imported because CPU features are missing. Only Linux on x86 and Arm is
    checked."""
    need, lacking = lacking_cpu_features(CPUINFO)
    if need and lacking and subprocess.run([sys.executable, "-c", need.import_test], capture_output=True).returncode:
        raise ValueError(
            f"this processor has no {', '.join(lacking)} ({need.field} in {CPUINFO}), which {need.package} "
            f"{version_of(need.package)} is built with: {need.advice}"
        )


def processor(cpuinfo: Path = CPUINFO) -> str:
    """Return Linux's description of each kind of core of this processor, one line each. Kernels are chosen by these
    facts."""
    if not cpuinfo.is_file():
        return platform.processor()
    cores = [line.partition(":") for line in cpuinfo.read_text().splitlines()]
    return "\n".join(sorted({f"{name.strip()}:{value}" for name, _, value in cores if name.strip() in CORE_FIELDS}))


def lacks_avx512(cpuinfo: Path = CPUINFO) -> bool:
    """Return True for an x86 processor on which Linux lists no AVX-512."""
    field, listed = _listed_features(cpuinfo)
    return field == "flags" and "avx512f" not in listed


def first_level_cache() -> int:
    """Return the bytes of a core's first-level data cache, 0 if the system does not report it."""
    try:
        return max(os.sysconf("SC_LEVEL1_DCACHE_SIZE"), 0)
    except (ValueError, OSError):  # the C library is not glibc
        return 0


def lacking_cpu_features(cpuinfo: Path) -> tuple[Need | None, list[str]]:
    """Return the need that applies to this kind of processor, and the features of it that ``cpuinfo`` does not list."""
    field, listed = _listed_features(cpuinfo)
    need = next((need for need in NEEDS if need.field == field), None)
    return need, [name for name in need.names if name not in listed] if need else []


def _listed_features(cpuinfo: Path) -> tuple[str, list[str]]:
    """Return the field in which ``cpuinfo`` lists features, "" if there is none, and the features.

    Reads up to the first line with features; the file has such a line for each of possibly hundreds of cores.
    """
    fields = {need.field for need in NEEDS}
    if cpuinfo.is_file():
        with cpuinfo.open() as lines:
            for field, _, values in (line.partition(":") for line in lines):
                if field.strip() in fields:
                    return field.strip(), values.split()
    return "", []
