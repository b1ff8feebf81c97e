"""A log of the memory accesses of one kernel launch, in the order in which the interpreter runs its programs."""

import linecache
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import NamedTuple

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

_NOT_KERNELS = (
    "/triton/runtime/",
    "/triton/language/",
    "/numpy/",
    "/unittest/",
    "/torch/",
    "/race_",
    "/triton_interpreter.py",
    "/contextlib.py",
)


class Site(NamedTuple):
    """A line of a kernel's source."""

    file: str
    line: int
    function: str
    text: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line} ({self.function}): {self.text}"


@cache
def _site(code: CodeType, line: int) -> Site:
    return Site(code.co_filename, line, code.co_name, linecache.getline(code.co_filename, line).strip())


def current_site() -> Site:
    """Return the kernel's line that is innermost on Python's stack."""
    frame = sys._getframe(1)
    while frame is not None:
        if not any(part in frame.f_code.co_filename for part in _NOT_KERNELS):
            return _site(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return Site("?", 0, "?", "")


@dataclass(eq=False)
class Access:
    """One load, store or atomic operation of one program."""

    number: int
    """Counts the accesses of a launch in the order of the run."""
    program: int
    interval: int
    """Barriers that the program had passed."""
    seen: Mapping[int, int]
    """The number by program: its intervals below this number happened before this access."""
    kind: str
    """load, store or atomic"""
    addresses: np.ndarray
    """uint64 [n], without those that the mask leaves out."""
    size: int
    """Bytes of an element."""
    site: Site
    values: np.ndarray | None = None
    """The stored values: unsigned integers [n] of ``size`` bytes."""
    scope: str = ""
    """The scope of an atomic: cta, gpu or sys."""

    @property
    def writes(self) -> bool:
        return self.kind != "load"

    @property
    def released_as(self) -> int:
        """The interval that another program must know for this access to happen before its own. A single thread makes
        an atomic, and it releases only the accesses before the last barrier."""
        return self.interval - 1 if self.kind == "atomic" else self.interval

    def is_before(self, other: "Access") -> bool:
        """Return True if this access happened before ``other``, an access of another program."""
        return self.released_as < other.seen.get(self.program, 0)

    def cells(self, width: int) -> np.ndarray:
        """Return the numbers of the units of ``width`` bytes that the access touches: [n * size / width]."""
        first = self.addresses // np.uint64(width)
        return (first[:, None] + np.arange(self.size // width, dtype=np.uint64)).ravel()

    def pieces(self, width: int) -> np.ndarray:
        """Return the bits that the access stores in each of its ``cells``."""
        return np.ascontiguousarray(self.values).view(f"u{width}")


class Reach:
    """Reads and writes the memory of kernels with the interpreter's own ``load`` and ``store``."""

    def __init__(self, load: Callable, store: Callable):
        self._load, self._store = load, store

    def peek(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Return the values at the addresses as unsigned integers of ``size`` bytes."""
        return self._load(interpreter.interpreter_builder, *_place(addresses, size), None, None, None, False).data

    def poke(self, addresses: np.ndarray, values: np.ndarray) -> None:
        pointers, everywhere = _place(addresses, values.itemsize)
        stored = TensorHandle(np.ascontiguousarray(values), pointers.dtype.element_ty)
        self._store(interpreter.interpreter_builder, pointers, stored, everywhere, None, None)


def _place(addresses: np.ndarray, size: int) -> tuple[TensorHandle, TensorHandle]:
    kind = tl.str_to_ty(f"*u{8 * size}", None)
    return TensorHandle(addresses, kind), TensorHandle(np.ones(addresses.shape, bool), tl.int1)


class Change(NamedTuple):
    """A write, with the bits that memory held before it."""

    addresses: np.ndarray
    before: np.ndarray
    atomic: bool


class Changes:
    """Records every change of memory since the launch began, so that it can be undone."""

    def __init__(self, reach: Reach):
        self._reach, self._made = reach, []

    def note(self, addresses: np.ndarray, size: int, atomic: bool = False) -> None:
        """Record the content of memory before it is written."""
        self._made.append(Change(addresses, self._reach.peek(addresses, size), atomic))

    def write(self, addresses: np.ndarray, values: np.ndarray) -> None:
        self.note(addresses, values.itemsize)
        self._reach.poke(addresses, values)

    def mark(self) -> int:
        return len(self._made)

    def take_back(self, mark: int = 0, atomics: bool = True) -> None:
        """Undo the changes since ``mark``; without ``atomics``, changes by atomic operations stay."""
        kept = []
        for change in reversed(self._made[mark:]):
            if change.atomic and not atomics:
                kept.append(change)
            else:
                self._reach.poke(change.addresses, change.before)
        self._made[mark:] = reversed(kept)

    def now(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the changed addresses and their current values."""
        return [(change.addresses, self._reach.peek(change.addresses, change.before.itemsize)) for change in self._made]

    def first_of_atomics(self) -> dict[int, tuple[int, int]]:
        """Map each address of an atomic to the value before the first one, and the element's size in bytes."""
        found: dict[int, tuple[int, int]] = {}
        for change in self._made:
            if change.atomic:
                for address, before in zip(change.addresses.tolist(), change.before.tolist(), strict=True):
                    found.setdefault(address, (before, change.before.itemsize))
        return found
