"""Compiles a Triton kernel without a GPU, checks that its threads share no memory without a barrier, and returns the
GPU resources that it takes."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import triton
from machine_code.barriers import faults
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from eagle3.export.lowering.cuda.kernels import small_m
from eagle3.export.lowering.cuda.named_gpu import configurations

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED = 99 * 1024
"""Bytes of shared memory that a program may have on sm_86, sm_89 and sm_120."""


@dataclass(frozen=True)
class Usage:
    registers: int  # per thread
    stack: int  # spilled bytes per thread
    shared: int  # bytes of shared memory per program
    loop: tuple[str, ...]
    """Machine instructions of the main loop, by name: the longest loop with a product in it."""
    ptx: str

    def a_weight(self, weights: int, warps: int) -> float:
        """Return the number of instructions in the main loop per weight. ``weights`` is the number of weights in a
        program's block."""
        return len(self.loop) * 32 * warps / weights


def usage(
    kernel, types: list[str], constants: dict, arch: int, folder: Path, warps: int, registers: int | None = None,
    stages: int = 3,
) -> Usage:  # fmt: skip
    """Compile a kernel and return its usage. ``types`` are the types of the arguments that are not constants;
    ``registers`` is the largest number of registers that the kernel may take. The test fails if a barrier is
    missing."""
    signature = dict(zip(kernel.arg_names, types, strict=False)) | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, type in enumerate(types) if type.startswith("*")}
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(k),): v for k, v in constants.items()}, aligned)
    options = {"num_warps": warps, "maxnreg": registers, "num_stages": stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    assert faults(compiled.asm["ptx"], dict(enumerate(kernel.arg_names))) == []
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])

    command = [TOOLS / "nvdisasm", "-c", cubin]
    disassembly = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = configurations.usage(compiled.asm["cubin"])
    return Usage(registers, stack, compiled.metadata.shared, main_loop(disassembly), compiled.asm["ptx"])


def main_loop(disassembly: str) -> tuple[str, ...]:
    """Return the names of the instructions of the longest innermost loop that contains a product."""
    labels, names, back = {}, [], []
    for line in disassembly.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(names)
        if found := re.match(r"\s*/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)(.*);", line):
            target = re.search(r"`\((\.L_\w+)\)", found[2]) if found[1].startswith("BRA") else None
            if target and target[1] in labels:
                back.append((labels[target[1]], len(names)))
            names.append(found[1].split(".")[0])
    inner = [(a, b) for a, b in back if not any((c, d) != (a, b) and a <= c and d <= b for c, d in back)]
    loops = [tuple(names[a : b + 1]) for a, b in inner]
    return max((loop for loop in loops if "HMMA" in loop or "HGMMA" in loop), key=len, default=())


def assert_two_programs_fit(kernel, types: list[str], constants: dict, arch: int, folder: Path) -> Usage:
    """Assert that two programs of a kernel fit on a multiprocessor of ``arch``, with tensor cores and asynchronous
    copies. Return its usage."""
    found = usage(kernel, types, constants, arch, folder, small_m.WARPS)
    assert found.shared <= SHARED
    assert found.registers <= 128  # of 65,536 registers for 2 x 256 threads
    assert found.stack <= 8
    assert "mma.sync" in found.ptx
    assert found.ptx.count("cp.async.cg.shared.global") > 0
    return found
