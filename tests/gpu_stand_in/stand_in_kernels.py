"""Runs the kernels of an artifact by Triton's interpreter, on the stand-in's device memory.

1. Kernels: the source of a kernel is found by its machine code, and its arguments are checked against its signature.
2. Accesses: each load, store and atomic is checked against the allocations before it touches anything.
3. Early launches: before a program waits for the previous launches, it may only load memory that no launch writes.
4. Prefetches into L2: the bytes lie in one tensor, and the next matmul of few rows reads the weight that was asked for.
"""

import ast
import ctypes
import hashlib
import pickle
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import triton
import triton.language as tl
from stand_in_driver import StandIn
from torch._inductor.runtime import hints, triton_helpers
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle
from triton_interpreter import LIBDEVICE, mended

from eagle3.runner.system.gpus import launch_on

ILLEGAL_ADDRESS, MISALIGNED, FAILED = 700, 716, 719
NUMBERS = {
    "i1": ctypes.c_int8, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64,
    "u8": ctypes.c_uint8, "u16": ctypes.c_uint16, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float,
}  # fmt: skip
FEW_ROWS, WEIGHTS = "_small_m_kernel", ("RECORDS", "W")
"""The names of kernels for matmuls of few rows have this ending. Those that ask L2 for weights read their own from one
of these arguments."""
NUMPY = {"i1": bool, "fp32": np.float32} | {f"{s}{n}": f"{s}{n // 8}" for s in "iu" for n in (8, 16, 32, 64)}


class Wrong(Exception):
    """A fault for which a GPU would refuse a kernel, with CUDA's code for it."""

    def __init__(self, code: int, text: str):
        super().__init__(text)
        self.code = code


# --- 1. Kernels


class Kernel:
    """A kernel with its source, as ``cuda_artifact.py`` kept it."""

    def __init__(self, file: Path):
        kept = pickle.loads(file.read_bytes())
        self.sha256, self.file = file.stem, file.with_suffix(".py")
        self.name, self.size, self.source = kept["name"], kept["size"], kept["source"]
        self.signature: dict[str, str] = kept["signature"]
        self.constants: dict[str, Any] = kept["constants"]
        self.cards: list[dict[str, Any]] = kept.get("cards", [])
        (alignments,) = ast.literal_eval(re.search(r"'configs': (\[.*?\}\])", self.source)[1])
        names = list(self.signature)
        self.aligned = [names[place] for (place,), hints in alignments.items() if ["tt.divisibility", 16] in hints]

    def is_in(self, image: int) -> bool:
        return hashlib.sha256(ctypes.string_at(image, self.size)).hexdigest() == self.sha256

    @cached_property
    def function(self) -> InterpretedFunction:
        """The kernel's function without Inductor's decorators and imports, which only Inductor's own launches need."""
        needed = {"triton_helpers": triton_helpers, "libdevice": LIBDEVICE, "tl_math": tl.math, **vars(hints)}
        given = {"triton": triton, "tl": tl, "triton_heuristics": Undecorated(), "__name__": self.name, **needed}
        drop = ("from torch", "import torch", "triton_helpers.set_driver_to_gpu")
        lines = ("" if line.startswith(drop) else line for line in self.source.splitlines())
        self.file.write_text("\n".join(lines))  # the interpreter asks Python for a function's lines
        exec(compile(self.file.read_text(), str(self.file), "exec"), given)
        return given[self.name]

    @property
    def launched_with(self) -> list[str]:
        """The names of the arguments of a launch, in order."""
        return [name for name, kind in self.signature.items() if kind != "constexpr"]

    def values(self, arguments: Any, count: int) -> dict[str, int | float]:
        """Return the values of a launch by name. ``arguments`` has the addresses of all values except constants; Triton
        adds pointers of its own."""
        names = self.launched_with
        if not len(names) <= count <= len(names) + 2:
            raise Wrong(1, f"{self.name} has {len(names)} arguments, its machine code {count}")
        found = {}
        for place, name in enumerate(names):
            kind = self.signature[name]
            number = ctypes.c_uint64 if kind.startswith("*") else NUMBERS[kind]
            found[name] = number.from_address(arguments[place]).value
        return found

    def __call__(self, grid: tuple[int, int, int], values: dict[str, int | float], arch: int) -> None:
        """Run the image that a GPU of this compute capability takes."""
        taken = launch_on({"grid": grid, "constants": self.constants, "cards": self.cards}, arch)
        constants = taken["constants"]
        given = {name: value for name, value in constants.items() if self.signature.get(name) == "constexpr"}
        self.function[grid](**given, **{name: argument(self.signature[name], value) for name, value in values.items()})


class Undecorated:
    def __getattr__(self, name: str):
        return lambda *args, **kwargs: lambda kernel: kernel


def argument(kind: str, value: int | float) -> tl.tensor:
    """Return a value for the interpreter with the type in the signature."""
    dtype = tl.str_to_ty(kind, None)
    data = np.array([value], dtype=np.uint64 if dtype.is_ptr() else NUMPY[kind])
    return tl.tensor(TensorHandle(data, dtype), dtype)


class Launch(NamedTuple):
    """The current launch. ``arguments`` has the values of all arguments except constants; the value of a pointer is an
    address."""

    kernel: Kernel
    grid: tuple[int, int, int]
    arguments: dict[str, int | float]
    early: bool = False

    @property
    def pointers(self) -> dict[str, int]:
        return {name: value for name, value in self.arguments.items() if self.kernel.signature[name].startswith("*")}


class Kernels:
    """The kernels that Python runs for the stand-in. ``launches`` counts the launches over each grid so far;
    ``running`` is the launch that runs now.
    """

    def __init__(self, device: StandIn, files: list[Path]):
        self.device, self.kernels = device, [Kernel(file) for file in files]
        self.launches: Counter[str] = Counter()
        self.computes = True
        """False: launches are checked, and leave memory as it is."""
        self.running: Launch | None = None
        self.waits = False
        """True while the program that runs now has yet to wait for the launches before it."""
        self.written: set[int] = set()
        """First addresses of the allocations that launches have written to."""
        self.announced = 0
        """The weight that the last matmul of few rows asks L2 for, which the next one must read; 0 for none."""
        device.start(self._found, self._launched)

    def _found(self, image: int, size: int, name: bytes) -> int:
        named = (number for number, kernel in enumerate(self.kernels) if kernel.name == name.decode())
        return next((number for number in named if self.kernels[number].is_in(image)), -1)

    def _launched(self, number: int, x: int, y: int, z: int, arguments: Any, count: int, early: int) -> int:
        kernel = self.kernels[number]
        try:
            self.running = Launch(kernel, (x, y, z), kernel.values(arguments, count), bool(early))
            self._check(self.running)
            self._check_announced(self.running)
            self.launches[str([x, y, z])] += 1
            if self.computes:
                kernel(self.running.grid, self.running.arguments, self.device.arch)
                self.end_program()
                self._look_behind(self.running)
            return 0
        except BaseException as error:  # a callback cannot raise
            self.announced = 0
            wrong = _cause(error)
            self.device.say(f"{kernel.name}: {wrong}" if isinstance(wrong, Wrong) else f"{kernel.name}: {error!r}")
            return wrong.code if isinstance(wrong, Wrong) else FAILED
        finally:
            self.running, self.waits = None, False

    def begin_program(self) -> None:
        """Begin a program, which ends the previous one."""
        self.end_program()
        self.waits = self.running is not None and self.running.early

    def end_program(self) -> None:
        if self.waits:
            raise Wrong(FAILED, f"{self.running.kernel.name} is launched early and does not wait for what is before it")

    def note_access(self, addresses: np.ndarray, what: str) -> None:
        """Raise Wrong for an access of an early launch that precedes its wait and may conflict with another launch.

        Any earlier launch may still run then, not only the last one, since that one lets the next begin before it has
        waited itself. So nothing may be written, and nothing read that any launch has written. The parts of programs
        before their waits then commute with all launches, in any order of programs.
        """
        if what == "reads" and not self.waits:
            return
        while addresses.size:
            address = int(addresses.min())
            home, size, _ = self.device.allocation(address)
            if self.waits and (what != "reads" or home in self.written):
                raise Wrong(FAILED, f"{what} {self.named(address)} before it waits for the launches before it")
            if what != "reads":
                self.written.add(home)
            addresses = addresses[addresses >= home + size]

    def note_prefetch(self, address: int, size: int) -> None:
        """Raise Wrong for a prefetch into L2 of bytes outside a tensor, or, before a wait, of memory that a launch
        writes."""
        found = self.device.allocation(address)
        if found is None or not found[2] or not found[0] <= address <= address + size <= found[0] + found[1]:
            raise Wrong(ILLEGAL_ADDRESS, f"asks L2 for {size} bytes at {address:#x}: {self.named(address)}")
        if self.waits and found[0] in self.written:
            raise Wrong(FAILED, f"asks L2 for {self.named(address)} before it waits for the launches before it")

    def _check_announced(self, launch: Launch) -> None:
        """Check that a matmul of few rows reads the weight that the one before it asked L2 for, and note what it asks
        for."""
        if FEW_ROWS not in launch.kernel.name and "OF_NEXT" not in launch.kernel.constants:
            return
        weight = next((launch.pointers[name] for name in WEIGHTS if name in launch.pointers), 0)
        if self.announced not in (0, weight):
            read, asked = self.device.place(weight) if weight else "other weights", self.device.place(self.announced)
            raise Wrong(FAILED, f"reads {read}, where the launch before it asked L2 for {asked}")
        self.announced = launch.pointers["NEXT"] if launch.kernel.constants.get("OF_NEXT") else 0

    def _check(self, launch: Launch) -> None:
        """Check that pointers point to live device memory, and that values declared divisible by 16 are divisible by
        16."""
        for name, address in launch.pointers.items():
            found = self.device.allocation(address)
            if found is None or not found[2] or not address < found[0] + found[1]:
                raise Wrong(ILLEGAL_ADDRESS, f"argument {name} is {address:#x}: {self.device.place(address)}")
        for name in launch.kernel.aligned:
            if launch.arguments[name] % 16:
                raise Wrong(MISALIGNED, f"argument {name} is {launch.arguments[name]:#x}, compiled for multiples of 16")

    def _look_behind(self, launch: Launch) -> None:
        """Check that counters are zero between launches."""
        if address := launch.pointers.get("ARRIVED"):
            begin, size, _ = self.device.allocation(address)
            if np.frombuffer(self.device.shown(begin, size), np.uint8).any():
                place = self.device.place(begin)
                raise Wrong(FAILED, f"the counters in argument ARRIVED are not zero after the launch: {place}")

    def named(self, address: int) -> str:
        """Return a description of an address: the nearest argument, and the allocation."""
        pointers = self.running.pointers if self.running else {}
        if not pointers:
            return self.device.place(address)
        name = min(pointers, key=lambda each: abs(address - pointers[each]))
        return f"byte {address - pointers[name]} of argument {name}, {self.device.place(address)}"


def _cause(error: BaseException) -> BaseException:
    while isinstance(error, InterpreterError) and error.__cause__ is not None:
        error = error.__cause__
    return error


# --- 2. Accesses


def shown(kernels: Kernels, ptrs: TensorHandle, mask: np.ndarray | None, what: str) -> TensorHandle:
    """Return the host's pointers in place of ``ptrs``. Raises Wrong for the first access that a GPU would refuse."""
    element = ptrs.get_element_ty()
    places = np.ascontiguousarray(ptrs.data, dtype=np.uint64)
    wanted = np.ones(places.shape, bool) if mask is None else np.ascontiguousarray(mask, dtype=bool)
    assert wanted.shape == places.shape
    instead, code = np.empty_like(places), ctypes.c_int()
    bytes_of_one = max(1, element.primitive_bitwidth // 8)
    wrong = kernels.device._access(
        places.ctypes.data, wanted.ctypes.data, places.size, bytes_of_one, instead.ctypes.data, ctypes.byref(code)
    )
    if wrong >= 0:
        why = "" if code.value == ILLEGAL_ADDRESS else "not aligned, "
        address = int(places.flat[wrong])
        raise Wrong(code.value, f"{what} {bytes_of_one} bytes at {address:#x}: {why}{kernels.named(address)}")
    kernels.note_access(places[wanted], what)
    return TensorHandle(instead, ptrs.dtype)


@contextmanager
def on_device(kernels: Kernels) -> Iterator[None]:
    """Make the interpreter's loads, stores and atomics access device memory only. Other hooks are patched within this
    context and get device addresses."""
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    swap, change = InterpreterBuilder.create_atomic_cas, InterpreterBuilder.create_atomic_rmw
    place = InterpreterBuilder.set_grid_idx

    def loaded(self, ptrs, mask, *rest):
        return load(self, shown(kernels, ptrs, mask.data, "reads"), mask, *rest)

    def stored(self, ptrs, value, mask, *rest):
        return store(self, shown(kernels, ptrs, mask.data, "writes"), value, mask, *rest)

    def swapped(self, ptr, *rest):
        return swap(self, shown(kernels, ptr, None, "swaps"), *rest)

    def changed(self, operation, ptr, value, mask, *rest):
        return change(self, operation, shown(kernels, ptr, mask.data, "changes"), value, mask, *rest)

    def placed(self, x, y, z):
        kernels.begin_program()
        place(self, x, y, z)

    def asked(_self, address, size):
        kernels.note_prefetch(address, size)

    def waited():
        kernels.waits = False

    waits = patch.multiple(tl.extra.cuda, gdc_wait=waited, gdc_launch_dependents=lambda: None)
    with (
        waits,
        patch.object(InterpreterBuilder, "asked_l2", asked, create=True),
        patch.multiple(
            InterpreterBuilder,
            set_grid_idx=placed,
            create_masked_load=loaded,
            create_masked_store=stored,
            create_atomic_cas=swapped,
            create_atomic_rmw=changed,
        ),
    ):
        yield


def _max_with_index(value, index, dim):
    """Return the maximum and its index. Inductor's own function loops over the elements."""
    data = value.handle.data
    first = np.argmax(data, axis=dim, keepdims=True)  # a NaN is the maximum, as in Inductor's function
    return tuple(
        _tensor(np.take_along_axis(each.handle.data, first, dim).squeeze(dim), each) for each in (value, index)
    )


def _tensor(data: np.ndarray, like: tl.tensor) -> tl.tensor:
    dtype = like.dtype.scalar
    return tl.tensor(TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)) if data.ndim else dtype)


@contextmanager
def interpreted(kernels: Kernels) -> Iterator[None]:
    """Make launches compute within this context, in their order on the stream."""
    fast = patch.object(triton_helpers, "max_with_index", _max_with_index)
    rows_behind = np.errstate(all="ignore")  # in rows after the last, which are not stored
    with mended(), on_device(kernels), fast, rows_behind:
        yield
