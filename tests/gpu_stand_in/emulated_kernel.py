"""Runs the CUDA C++ of the records' image for sm_90a on the CPU, with the instructions of the GPU emulated
(``device/warps.h``), and computes the same sums in NumPy."""

import ctypes
import hashlib
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from eagle3.export.lowering.cuda.kernels import sums
from eagle3.export.lowering.cuda.kernels.int4.records import bulk_copy
from eagle3.export.lowering.cuda.kernels.int4.records.kernel import Shares
from eagle3.export.lowering.cuda.kernels.int4.records.layout import unpacked

DEVICE = Path(__file__).with_name("device")
ORDERS = ("in turn, copies land at once", "in reverse, copies land late", "one warp first, the newest copy first", "mixed")
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
    """The results of a launch, bfloat16, and the bytes of weights that were copied, those before the wait, and those
    that L2 was asked for."""

    out: Tensor
    copied: int
    copied_early: int
    asked: int


class Fault(Exception):
    """What the hardware leaves undefined."""


@cache
def library(folder: Path, rows: int, source: str) -> ctypes.CDLL:
    """Compile the kernel's ``source`` for tiles of ``rows`` rows."""
    name = folder / hashlib.sha256(f"{rows}{source}".encode()).hexdigest()[:16]
    name.with_suffix(".cpp").write_text("\n".join([
        *(f"#define {each} {value}" for each, value in bulk_copy.fixed_sizes(rows).items()),
        f'#include "{DEVICE / "warps.h"}"', source, f'#include "{DEVICE / "warps.cpp"}"',
    ]))  # fmt: skip
    # No multiply and add are fused that the source does not fuse, as with nvcc.
    flags = "-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-ffp-contract=off", "-U_FORTIFY_SOURCE"
    made = name.with_suffix(".so")
    subprocess.run(["g++", *flags, name.with_suffix(".cpp"), "-o", made], check=True, timeout=100)
    loaded = ctypes.CDLL(str(made))
    loaded.run.restype = ctypes.c_char_p
    return loaded


class Emulated:
    """Stands for Triton's kernel in ``_launch_records``: runs the source on the CPU. ``change`` edits it. The launches
    are in ``ran``."""

    def __init__(self, folder: Path, order: int = 0, change: Callable[[str], str] = lambda source: source):
        self.folder, self.order, self.source = folder, order, change(bulk_copy.SOURCE.read_text())
        self.ran: list[Ran] = []

    def __getitem__(self, grid: tuple) -> Callable[..., None]:
        def launch(x: Tensor, records: Tensor, following: Tensor, counters: Tensor, parts: Tensor, out: Tensor, m: int,
                   **constants: Any) -> None:  # fmt: skip
            tensors = dict(zip(POINTERS, (x, records, following, counters, parts, out), strict=True))
            given = {name: tensor.data_ptr() for name, tensor in tensors.items()}
            given |= {f"{name}_bytes": tensor.nbytes for name, tensor in tensors.items()}
            made = bulk_copy.macros(constants)
            rows = made["ROWS"]
            given |= {name: made[name.upper()] for name in NUMBERS if name.upper() in made}
            called = Launch(**given, m=m, row_tiles=grid[0], order=self.order)
            assert grid[1:] == (called.programs, 1)
            if error := library(self.folder, rows, self.source).run(ctypes.byref(called)):
                raise Fault(error.decode())
            self.ran.append(Ran(out, called.copied, called.copied_early, called.asked))

        return launch


def of_host(lib: ctypes.CDLL, name: str, *given: np.ndarray) -> np.ndarray:
    """Return what a function of ``warps.cpp`` computes for arrays of float32."""
    shape = np.broadcast_shapes(*(each.shape for each in given))
    arrays = [np.ascontiguousarray(np.broadcast_to(each, shape), np.float32) for each in given]
    out = np.empty(shape, np.float32)
    pointers = (each.ctypes.data_as(ctypes.c_void_p) for each in (*arrays, out))
    getattr(lib, name)(*pointers, ctypes.c_int64(out.size))
    return out


def expected(
    lib: ctypes.CDLL, x: Tensor, packed: Tensor, share: Shares, activation: str = ""
) -> Tensor:
    """Compute what Triton's kernel computes, in its order of sums, with an instruction of the tensor cores rounded once:
    bfloat16 [M, N], or [M, N / 2] with an ``activation``."""
    rows, n, blocks = x.shape[0], packed.shape[0] * 32, packed.shape[1]
    qdata, scale, scale_step, zero, zero_step = (part.numpy() for part in unpacked(packed))
    q = np.stack([qdata & 15, qdata >> 4], -1).reshape(n, blocks, 8, 4, 2, 4).astype(np.float64)
    s = scale.reshape(n, blocks, 8).astype(np.float32) * scale_step.astype(np.float32)[..., None]
    z = -(zero.reshape(n, blocks, 8).astype(np.float32) * zero_step.astype(np.float32)[..., None])
    wide = x.double().numpy().reshape(rows, blocks, 8, 4, 2, 4) * 2.0**-33
    part, sum_x = 0, 0
    for half in (0, 1):
        part = (np.einsum("nbgck,mbgck->bgnm", q[..., half, :], wide[..., half, :]) + part).astype(np.float32)
        sum_x = (wide[..., half, :].sum((3, 4)) + sum_x).astype(np.float32)  # m, b, g
    sum_x = sum_x.transpose(1, 2, 0)[:, :, None]
    terms = of_host(lib, "fused", z.transpose(1, 2, 0)[..., None], sum_x, part)
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
            acc = of_host(lib, "fused", terms[block][:, own], s[block][:, own], acc)
        for number, groups in enumerate([*parts, acc]):
            for _ in range(3):
                groups = groups[0::2] + groups[1::2]
            total[own] = groups[0] * np.float32(2**33) + (total[own] if number else np.float32(-0.0))
    found = torch.from_numpy(total.T.copy())
    if not activation:
        return found.bfloat16()
    gate, up = (half.bfloat16().float().numpy() for half in found.chunk(2, -1))
    if activation == sums.SILU:
        gate = gate / (of_host(lib, "exps", -gate) + np.float32(1))
    else:
        inner = np.float32(0.7978845608028654) * (gate + np.float32(0.044715) * (gate * gate * gate))
        gate = np.float32(0.5) * gate * (np.float32(1) + of_host(lib, "tanhs", inner))
    return (torch.from_numpy(gate).bfloat16().float() * torch.from_numpy(up)).bfloat16()
