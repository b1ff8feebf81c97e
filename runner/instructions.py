"""Whether this processor has the instructions that NumPy's wheels begin at; PyTorch, ExecuTorch and XNNPACK begin lower
and choose kernels by what it has. It has to come before NumPy, and before torch, which imports it.
"""

import subprocess
import sys
from pathlib import Path

from eagle3.runner.contract.versions import version_of

CPUINFO = Path("/proc/cpuinfo")
X86_64_V2 = "pni", "ssse3", "sse4_1", "sse4_2", "popcnt", "cx16", "lahf_lm"
"""The level that NumPy's wheels for x86 begin at since 2.4, in Linux's names."""


def check_instructions() -> None:
    """Raises ValueError where NumPy could not be imported for want of instructions: it would be killed without a word,
    or say so only behind what torch makes of it. Other systems and processors are left alone."""
    lacking = lacking_instructions(CPUINFO)
    if lacking and subprocess.run([sys.executable, "-c", "import numpy"], capture_output=True).returncode:
        raise ValueError(
            f"this processor has no {', '.join(lacking)} (its flags in {CPUINFO}), which NumPy {version_of('numpy')} "
            "is built with: give a virtual machine the CPU type of its host, or type pip install 'numpy<2.4'"
        )


def lacking_instructions(cpuinfo: Path) -> list[str]:
    """Those of X86_64_V2 that are not among the first processor's flags; none where there are no such flags, as on
    Arm."""
    if not cpuinfo.is_file():
        return []
    with cpuinfo.open() as lines:
        flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), X86_64_V2)
    return [name for name in X86_64_V2 if name not in flags]
