"""Builds libraries with CUDA kernels as AOTInductor does, for small models."""

import torch
import triton
from triton.runtime import driver

from eagle3.export.lowering.cuda.kernels import bf16, k_quants, small_m
from eagle3.export.lowering.cuda.kernels.int4.tiles import kernel as int4
from eagle3.export.lowering.cuda.kernels.sums import counters
from eagle3.export.lowering.cuda.named_gpu.compiling import compiling
from eagle3.runner.system.gpus import BY_ARCH

POINTERS = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
}


def build(kernel, types, constants, warps, arch="sm_90", registers=None):
    """Compile a kernel. ``types`` are the types of the arguments that are not constants; pointers are aligned to 16
    bytes."""
    names = [name for name in kernel.arg_names if name not in constants]
    signature = dict(zip(names, types, strict=True)) | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, type in enumerate(types) if type != "i32"}
    source = triton.compiler.ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": warps, "maxnreg": registers}
    with compiling(BY_ARCH[arch]):
        return triton.compile(source, target=driver.active.get_current_target(), options=options)


def launch(**changed):
    return {
        "kernel": "int4_small_m_kernel_0",
        "grid": [400, 1, 1],
        "threads": 128,
        "shared_bytes": 40 << 10,
        "weight_bytes": 10**9,
        "buffer_bytes": [],
        "constants": {"N": 32000, "K": 256, "BLOCK_N": 64, "BLOCK_K": 128, "BLOCK_M": 1},  # 1,000 iterations
        "arguments": {},
        "count": 2,
    } | changed


# Gemma 4 31B's ``gate_proj``, whose loops are too long for a compiler to unroll, unlike those of gemma4-tiny.
OUTPUTS, INPUTS = 21504, 5376


TILES, BLOCKS = OUTPUTS // 128, INPUTS // 256


def on_meta(*shape, dtype=torch.uint8):
    return torch.empty(*shape, dtype=dtype, device="meta")


INT4_PARTS = [on_meta(OUTPUTS, INPUTS // 2)], on_meta(TILES, BLOCKS, 8, 128, 2), on_meta(TILES, BLOCKS, 128, 2)


INT8_PARTS = (
    on_meta(OUTPUTS, INPUTS, dtype=torch.int8),
    on_meta(OUTPUTS, 1, dtype=torch.bfloat16),
    on_meta(OUTPUTS, 1, dtype=torch.int8),
)


Q4_K = (on_meta(OUTPUTS, INPUTS // 2), None, INT4_PARTS[1], on_meta(TILES, BLOCKS, 128, 2, dtype=torch.float16))


Q5_K = (Q4_K[0], on_meta(OUTPUTS // 4, INPUTS // 2), *Q4_K[2:])


Q6_K = (
    Q4_K[0],
    on_meta(OUTPUTS // 2, INPUTS // 2),
    on_meta(TILES, BLOCKS, 8, 128, 2, dtype=torch.int8),
    on_meta(TILES, BLOCKS, 128, 1, dtype=torch.float16),
)


LAUNCHED = {
    "int4": (int4._launch_int4, int4.int4_small_m_kernel, INT4_PARTS),
    "int8": (small_m._launch_int8, small_m._int8_small_m_kernel, INT8_PARTS),
    "bf16": (bf16._launch_bf16, bf16._bf16_small_m_kernel, (on_meta(OUTPUTS, INPUTS, dtype=torch.bfloat16),)),
} | {
    name: (k_quants._launch_k_quant, k_quants._k_quant_small_m_kernel, parts)
    for name, parts in (("q4_k", Q4_K), ("q5_k", Q5_K), ("q6_k", Q6_K))
}


def launched(weight, rows):
    """Return the grid of a launch with ``rows`` rows, and the arguments for ``build``."""
    launch, kernel, parts = LAUNCHED[weight]
    calls = []

    class Recorded:
        def __getitem__(self, grid):
            return lambda *arguments, **constants: calls.append((grid, arguments, constants))

    launch(Recorded(), on_meta(rows, INPUTS, dtype=torch.bfloat16), *parts, counters("meta"))
    ((grid, arguments, constants),) = calls
    return grid, kernel, [pointer(value) for value in arguments], constants, constants.pop("num_warps")


def pointer(value):
    return f"*{POINTERS[value.dtype]}" if isinstance(value, torch.Tensor) else "i32"
