"""Compiles a Triton kernel for the arguments of a launch, without a GPU, and reads the resources that it takes."""

import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from machine_code.sass import disassembler
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime import driver

from eagle3.export.lowering.cuda.named_gpu import configurations
from eagle3.export.lowering.cuda.named_gpu.compiling import compiling
from eagle3.runner.system.gpus import BY_ARCH

TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.uint8: "*u8", torch.int8: "*i8",
    torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1",
}  # fmt: skip
SHARED = 99 * 1024
"""Bytes of shared memory that a program may have on sm_86, sm_89 and sm_120."""


class Recorded:
    """A stand-in for a kernel that records the grids and arguments of its launches."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple, dict]] = []
        self.grids: list[Any] = []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *arguments, **constants: self.calls.append((arguments, constants))


def source_of(kernel: triton.JITFunction, types: Sequence[str], constants: dict[str, Any]) -> ASTSource:
    """Return a kernel with its arguments' ``types``, of which the pointers are multiples of 16, and its constants."""
    signature = dict(zip(kernel.arg_names, types, strict=False)) | dict.fromkeys(constants, "constexpr")
    aligned = {(at,): [["tt.divisibility", 16]] for at, kind in enumerate(types) if kind.startswith("*")}
    return ASTSource(kernel, signature, {(kernel.arg_names.index(k),): v for k, v in constants.items()}, aligned)


def of_launch(kernel: triton.JITFunction, launch: Callable) -> tuple[ASTSource, dict[str, Any], Any, dict[str, Any]]:
    """Return a kernel for the arguments of its first launch, the compiler's options, the grid and the constants.
    Numbers among the arguments are not specialized."""
    recorded = Recorded()
    launch(recorded)
    arguments, constants = recorded.calls[0]
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in constants}
    types = [TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32" for value in arguments]
    return source_of(kernel, types, constants), options, recorded.grids[0], constants


def ptx_of(kernel: triton.JITFunction, launch: Callable, arch: str) -> str:
    """Return a kernel's PTX for ``arch``, compiled for the arguments of its first launch."""
    source, options, *_ = of_launch(kernel, launch)
    with compiling(BY_ARCH[arch]):
        target = driver.active.get_current_target()
        backend = make_backend(target)
        chosen = backend.parse_options(options)
        context, stages, metadata = ir.context(), {}, {"target": target, **chosen.__dict__}
        ir.load_dialects(context)
        backend.load_dialects(context)
        backend.add_stages(stages, chosen, source.language)
        made = backend.get_codegen_implementation(chosen), backend.get_module_map()
        code = source.make_ir(target, chosen, *made, context)
        for stage in ("ttir", "ttgir", "llir", "ptx"):
            code = stages[stage](code, metadata)
    return code


@dataclass(frozen=True)
class Usage:
    registers: int  # per thread
    stack: int  # spilled bytes per thread
    shared: int  # bytes of shared memory per program
    threads: int
    loop: tuple[str, ...]
    """Machine instructions of the main loop, by name: the longest loop with a product in it."""
    ptx: str
    grid: Any
    constants: dict[str, Any]

    @property
    def a_weight(self) -> float:
        """The instructions of the main loop per weight of a program's block."""
        return len(self.loop) * self.threads / (self.constants["BLOCK_N"] * self.constants["BLOCK_K"])


def usage(kernel: triton.JITFunction, launch: Callable, arch: str, native: bool = False) -> Usage:
    """Compile a kernel for the arguments of its first launch. ``native``: for ``arch`` alone, with wgmma or tcgen05, as
    where the GPU is at hand; otherwise as an export does for a named GPU."""
    source, options, grid, constants = of_launch(kernel, launch)
    if native:
        made = triton.compile(source, target=GPUTarget("cuda", BY_ARCH[arch].arch, 32), options=options)
    else:
        with compiling(BY_ARCH[arch]):
            made = triton.compile(source, target=driver.active.get_current_target(), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        command = [disassembler().with_name("nvdisasm"), "-c", file.name]
        disassembly = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    taken = *configurations.usage(made.asm["cubin"]), made.metadata.shared, 32 * made.metadata.num_warps
    return Usage(*taken, main_loop(disassembly), made.asm["ptx"], grid, constants)


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
