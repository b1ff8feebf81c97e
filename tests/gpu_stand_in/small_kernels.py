"""Kernels of a few lines, compiled without a GPU, to test the stand-in for the driver. It is obvious how a GPU runs
each of them."""

import ctypes
import hashlib
import pickle
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from stand_in_driver import Attribute, Configuration, StandIn
from stand_in_kernels import Kernels
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction


def add_one(X, OUT, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(OUT + at, tl.load(X + at, mask=at < n, other=0) + 1, mask=at < n)


def last_row(CACHE, OUT, slot, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(OUT + at, tl.load(CACHE + slot * WIDTH + at))


def last_row_in_64_bits(CACHE, OUT, slot, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(OUT + at, tl.load(CACHE + slot.to(tl.int64) * WIDTH + at))


def arrive(ARRIVED, OUT, programs):
    if tl.atomic_add(ARRIVED, 1) == programs - 1:
        tl.store(OUT, 1)
        tl.store(ARRIVED, 0)


def arrive_and_leave(ARRIVED, OUT, programs):
    if tl.atomic_add(ARRIVED, 1) == programs - 1:
        tl.store(OUT, 1)


def early(W, X, OUT, BLOCK: tl.constexpr):
    tl.extra.cuda.gdc_launch_dependents()
    at = tl.arange(0, BLOCK)
    weight = tl.load(W + at)
    tl.extra.cuda.gdc_wait()
    tl.store(OUT + at, weight * tl.load(X + at))


def early_with_its_input(W, X, OUT, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(X + at)
    tl.extra.cuda.gdc_wait()
    tl.store(OUT + at, tl.load(W + at) * value)


def early_with_its_output(W, X, OUT, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(OUT + at, tl.load(W + at))
    tl.extra.cuda.gdc_wait()


def early_with_lanes_of_both(W, X, OUT, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    places = tl.where(at < 40, (W + at).to(tl.uint64), (X + at).to(tl.uint64))
    value = tl.load(places.to(tl.pointer_type(tl.float32)))
    tl.extra.cuda.gdc_wait()
    tl.store(OUT + at, value)


def asks(RECORDS, X, NEXT, OUT, BLOCK: tl.constexpr, OF_NEXT: tl.constexpr):
    at = tl.arange(0, BLOCK)
    weight = tl.load(RECORDS + at)
    tl.extra.cuda.gdc_wait()
    tl.store(OUT + at, weight * tl.load(X + at))
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [NEXT.to(tl.uint64), OF_NEXT],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


def asks_beside_w(W, X, NEXT, OUT, BLOCK: tl.constexpr, OF_NEXT: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.extra.cuda.gdc_wait()
    tl.store(OUT + at, tl.load(W + at) * tl.load(X + at))
    each = NEXT.to(tl.uint64) + tl.arange(0, OF_NEXT // 16).to(tl.uint64) * 16
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [each, 16],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


def own_small_m_kernel(Q, X, OUT, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(OUT + at, tl.load(Q + at) * tl.load(X + at))


def asks_before_it_waits(RECORDS, X, NEXT, OUT, BLOCK: tl.constexpr, OF_NEXT: tl.constexpr):
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [NEXT.to(tl.uint64), OF_NEXT],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.extra.cuda.gdc_wait()
    at = tl.arange(0, BLOCK)
    tl.store(OUT + at, tl.load(RECORDS + at) * tl.load(X + at))


def asks_for_24_bytes(RECORDS, X, NEXT, OUT, BLOCK: tl.constexpr, OF_NEXT: tl.constexpr):
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [NEXT.to(tl.uint64), OF_NEXT],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


def two_apart(X, OUT, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    places = (X.to(tl.uint64) + 2 + at.to(tl.uint64) * 4).to(tl.pointer_type(tl.float32))
    tl.store(OUT + at, tl.load(places))


SIGNATURES: dict[str, tuple[Any, dict[str, str], dict[str, int]]] = {
    "add_one": (add_one, {"X": "*fp32", "OUT": "*fp32", "n": "i32"}, {"BLOCK": 64}),
    "last_row": (last_row, {"CACHE": "*i8", "OUT": "*i8", "slot": "i32"}, {"WIDTH": 16384, "BLOCK": 64}),
    "last_row_in_64_bits": (
        last_row_in_64_bits, {"CACHE": "*i8", "OUT": "*i8", "slot": "i32"}, {"WIDTH": 16384, "BLOCK": 64},
    ),
    "arrive": (arrive, {"ARRIVED": "*i32", "OUT": "*i32", "programs": "i32"}, {}),
    "arrive_and_leave": (arrive_and_leave, {"ARRIVED": "*i32", "OUT": "*i32", "programs": "i32"}, {}),
    **{
        function.__name__: (function, {"W": "*fp32", "X": "*fp32", "OUT": "*fp32"}, {"BLOCK": 64})
        for function in (
            early, early_with_its_input, early_with_its_output, early_with_lanes_of_both,
        )
    },
    "own_small_m_kernel": (own_small_m_kernel, dict.fromkeys(("Q", "X", "OUT"), "*fp32"), {"BLOCK": 64}),
    "asks_beside_w": (asks_beside_w, dict.fromkeys(("W", "X", "NEXT", "OUT"), "*fp32"), {"BLOCK": 64, "OF_NEXT": 256}),
    **{
        function.__name__: (
            function, dict.fromkeys(("RECORDS", "X", "NEXT", "OUT"), "*fp32"), {"BLOCK": 64, "OF_NEXT": size},
        )
        for function, size in ((asks, 256), (asks_before_it_waits, 256), (asks_for_24_bytes, 24))
    },
    "two_apart": (two_apart, {"X": "*fp32", "OUT": "*fp32"}, {"BLOCK": 16}),
}  # fmt: skip
THREADS = 32
SCALARS = {"i32": ctypes.c_int32}


def compiled(name: str, arch: int = 90) -> bytes:
    """Return the machine code of a kernel, a cubin compiled for pointers that are multiples of 16."""
    function, signature, constants = SIGNATURES[name]
    kinds = signature | dict.fromkeys(constants, "constexpr")
    aligned = {(at,): [["tt.divisibility", 16]] for at, kind in enumerate(signature.values()) if kind[0] == "*"}
    source = ASTSource(fn=JITFunction(function), signature=kinds, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 1}).asm["cubin"]


class SmallKernels:
    """Launches the kernels of this module on a device as a library does. ``arch`` is the architecture for which they
    are compiled."""

    def __init__(self, device: StandIn, names: Sequence[str] = tuple(SIGNATURES), arch: int = 90):
        self.device, folder = device, Path(tempfile.mkdtemp(prefix="small-kernels-"))
        self.images = {name: compiled(name, arch) for name in names}
        self.kernels = Kernels(device, [_kept(folder, name, image) for name, image in self.images.items()])
        self.modules: dict[str, ctypes.c_void_p] = {}

    def function(self, name: str) -> ctypes.c_void_p:
        """Load a module for the kernel, keep it in ``modules``, and return its function."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.device.cuModuleLoadData(ctypes.byref(module), self.images[name])
        self.modules[name] = module
        self.device.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
        return function

    def launch(
        self, name: str, *values: int, grid: tuple[int, int, int] = (1, 1, 1), threads: int = THREADS,
        stream: Any = None, shared: int = 0, function: ctypes.c_void_p | None = None,
        attributes: dict[int, int] | None = None,
    ) -> None:  # fmt: skip
        """Launch a kernel. ``values`` are addresses and numbers in the order of the signature; Triton's two pointers
        follow. ``attributes`` maps numbers of launch attributes to values; None is a plain launch."""
        kinds = [*SIGNATURES[name][1].values(), "*", "*"]
        given = [SCALARS.get(kind, ctypes.c_uint64)(value) for kind, value in zip(kinds, (*values, 0, 0))]  # noqa: B905
        places = (ctypes.c_void_p * len(given))(*(ctypes.addressof(each) for each in given))
        function = function or self.function(name)
        if attributes is None:
            self.device.cuLaunchKernel(function, *grid, threads, 1, 1, shared, stream, places, None)
            return
        listed = (Attribute * len(attributes))(*(Attribute(id=each, value=value) for each, value in attributes.items()))
        given = Configuration(*grid, threads, 1, 1, shared, 0, stream, ctypes.addressof(listed), len(listed))
        self.device.cuLaunchKernelEx(ctypes.byref(given), function, places, None)


def _kept(folder: Path, name: str, image: bytes) -> Path:
    """Write a kernel in the form that ``cuda_artifact.py`` keeps, and return the file."""
    function, signature, constants = SIGNATURES[name]
    lines = Path(__file__).read_text().split("\n\n\n")
    (text,) = (each for each in lines if each.startswith(f"def {name}("))
    aligned = {(at,): [["tt.divisibility", 16]] for at, kind in enumerate(signature.values()) if kind[0] == "*"}
    source = f"import triton\nimport triton.language as tl\n# 'configs': [{aligned}]\n@triton.jit\n{text}\n"
    kernel = {"name": name, "size": len(image), "source": source, "constants": constants}
    kernel["signature"] = signature | dict.fromkeys(constants, "constexpr")
    file = folder / f"{hashlib.sha256(image).hexdigest()}.pickle"
    file.write_bytes(pickle.dumps(kernel))
    return file
