"""Compiles this package's kernels, or copies with a fault, to PTX for any architecture without a GPU.

python tests/gpu_stand_in/ptx_of_kernels.py
"""

import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import torch
import triton
from kernel_faults import kernels_alone
from machine_code.barriers import faults
from triton._C.libtriton import ir
from triton.compiler.compiler import ASTSource, make_backend
from triton.runtime import driver

from eagle3.export.lowering.cuda.kernels import (
    advance,
    attention,
    attention_chunk,
    bf16,
    int4_experts,
    int8_experts,
    int8_matmul,
    k_quant_matmul,
    k_quants,
    recurrent,
    small_m,
)
from eagle3.export.lowering.cuda.kernels.int4.records import kernel as int4_records
from eagle3.export.lowering.cuda.kernels.int4.records import matmul as int4_records_matmul
from eagle3.export.lowering.cuda.kernels.int4.tiles import kernel as int4
from eagle3.export.lowering.cuda.kernels.int4.tiles import matmul as int4_matmul
from eagle3.export.lowering.cuda.kernels.sums import GELU_TANH, SILU, counters
from eagle3.export.lowering.cuda.named_gpu.compiling import compiling
from eagle3.runner.system.gpus import BY_ARCH

TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.uint8: "*u8", torch.int8: "*i8",
    torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1",
}  # fmt: skip
OUTPUTS, INPUTS = 1024, 5376  # few enough outputs for programs to share K
TILES, BLOCKS = OUTPUTS // 128, INPUTS // 256


def on_meta(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


CODES, STEPS = on_meta(TILES, BLOCKS, 8, 128, 2), on_meta(TILES, BLOCKS, 128, 2, dtype=torch.float16)
INT4 = [on_meta(OUTPUTS, INPUTS // 2)], CODES, STEPS
PAIR = INT4[0] * 2, *(on_meta(2 * TILES, *part.shape[1:], dtype=part.dtype) for part in INT4[1:])
RECORDS = (on_meta(OUTPUTS // 32, BLOCKS, 4736),)
INT8 = (
    on_meta(OUTPUTS, INPUTS, dtype=torch.int8),
    on_meta(OUTPUTS, INPUTS // 32, dtype=torch.bfloat16),
    on_meta(OUTPUTS, INPUTS // 32, dtype=torch.int8),
)
BF16 = (on_meta(OUTPUTS, INPUTS, dtype=torch.bfloat16),)
K_QUANTS = {
    4: (INT4[0][0], None, CODES, STEPS),
    5: (INT4[0][0], on_meta(OUTPUTS // 4, INPUTS // 2), CODES, STEPS),
    6: (
        INT4[0][0],
        on_meta(OUTPUTS // 2, INPUTS // 2),
        on_meta(*CODES.shape, dtype=torch.int8),
        on_meta(TILES, BLOCKS, 128, 1, dtype=torch.float16),
    ),
}


def product(launch: Callable, rows: int, parts: tuple, **more) -> Callable:
    """Return a function that launches a product of ``rows`` rows with the weights ``parts``."""
    return lambda kernel: launch(kernel, on_meta(rows, INPUTS, dtype=torch.bfloat16), *parts, counters("meta"), **more)


def attends(
    width: int, groups: int, rows: int, divided: int, made: bool = False, int8: bool = False, window: int = 4096,
    adds: bool = False, **options,
) -> Callable:  # fmt: skip
    """Return a function that launches attention to 4096 positions, or to a ``window`` of them. With ``made``, the
    launch also computes queries, keys and values. With ``int8``, the cache holds codes. With ``adds``, it is the second
    launch, which adds the parts of a whole context."""
    heads, slots = 8 * groups, 4096
    tables = on_meta(rows, width, dtype=torch.bfloat16)
    query, cache = (
        on_meta(1, rows, heads, width, dtype=torch.bfloat16),
        on_meta(1, 8, slots, width, dtype=torch.int8 if int8 else torch.bfloat16),
    )
    scales = (on_meta(1, 8, slots, dtype=torch.float32),) * 2 if int8 else (None, None)
    starts, weight = (0, heads * width, (heads + 8) * width), on_meta(width, dtype=torch.bfloat16)
    outputs = on_meta(rows, (heads + 16) * width, dtype=torch.bfloat16)
    more = attention.Product(
        outputs, None, tables, tables, weight, weight, heads, starts, (1e-6,) * 3, 0.0, (width, width // 2, 1)
    )
    at = on_meta(rows, dtype=torch.int64)
    given = (
        query,
        cache,
        cache,
        at,
        at,
        counters("meta"),
        0.1,
        window,
        divided,
        0.0,
        None,
        *scales,
        more if made else None,
    )
    other = MagicMock()
    return lambda kernel: attention.launch((other, kernel) if adds else (kernel, other), *given, **options)


TILE = {"BLOCK_N": 32, "num_warps": 4, "num_stages": 2}


def attends_in_chunk(width: int, groups: int, rows: int, **options: int) -> Callable:
    """Return a function that launches attention of ``rows`` rows of a prefill to 4096 positions."""
    query = on_meta(1, rows, 8 * groups, width, dtype=torch.bfloat16)
    cache, at = on_meta(1, 8, 4096, width, dtype=torch.bfloat16), on_meta(rows, dtype=torch.int64)
    return lambda kernel: attention_chunk.launch_chunk(kernel, query, cache, cache, at, at, 0.1, 0.0, None, **options)


def int4_experts_of(activation: str) -> Callable:
    """Return a function that launches the kernel for four rows that choose 2 of 8 experts."""

    def launch(kernel: object) -> None:
        codes, scale = on_meta(8, 256, 256, dtype=torch.int8), on_meta(8, 16, 256, dtype=torch.bfloat16)
        chosen, factors = on_meta(4, 2, dtype=torch.int64), on_meta(4, 2, dtype=torch.float32)
        x = on_meta(4, 512, dtype=torch.bfloat16)
        int4_experts._launch_experts(kernel, x, codes, scale, chosen, factors, activation)

    return launch


def int8_experts_of(kernel: object) -> None:
    codes, scales = on_meta(8 * 256, 512, dtype=torch.int8), on_meta(8 * 256, 16, dtype=torch.bfloat16)
    zeros, bias = on_meta(8 * 256, 16, dtype=torch.int8), on_meta(8, 256, dtype=torch.bfloat16)
    x, chosen = on_meta(4, 512, dtype=torch.bfloat16), on_meta(4, 2, dtype=torch.int64)
    int8_experts._launch_experts(kernel, x, codes, scales, zeros, bias, chosen)


def recurs(rows: int, delta: bool = True, channels: bool = False) -> Callable:
    """Return a launch of rows of 4 heads of 128 x 128, or of the committed rows of a chunk: of the gated delta rule,
    of Kimi's (``channels``) or of Mamba 2."""

    def floats(*shape: int) -> torch.Tensor:
        return on_meta(*shape, dtype=torch.float32)

    keys, values, each, state = floats(2, rows, 128), floats(4, rows, 128), floats(4, rows), floats(4, 128, 128)
    decay = values if channels else each
    changes, at = floats(1, recurrent.SLOTS, 1, 6 * 128 + decay[:, 0].numel()), on_meta(1, dtype=torch.int64)
    given, other = (keys, keys, values, decay, each if delta else None, state), MagicMock()
    if rows <= recurrent.BLOCK:
        return lambda kernel: recurrent.launch_rows(kernel, *given, changes, at, at, values)
    rest = state, changes, at, at, on_meta(1, dtype=torch.bool), values
    return lambda kernel: recurrent.launch_chunk((kernel, other), *given, *rest)


def advances(kernel: object) -> None:
    at = on_meta(64, dtype=torch.int64)
    advance.launch(kernel, at, at, at, on_meta(1, dtype=torch.bool), at)


KERNELS: dict[str, tuple[triton.JITFunction, Callable]] = {
    "attention": (attention._attention_kernel, attends(128, 2, 4, 4, window=2048, **TILE)),
    "attention of a product": (attention._attention_kernel, attends(128, 2, 4, 4, made=True, window=2048, **TILE)),
    "attention of codes": (attention._attention_kernel, attends(128, 2, 4, 4, made=True, int8=True, **TILE)),
    "attention of wide heads": (attention._attention_kernel, attends(512, 8, 4, 4, made=True, **TILE)),
    "sums of attention": (attention.attention_sum_kernel, attends(512, 8, 4, 4, adds=True)),
    "attention of a chunk": (
        attention_chunk._attention_chunk_kernel,
        attends_in_chunk(64, 4, 128, BLOCK_M=128, **TILE),
    ),
    "advance": (advance._advance_kernel, advances),
    "recurrent rows": (recurrent._recurrent_rows_kernel, recurs(4)),
    "rows of Mamba 2": (recurrent._recurrent_rows_kernel, recurs(4, delta=False)),
    "rows of Kimi": (recurrent._recurrent_rows_kernel, recurs(4, channels=True)),
    "chunk of Kimi": (recurrent._recurrent_chunk_kernel, recurs(128, channels=True)),
    "chunk of Mamba 2": (recurrent._recurrent_chunk_kernel, recurs(128, delta=False)),
    "recurrent chunk": (recurrent._recurrent_chunk_kernel, recurs(128)),
    "int4": (int4.int4_small_m_kernel, product(int4._launch_int4, 4, INT4)),
    "int4 of 16 rows": (int4.int4_small_m_kernel, product(int4._launch_int4, 16, INT4)),
    "int4 of a gate": (int4.int4_small_m_kernel, product(int4._launch_int4, 4, PAIR, activation=GELU_TANH)),
    "int4 records": (int4_records.int4_records_small_m_kernel, product(int4_records._launch_records, 4, RECORDS)),
    "int4 records of a gate": (
        int4_records.int4_records_small_m_kernel,
        product(int4_records._launch_records, 4, RECORDS, activation=GELU_TANH),
    ),
    "int8": (small_m._int8_small_m_kernel, product(small_m._launch_int8, 4, INT8)),
    "bf16": (bf16._bf16_small_m_kernel, product(bf16._launch_bf16, 4, BF16)),
    "bf16 of a gate": (bf16._bf16_small_m_kernel, product(bf16._launch_bf16, 4, BF16, activation=SILU)),
    **{
        f"q{bits}_k": (k_quants._k_quant_small_m_kernel, product(k_quants._launch_k_quant, 4, K_QUANTS[bits]))
        for bits in K_QUANTS
    },
    "int4 experts": (int4_experts.int4_experts_small_m_kernel, int4_experts_of(GELU_TANH)),
    "int4 experts, down": (int4_experts.int4_experts_small_m_kernel, int4_experts_of("")),
    "int8 experts": (int8_experts._int8_experts_small_m_kernel, int8_experts_of),
    "large int4": (
        int4_matmul._int4_matmul_kernel,
        product(lambda kernel, *given: int4_matmul._launch_matmul(kernel, Recorded(), *given), 200, INT4),
    ),
    "large int4 records": (
        int4_records_matmul._int4_records_matmul_kernel,
        product(lambda kernel, *given: int4_records_matmul._launch_matmul(kernel, Recorded(), *given), 200, RECORDS),
    ),
    "large int8": (int8_matmul._int8_matmul_kernel, product(int8_matmul._launch_matmul, 200, INT8)),
    **{
        f"large q{bits}_k": (
            k_quant_matmul._k_quant_matmul_kernel,
            product(k_quant_matmul._launch_k_quant_matmul, 200, K_QUANTS[bits]),
        )
        for bits in K_QUANTS
    },
}
"""The kernels, and what launches each, by what they compute."""


class Recorded:
    """A stand-in for a kernel that records the arguments of its launches."""

    def __init__(self):
        self.calls: list[tuple[tuple, dict]] = []

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.calls.append((arguments, constants))


def ptx_of(kernel: triton.JITFunction, launch: Callable, arch: str) -> str:
    """Return a kernel's PTX, compiled for the arguments of its first launch. Numbers among them are not specialized."""
    recorded = Recorded()
    launch(recorded)
    arguments, constants = recorded.calls[0]
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in constants}
    types = [TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32" for value in arguments]
    signature = dict(zip(kernel.arg_names, types, strict=False)) | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, type in enumerate(types) if type.startswith("*")}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, places, aligned)
    with compiling(BY_ARCH[arch]):
        target = driver.active.get_current_target()
        backend = make_backend(target)
        chosen = backend.parse_options(options)
        context, stages, metadata = ir.context(), {}, {"target": target, **chosen.__dict__}
        ir.load_dialects(context)
        backend.load_dialects(context)
        backend.add_stages(stages, chosen, source.language)
        code = source.make_ir(
            target, chosen, backend.get_codegen_implementation(chosen), backend.get_module_map(), context
        )
        for stage in ("ttir", "ttgir", "llir", "ptx"):
            code = stages[stage](code, metadata)
    return code


def names_of(kernel: triton.JITFunction) -> dict[int, str]:
    """Return the names of a kernel's arguments by number."""
    return dict(enumerate(kernel.arg_names))


def edited(function: triton.JITFunction, old: str, new: str, folder: Path) -> triton.JITFunction:
    """Return a kernel from a copy of its module's source in which ``new`` replaces the one occurrence of ``old``."""
    source = Path(function.fn.__code__.co_filename).read_text()
    assert source.count(old) == 1, f"{source.count(old)} times {old!r}"
    copy = folder / f"edited_{abs(hash((function.fn.__name__, old, new)))}.py"
    copy.write_text(kernels_alone(source.replace(old, new)))
    names = dict(function.fn.__globals__)
    exec(compile(copy.read_text(), str(copy), "exec"), names)
    return names[function.fn.__name__]


if __name__ == "__main__":  # compiling every kernel for every architecture takes minutes
    found = 0
    for name, (kernel, launch) in KERNELS.items():
        for arch in BY_ARCH:
            lines = faults(ptx_of(kernel, launch, arch), names_of(kernel))
            found += len(lines)
            print(f"{name} for {arch}: {len(lines)} faults", *lines, sep="\n  ")  # noqa: T201
    sys.exit(bool(found))
