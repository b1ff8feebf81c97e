"""Runs the CUDA C++ of the records' image for sm_90a on the CPU, with the instructions of the GPU emulated
(``device/warps.h``), and computes the same sums in NumPy."""

import ctypes
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
import triton_interpreter
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
from triton_interpreter import exact_dots

from eagle3.export.lowering.cuda.kernels import sums
from eagle3.export.lowering.cuda.kernels.int4.records import bulk_copy
from eagle3.export.lowering.cuda.kernels.int4.records.kernel import Shares
from eagle3.export.lowering.cuda.kernels.int4.records.layout import unpacked

ENTRY = "int4_records_small_m_kernel"
DEVICE = Path(__file__).with_name("device")
ORDERS = (
    "in turn, copies land at once",
    "in reverse, copies land late",
    "one warp first, the newest copy first",
    "mixed",
)
POINTERS, SIZES = ("x", "records", "next", "counters", "parts", "out"), ("copied", "copied_early", "asked")
NUMBERS = ("m", "n", "k", "programs", "shared", "of_next", "early", "activation", "row_tiles", "order")


class Launch(ctypes.Structure):
    """``Launch`` of ``warps.h``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((f"{name}_bytes", ctypes.c_int64) for name in POINTERS),
        *((name, ctypes.c_int) for name in NUMBERS),
        *((name, ctypes.c_int64) for name in SIZES),
    )


class Ran(NamedTuple):
    """A launch: its rows of a tile, tiles of rows and programs, and the bytes of weights that were copied, those before
    the wait, and those that L2 was asked for."""

    rows: int
    row_tiles: int
    programs: int
    copied: int
    copied_early: int
    asked: int


class Fault(Exception):
    """An act that the hardware leaves undefined."""


class Emulation:
    """The kernel's source, compiled once for the CPU for each number of rows. ``changes`` are edits of the source, by
    name, which are compiled beside it; "" is the source as it is."""

    def __init__(self, folder: Path, changes: Mapping[str, Callable[[str], str]] | None = None):
        source = bulk_copy.SOURCE.read_text()
        self.folder = folder
        self.sources = {"": source} | {name: change(source) for name, change in (changes or {}).items()}
        self.libraries: dict[int, ctypes.CDLL] = {}

    def library(self, rows: int) -> ctypes.CDLL:
        if rows not in self.libraries:
            file, names = self.folder / f"of_{rows}_rows.cpp", range(len(self.sources))
            text = [f"#define {name} {value}" for name, value in bulk_copy.fixed_sizes(rows).items()]
            text.append(f'#include "{DEVICE / "warps.h"}"')
            for number, source in zip(names, self.sources.values(), strict=True):
                text += [
                    f"#undef {ENTRY}",
                    f"#define {ENTRY} kernel_{number}",
                    f"namespace of_{number} {{",
                    source,
                    "}",
                ]
            text += [f"#define ENTRIES {', '.join(f'of_{number}::kernel_{number}' for number in names)}"]
            file.write_text("\n".join([*text, f'#include "{DEVICE / "warps.cpp"}"']))
            # No multiply and add are fused that the source does not fuse, as with nvcc.
            flags = "-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-ffp-contract=off", "-U_FORTIFY_SOURCE"
            subprocess.run(["g++", *flags, file, "-o", file.with_suffix(".so")], check=True, timeout=300)
            self.libraries[rows] = ctypes.CDLL(str(file.with_suffix(".so")))
            self.libraries[rows].run.restype = ctypes.c_char_p
        return self.libraries[rows]

    def host(self, name: str, *given: np.ndarray) -> np.ndarray:
        """Return what a function of ``warps.cpp`` computes for arrays of float32."""
        arrays = [np.ascontiguousarray(each, np.float32) for each in np.broadcast_arrays(*given)]
        out = np.empty(arrays[0].shape, np.float32)
        pointers = (each.ctypes.data_as(ctypes.c_void_p) for each in (*arrays, out))
        getattr(self.library(8), name)(*pointers, ctypes.c_int64(out.size))
        return out


class Emulated:
    """Stands for Triton's kernel in ``_launch_records``: runs the source, or an edit of it, on the CPU. The launches
    are in ``ran``."""

    def __init__(self, emulation: Emulation, order: int = 0, change: str = ""):
        self.emulation, self.order, self.change = emulation, order, list(emulation.sources).index(change)
        self.ran: list[Ran] = []

    def __getitem__(self, grid: tuple) -> Callable[..., None]:
        def launch(x: Tensor, records: Tensor, following: Tensor, counters: Tensor, parts: Tensor, out: Tensor, m: int,
                   **constants: Any) -> None:  # fmt: skip
            tensors = dict(zip(POINTERS, (x, records, following, counters, parts, out), strict=True))
            given = {name: tensor.data_ptr() for name, tensor in tensors.items()}
            given |= {f"{name}_bytes": tensor.nbytes for name, tensor in tensors.items()}
            made = bulk_copy.macros(constants)
            given |= {name: made[name.upper()] for name in NUMBERS if name.upper() in made}
            called = Launch(**given, m=m, row_tiles=grid[0], order=self.order)
            assert grid[1:] == (called.programs, 1)
            if error := self.emulation.library(made["ROWS"]).run(ctypes.byref(called), self.change):
                raise Fault(error.decode())
            self.ran.append(Ran(made["ROWS"], *grid[:2], called.copied, called.copied_early, called.asked))

        return launch


@contextmanager
def exact(emulation: Emulation) -> Iterator[None]:
    """Let Triton's interpreter round a fused multiply and add once, and take the host's exp and tanh."""

    def fma(_self: InterpreterBuilder, *given: TensorHandle) -> TensorHandle:
        return TensorHandle(emulation.host("fused", *(each.data for each in given)), given[0].dtype.scalar)

    def of_tensor(name: str) -> Callable[[tl.tensor], tl.tensor]:
        def run(x: tl.tensor) -> tl.tensor:
            return tl.core.tensor(TensorHandle(emulation.host(name, x.handle.data), x.dtype), x.type)

        return run

    functions = {"add_rn": triton_interpreter.LIBDEVICE.add_rn, "exp": of_tensor("exps"), "tanh": of_tensor("tanhs")}
    with (
        patch.object(triton_interpreter, "LIBDEVICE", SimpleNamespace(**functions)),
        patch.object(InterpreterBuilder, "create_fma", fma),
        exact_dots(),
    ):
        yield


def expected(emulation: Emulation, x: Tensor, packed: Tensor, share: Shares, activation: str = "") -> Tensor:
    """Compute what Triton's kernel computes, in its order of sums; an instruction of the tensor cores rounds once.
    Returns bfloat16 [M, N], or [M, N / 2] with an ``activation``."""
    rows, n, blocks = x.shape[0], packed.shape[0] * 32, packed.shape[1]
    qdata, scale, scale_step, zero, zero_step = (part.numpy() for part in unpacked(packed))
    q = np.stack([qdata & 15, qdata >> 4], -1).reshape(n, blocks, 8, 4, 2, 4).astype(np.float64)
    s = scale.reshape(n, blocks, 8).astype(np.float32) * scale_step.astype(np.float32)[..., None]
    z = -(zero.reshape(n, blocks, 8).astype(np.float32) * zero_step.astype(np.float32)[..., None])
    wide = x.double().numpy().reshape(rows, blocks, 8, 4, 2, 4) * 2.0**-33
    part, sum_x = 0, 0
    for half in (0, 1):  # 16 of a group
        given = wide[..., half, :].reshape(rows, blocks, 8, 16).transpose(1, 2, 3, 0)
        part = (q[..., half, :].reshape(n, blocks, 8, 16).transpose(1, 2, 0, 3) @ given + part).astype(np.float32)
        sum_x = (given.sum(2) + sum_x).astype(np.float32)  # block, group, row
    sum_x = sum_x[:, :, None]
    terms = emulation.host("fused", z.transpose(1, 2, 0)[..., None], sum_x, part)
    s = s.transpose(1, 2, 0)[..., None]
    total = np.zeros((n, rows), np.float32)
    tiles, programs = n // 64, share.count
    borders = {each * tiles * blocks // programs for each in range(programs)}
    for tile in range(tiles):
        own = np.concatenate([np.arange(32), n // 2 + np.arange(32)]) + tile * 32
        acc, parts = np.zeros((8, 64, rows), np.float32), []
        for block in range(blocks):
            if block and tile * blocks + block in borders:
                parts.append(acc)
                acc = np.zeros_like(acc)
            acc = emulation.host("fused", terms[block][:, own], s[block][:, own], acc)
        for number, groups in enumerate([*parts, acc]):
            for _ in range(3):
                groups = groups[0::2] + groups[1::2]
            total[own] = groups[0] * np.float32(2**33) + (total[own] if number else np.float32(-0.0))
    found = torch.from_numpy(total.T.copy())
    if not activation:
        return found.bfloat16()
    gate, up = (half.bfloat16().float().numpy() for half in found.chunk(2, -1))
    if activation == sums.SILU:
        gate = gate / (emulation.host("exps", -gate) + np.float32(1))
    else:
        inner = np.float32(0.7978845608028654) * (gate + np.float32(0.044715) * (gate * gate * gate))
        gate = np.float32(0.5) * gate * (np.float32(1) + emulation.host("tanhs", inner))
    return (torch.from_numpy(gate).bfloat16().float() * torch.from_numpy(up)).bfloat16()
