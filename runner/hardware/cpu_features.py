"""Whether this processor has the instructions that every kernel of a package's wheels may use: without them its import
ends the process without a word. Kernels that use more are chosen by what the processor has.

The check has to come before NumPy, and before torch, which imports it.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from eagle3.runner.console.versions import version_of

CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Need:
    """``names`` are among what Linux lists behind ``field``. ``trial`` is Python that ends well where ``package`` does
    without them, being no wheel."""

    package: str
    field: str
    names: tuple[str, ...]
    trial: str
    advice: str


NEEDS = (
    Need(  # x86-64-v2, since NumPy 2.4
        "numpy",
        "flags",
        ("pni", "ssse3", "sse4_1", "sse4_2", "popcnt", "cx16", "lahf_lm"),
        "import numpy",
        "give a virtual machine the CPU type of its host, or type pip install 'numpy<2.4'",
    ),
    Need(  # Armv8.1, in the custom ops of 1.5
        "executorch",
        "Features",
        ("atomics",),
        "from eagle3.runner.hosts.executorch_host import load_llm_ops, load_runtime; load_llm_ops(load_runtime())",
        "take a processor of Armv8.2 or later (a Raspberry Pi 5, not a 4), or build ExecuTorch on this one",
    ),
)


def check_instructions() -> None:
    """Raises ValueError where a package would not start for want of instructions. What is not Linux on x86 or Arm is
    left alone."""
    need, lacking = lacking_instructions(CPUINFO)
    if need and lacking and subprocess.run([sys.executable, "-c", need.trial], capture_output=True).returncode:
        raise ValueError(
            f"this processor has no {', '.join(lacking)} ({need.field} in {CPUINFO}), which {need.package} "
            f"{version_of(need.package)} is built with: {need.advice}"
        )


def lacking_instructions(cpuinfo: Path) -> tuple[Need | None, list[str]]:
    """Whose need a processor of this kind has to meet, by the first line that lists instructions, and what of it is not
    listed. No more is read: the file has such a line for each of what may be hundreds of processors."""
    needs = {need.field: need for need in NEEDS}
    if cpuinfo.is_file():
        with cpuinfo.open() as lines:
            for field, _, values in (line.partition(":") for line in lines):
                if need := needs.get(field.strip()):
                    listed = values.split()
                    return need, [name for name in need.names if name not in listed]
    return None, []
