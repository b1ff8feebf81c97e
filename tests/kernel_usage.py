"""What a Triton kernel takes of a GPU, compiled for it without one."""

import re
import subprocess
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from eagle3.export.lowering.cuda.kernels import small_m


def assert_two_programs_fit(kernel, types: list[str], constants: dict, arch: int, folder: Path) -> None:
    """On a multiprocessor of ``arch``; by tensor cores, from memory that is copied ahead. ``types`` are those of the
    arguments that are no constants."""
    signature = dict(zip(kernel.arg_names, types, strict=False)) | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, type in enumerate(types) if type.startswith("*")}
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(k),): v for k, v in constants.items()}, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": small_m._WARPS})
    assert compiled.metadata.shared <= 99 * 1024  # what a program may have on sm_86, sm_89 and sm_120
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK"))
    assert registers <= 128  # of 65,536 for 2 x 256 threads
    assert stack <= 8
    assert "mma.sync" in compiled.asm["ptx"]
    assert compiled.asm["ptx"].count("cp.async.cg.shared.global") > 0
