"""The image for sm_90a of the records' kernel of few rows: CUDA C++ whose weights come by bulk copies.

4.25 TB/s on 132 multiprocessors are 16 bytes a cycle of each; at 1 us of latency 32 KB must be on the way all the time.
The kernel of ``kernel.py`` has 28 KB for a part of its loop. This one keeps a ring of shared memory on the way,
``STAGES`` blocks of a program, which it fills before it waits for the kernel in front. Sums are added in the same
order by the same instructions, so results have the same bits. It was never timed.
"""

import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from eagle3.export.lowering.cuda.kernels.int4.records.layout import RECORD
from eagle3.export.lowering.cuda.kernels.small_m import WARPS
from eagle3.export.lowering.cuda.kernels.sums import GELU_TANH, SILU
from eagle3.export.patching.toolchain import cuda_home

SOURCE = Path(__file__).with_suffix(".cu")
STAGES = {8: 6, 16: 8}
"""The stages of a program's ring, by the rows of a tile: with 3 and 2 programs, 166 and 148 KB on a multiprocessor. A
program takes no more shared memory than sm_120 has, whose plain code may be launched with as much."""
ACTIVATIONS = {"": 0, SILU: 1, GELU_TANH: 2}
PITCH, BARS, ARRIVED = 36 * 4, 16, 16
"""Bytes of shared memory: of a warp's sums of a row, of a stage's barriers, and of the number of arrivals."""


def shared_bytes(rows: int) -> int:
    """Return the shared memory of a program with tiles of ``rows`` rows, 8 or 16."""
    return STAGES[rows] * (2 * RECORD + BARS) + WARPS * rows * PITCH + ARRIVED


def fixed_sizes(rows: int) -> dict[str, int]:
    """Return the macros of the source that depend on the rows of a tile alone."""
    return {"ROWS": rows, "STAGES": STAGES[rows], "SHARED_BYTES": shared_bytes(rows)}


def macros(constants: Mapping[str, Any]) -> dict[str, int]:
    """Return the macros of the source for the constants of Triton's kernel; ``M`` is among them only if it is
    constant."""
    named = {name: int(constants[name]) for name in ("N", "K", "PROGRAMS", "SHARED", "OF_NEXT", "EARLY")}
    given = {"M": int(constants["M"])} if "M" in constants else {}
    return named | given | fixed_sizes(constants["BLOCK_M"]) | {"ACTIVATION": ACTIVATIONS[constants["ACTIVATION"]]}


def parameters(constants: Mapping[str, Any]) -> list[int]:
    """Return the bytes of each parameter, Triton's two pointers to scratch memory among them."""
    return [8] * 6 + [4] * ("M" not in constants) + [8] * 2


def cubin(constants: Mapping[str, Any]) -> bytes:
    """Return the machine code for the constants of a launch of Triton's kernel. Raises RuntimeError with what nvcc
    says if it refuses the source."""
    return compiled(tuple(sorted(macros(constants).items())))


@cache
def compiled(defined: tuple[tuple[str, int], ...], form: str = "cubin") -> bytes:
    """Return the machine code, or the PTX if ``form`` is "ptx", for the macros of the source."""
    with tempfile.TemporaryDirectory() as folder:
        made, given = Path(folder) / "kernel", [f"-D{name}={value}" for name, value in defined]
        command = [cuda_home() / "bin" / "nvcc", f"-{form}", "-arch=sm_90a", "-std=c++17", "-fmad=false", *given]
        done = subprocess.run([*command, "-o", made, SOURCE], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"nvcc does not compile {SOURCE.name}: {' '.join(done.stderr.split())[:500]}")
        return made.read_bytes()
