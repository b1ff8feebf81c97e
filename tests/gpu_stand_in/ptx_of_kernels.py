"""Launches of this package's kernels in real sizes, on tensors without data, to compile them for any architecture.

python tests/gpu_stand_in/ptx_of_kernels.py     searches every kernel for missing barriers, for every architecture
"""

import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import torch
import triton
from kernel_faults import kernels_alone
from kernel_usage import Recorded, ptx_of
from machine_code.barriers import faults

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
from eagle3.runner.system.gpus import BY_ARCH

OUTPUTS, INPUTS = 1024, 5376  # few enough outputs for programs to share K
BFLOAT16, FLOAT32, INT64 = torch.bfloat16, torch.float32, torch.int64


def on_meta(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def int4_of(*outputs: int) -> tuple:
    tiles, blocks = sum(outputs) // 128, INPUTS // 256
    qdata = [on_meta(each, INPUTS // 2) for each in outputs]
    return qdata, on_meta(tiles, blocks, 8, 128, 2), on_meta(tiles, blocks, 128, 2, dtype=torch.float16)


INT4, PAIR, WIDE_PAIR = int4_of(OUTPUTS), int4_of(OUTPUTS, OUTPUTS), int4_of(21504, 21504)
QDATA, CODES, STEPS = INT4[0][0], *INT4[1:]
RECORDS = (on_meta(OUTPUTS // 32, INPUTS // 256, 4736),)
INT8_CODES = on_meta(OUTPUTS, INPUTS, dtype=torch.int8)


def int8_of(groups: int) -> tuple:
    return INT8_CODES, on_meta(OUTPUTS, groups, dtype=BFLOAT16), on_meta(OUTPUTS, groups, dtype=torch.int8)


INT8, INT8_BY_ROW = int8_of(INPUTS // 32), int8_of(1)
BF16 = (on_meta(OUTPUTS, INPUTS, dtype=BFLOAT16),)
Q6_STEPS = on_meta(*STEPS.shape[:3], 1, dtype=torch.float16)
K_QUANTS = {
    4: (QDATA, None, CODES, STEPS),
    5: (QDATA, on_meta(OUTPUTS // 4, INPUTS // 2), CODES, STEPS),
    6: (QDATA, on_meta(OUTPUTS // 2, INPUTS // 2), on_meta(*CODES.shape, dtype=torch.int8), Q6_STEPS),
}


def product(launch: Callable, rows: int, parts: tuple, **more) -> Callable:
    """Return a function that launches a product of ``rows`` rows with the weights ``parts``."""
    return lambda kernel: launch(kernel, on_meta(rows, INPUTS, dtype=BFLOAT16), *parts, counters("meta"), **more)


def large(launch: Callable) -> Callable:
    """Return what launches a kernel of many rows, without the one of few rows that it may launch instead."""
    return lambda kernel, *given, **more: launch(kernel, Recorded(), *given, **more)


def attends(
    width: int, groups: int, rows: int, divided: int, made: bool = False, int8: bool = False, window: int = 4096,
    adds: bool = False, plus: float = 0.0, rotary: tuple = (), bias: bool = False, **options,
) -> Callable:  # fmt: skip
    """Return a function that launches attention to 4096 positions, or to a ``window`` of them. With ``made``, the
    launch also computes queries, keys and values. With ``int8``, the cache holds codes. With ``adds``, it is the second
    launch, which adds the parts of a whole context."""
    heads, slots, weight = 8 * groups, 4096, on_meta(width, dtype=BFLOAT16)
    tables = on_meta(rows, width, dtype=BFLOAT16)
    query = on_meta(1, rows, heads, width, dtype=BFLOAT16)
    cache = on_meta(1, 8, slots, width, dtype=torch.int8 if int8 else BFLOAT16)
    scales = (on_meta(1, 8, slots, dtype=FLOAT32),) * 2 if int8 else (None, None)
    starts, outputs = (0, heads * width, (heads + 8) * width), on_meta(rows, (heads + 16) * width, dtype=BFLOAT16)
    biases, rotary = on_meta(outputs.shape[1], dtype=BFLOAT16) if bias else None, rotary or (width, width // 2, 1)
    norms = weight, weight, heads, starts, (1e-6,) * 3, plus, rotary
    at, other = on_meta(rows, dtype=INT64), MagicMock()
    given = query, cache, cache, at, at, counters("meta"), 0.1, window, divided, 0.0, None, *scales
    more = attention.Product(outputs, biases, tables, tables, *norms) if made else None
    return lambda kernel: attention.launch((other, kernel) if adds else (kernel, other), *given, more, **options)


TILE = {"BLOCK_N": 32, "num_warps": 4, "num_stages": 2}


def attends_in_chunk(width: int, groups: int, rows: int, codes: bool = False, **options: int) -> Callable:
    """Return a function that launches attention of ``rows`` rows of a prefill to 4096 positions."""
    query, at = on_meta(1, rows, 8 * groups, width, dtype=BFLOAT16), on_meta(rows, dtype=INT64)
    cache = on_meta(1, 8, 4096, width, dtype=torch.int8 if codes else BFLOAT16)
    given = query, cache, cache, at, at, 0.1, 0.0, None, *(on_meta(1, 8, 4096, dtype=FLOAT32),) * (2 * codes)
    return lambda kernel: attention_chunk.launch_chunk(kernel, *given, **options)


def int4_experts_of(activation: str, rows: int = 4) -> Callable:
    """Return a function that launches the kernel for rows that choose 2 of 8 experts."""
    codes, scale = on_meta(8, 256, 256, dtype=torch.int8), on_meta(8, 16, 256, dtype=BFLOAT16)
    chosen, factors = on_meta(rows, 2, dtype=INT64), on_meta(rows, 2, dtype=FLOAT32)
    given = on_meta(rows, 512, dtype=BFLOAT16), codes, scale, chosen, factors, activation
    return lambda kernel: int4_experts._launch_experts(kernel, *given)


def int8_experts_of(rows: int) -> Callable:
    codes, scales = on_meta(8 * 256, 512, dtype=torch.int8), on_meta(8 * 256, 16, dtype=BFLOAT16)
    zeros, bias = on_meta(8 * 256, 16, dtype=torch.int8), on_meta(8, 256, dtype=BFLOAT16)
    given = on_meta(rows, 512, dtype=BFLOAT16), codes, scales, zeros, bias, on_meta(rows, 2, dtype=INT64)
    return lambda kernel: int8_experts._launch_experts(kernel, *given)


def recurs(
    rows: int, delta: bool = True, channels: bool = False, keys: int = 2, heads: int = 4, d_k: int = 128, d_v: int = 128
) -> Callable:
    """Return a launch of rows, or of the committed rows of a chunk: of the gated delta rule, of Kimi's (``channels``)
    or of Mamba 2."""

    def floats(*shape: int) -> torch.Tensor:
        return on_meta(*shape, dtype=FLOAT32)

    query, value, each, state = (
        floats(keys, rows, d_k),
        floats(heads, rows, d_v),
        floats(heads, rows),
        (heads, d_k, d_v),
    )
    decay = floats(heads, rows, d_k) if channels else each
    width = keys * d_k + heads * d_v + decay[:, 0].numel()
    changes, at = floats(1, recurrent.SLOTS, 1, width), on_meta(1, dtype=INT64)
    given, other = (query, query, value, decay, each if delta else None, floats(*state)), MagicMock()
    if rows <= recurrent.BLOCK:
        return lambda kernel: recurrent.launch_rows(kernel, *given, changes, at, at, value)
    rest = floats(*state), changes, at, at, on_meta(1, dtype=torch.bool), value
    return lambda kernel: recurrent.launch_chunk((kernel, other), *given, *rest)


def advances(kernel: object) -> None:
    at = on_meta(64, dtype=INT64)
    advance.launch(kernel, at, at, at, on_meta(1, dtype=torch.bool), at)


ATTENTION, CHUNK = attention._attention_kernel, attention_chunk._attention_chunk_kernel
OF_INT4, OF_RECORDS = int4.int4_small_m_kernel, int4_records.int4_records_small_m_kernel
OF_BF16, OF_INT8 = bf16._bf16_small_m_kernel, small_m._int8_small_m_kernel
OF_Q, OF_EXPERTS = k_quants._k_quant_small_m_kernel, int4_experts.int4_experts_small_m_kernel
ROWS, CHUNKS = recurrent._recurrent_rows_kernel, recurrent._recurrent_chunk_kernel
LAUNCH_INT4, LAUNCH_RECORDS, LAUNCH_Q = int4._launch_int4, int4_records._launch_records, k_quants._launch_k_quant
KERNELS: dict[str, tuple[triton.JITFunction, Callable]] = {
    "attention": (ATTENTION, attends(128, 2, 4, 4, window=2048, **TILE)),
    "attention of a product": (ATTENTION, attends(128, 2, 4, 4, made=True, window=2048, **TILE)),
    "attention of codes": (ATTENTION, attends(128, 2, 4, 4, made=True, int8=True, **TILE)),
    "attention of wide heads": (ATTENTION, attends(512, 8, 4, 4, made=True, **TILE)),
    "sums of attention": (attention.attention_sum_kernel, attends(512, 8, 4, 4, adds=True)),
    "attention of a chunk": (CHUNK, attends_in_chunk(64, 4, 128, BLOCK_M=128, **TILE)),
    "advance": (advance._advance_kernel, advances),
    "recurrent rows": (ROWS, recurs(4)),
    "rows of Mamba 2": (ROWS, recurs(4, delta=False)),
    "rows of Kimi": (ROWS, recurs(4, channels=True)),
    "chunk of Kimi": (CHUNKS, recurs(128, channels=True)),
    "chunk of Mamba 2": (CHUNKS, recurs(128, delta=False)),
    "recurrent chunk": (CHUNKS, recurs(128)),
    "int4": (OF_INT4, product(LAUNCH_INT4, 4, INT4)),
    "int4 of 16 rows": (OF_INT4, product(LAUNCH_INT4, 16, INT4)),
    "int4 of a gate": (OF_INT4, product(LAUNCH_INT4, 4, PAIR, activation=GELU_TANH)),
    "int4 records": (OF_RECORDS, product(LAUNCH_RECORDS, 4, RECORDS)),
    "int4 records of a gate": (OF_RECORDS, product(LAUNCH_RECORDS, 4, RECORDS, activation=GELU_TANH)),
    "int8": (OF_INT8, product(small_m._launch_int8, 4, INT8)),
    "bf16": (OF_BF16, product(bf16._launch_bf16, 4, BF16)),
    "bf16 of a gate": (OF_BF16, product(bf16._launch_bf16, 4, BF16, activation=SILU)),
    **{f"q{bits}_k": (OF_Q, product(LAUNCH_Q, 4, K_QUANTS[bits])) for bits in K_QUANTS},
    "int4 experts": (OF_EXPERTS, int4_experts_of(GELU_TANH)),
    "int4 experts, down": (OF_EXPERTS, int4_experts_of("")),
    "int8 experts": (int8_experts._int8_experts_small_m_kernel, int8_experts_of(4)),
    "large int4": (int4_matmul._int4_matmul_kernel, product(large(int4_matmul._launch_matmul), 200, INT4)),
    "large int4 records": (
        int4_records_matmul._int4_records_matmul_kernel,
        product(large(int4_records_matmul._launch_matmul), 200, RECORDS),
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
