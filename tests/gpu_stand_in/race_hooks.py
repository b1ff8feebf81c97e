"""Reports the operations of Triton's interpreter to a ``race_detector.Detector``.

with watching(Detector()) as detector:
    ...  # launches kernels by the interpreter
assert not detector.findings, detector.report()
"""

import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from race_detector import Detector
from race_log import Reach
from race_memory import Memory
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

SEMANTICS = {"acquire": "acquire", "release": "release", "acquire_release": "acq_rel", "relaxed": "relaxed"}
SCOPES = {"gpu": "gpu", "cta": "cta", "system": "sys"}


OTHER = 0x3FC73FC73FC73FC7
"""Bits of a value near 1 in every floating type, in place of one that should be of no use."""


class _Result(TensorHandle):
    """The result of an atomic, which calls ``used`` when its value is first used."""

    def __init__(self, handle: TensorHandle, used: Callable[[], None]):
        self._used = None
        super().__init__(handle.data, handle.dtype, handle.attr)
        self._used = used

    @property
    def data(self) -> np.ndarray:
        if self._used is not None:
            used, self._used = self._used, None
            used()
        return self._data

    @data.setter
    def data(self, value: np.ndarray) -> None:
        self._data = value


def _bytes(pointers: TensorHandle) -> int:
    return np.dtype(interpreter._get_np_dtype(pointers.get_element_ty())).itemsize


def _chosen(
    detector: Detector, pointers: TensorHandle, mask: TensorHandle | np.ndarray, what: str
) -> tuple[np.ndarray, TensorHandle]:
    """Return the addresses of the elements that the launch may access, and the mask of these elements."""
    here = (mask.data if isinstance(mask, TensorHandle) else mask).astype(bool)
    addresses = pointers.data[here]
    if addresses.size:
        here[here] = inside = detector.inside(addresses, _bytes(pointers), what)
        addresses = addresses[inside]
    return addresses, TensorHandle(here, tl.int1)


def _hooks(detector: Detector) -> dict[str, Callable]:
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    rmw, cas = InterpreterBuilder.create_atomic_rmw, InterpreterBuilder.create_atomic_cas
    detector.reach = Reach(load, store)

    def create_masked_load(self, ptrs, mask, other, *rest):
        addresses, mask = _chosen(detector, ptrs, mask, "a load from")
        replaced = detector.load(addresses, _bytes(ptrs)) if addresses.size else None
        found = load(self, ptrs, mask, other, *rest)
        if replaced is not None:
            values = found.data[mask.data]
            values[replaced] = np.full(1, OTHER, np.uint64).view(values.dtype)[0]
            found.data[mask.data] = values
        return found

    def create_masked_store(self, ptrs, value, mask, *rest):
        addresses, mask = _chosen(detector, ptrs, mask, "a store to")
        if addresses.size:
            kind = interpreter._get_np_dtype(ptrs.get_element_ty())
            values = np.broadcast_to(value.data, ptrs.data.shape)[mask.data].astype(kind, copy=False)
            detector.store(addresses, kind.itemsize, values.view(f"u{kind.itemsize}"))
        return store(self, ptrs, value, mask, *rest)

    def create_atomic_rmw(self, op, ptr, val, mask, sem, scope):
        addresses, mask = _chosen(detector, ptr, mask, "an atomic on")
        used = detector.atomic(addresses, _bytes(ptr), SEMANTICS[_name(sem)], SCOPES[_name(scope)])
        return _Result(rmw(self, op, ptr, val, mask, sem, scope), used)

    def create_atomic_cas(self, ptr, cmp, val, sem, scope):
        detector.inside(ptr.data.ravel(), _bytes(ptr), "an atomic on")
        used = detector.atomic(ptr.data.ravel(), _bytes(ptr), SEMANTICS[_name(sem)], SCOPES[_name(scope)])
        return _Result(cas(self, ptr, cmp, val, sem, scope), used)

    def create_barrier(self):
        detector.barrier()

    hooks = create_masked_load, create_masked_store, create_atomic_rmw, create_atomic_cas, create_barrier
    return {hook.__name__: hook for hook in hooks}


def _name(value: Any) -> str:
    """Return the name of a member of one of the compiler's enumerations."""
    return value.name.lower()


def _know(memory: Memory, arguments: list[Any]) -> None:
    """Register the tensors among ``arguments``. Memory that is not known to be fresh counts as written."""
    for each in arguments:
        if isinstance(each, torch.Tensor):
            storage = each.untyped_storage()
            found = memory.at(storage.data_ptr()) if storage.nbytes() else None
            if found is None or (found.start, found.size) != (storage.data_ptr(), storage.nbytes()):
                memory.allocate(storage.data_ptr(), storage.nbytes(), "an argument", written=True)


def _launch(detector: Detector, of_arguments: bool) -> Callable:
    def run(self, *args, **kwargs):
        """Do the same as ``GridExecutor.__call__`` on host tensors, in the detector's order of programs."""
        kwargs = {name: value for name, value in kwargs.items() if name in inspect.getfullargspec(self.fn).args}
        for hook in self.pre_run_hooks:
            hook(*args, **kwargs)
        given = inspect.getcallargs(self.fn, *args, **kwargs)
        if of_arguments:
            _know(detector.memory, list(given.values()))
        scope = interpreter._patch_lang(self.fn)
        try:
            converted = {
                name: each if name in self.constexprs else interpreter._implicit_cvt(each)
                for name, each in given.items()
            }
            grid = self.grid(converted) if callable(self.grid) else self.grid
            grid = (*map(int, grid), 1, 1)[:3]
            builder = interpreter.interpreter_builder
            builder.set_grid_dim(*grid)

            def program(index: tuple[int, int, int]) -> None:
                builder.set_grid_idx(*index)
                self.fn(**converted)

            detector.run(self.fn.__name__, list(itertools.product(*map(range, grid))), program)
        except Exception as error:
            raise InterpreterError(repr(error)) from error
        finally:
            scope.restore()

    return run


_watching: list[Detector] = []


@contextmanager
def watching(detector: Detector, of_arguments: bool = False) -> Iterator[Detector]:
    """Check every launch of the interpreter. With ``of_arguments``, a launch may access only its tensor arguments, and
    memory allocated under ``fresh_memory`` counts as unwritten."""
    if of_arguments:
        detector.memory = Memory()
    _watching.append(detector)
    with ExitStack() as stack:
        stack.callback(_watching.remove, detector)
        stack.enter_context(patch.multiple(InterpreterBuilder, **_hooks(detector)))
        stack.enter_context(patch.object(GridExecutor, "__call__", _launch(detector, of_arguments)))
        yield detector


@contextmanager
def fresh_memory() -> Iterator[None]:
    """Report the memory that ``torch.empty`` and ``torch.empty_like`` allocate to the watching detector, if any, and
    fill it with bits that are NaN in every floating type."""
    memory = next((detector.memory for detector in reversed(_watching) if detector.memory is not None), None)
    if memory is None:
        yield
        return

    def told(make: Callable) -> Callable:
        def empty(*args, **kwargs) -> torch.Tensor:
            made = make(*args, **kwargs)
            storage = made.untyped_storage()
            if made.device.type == "cpu" and storage.nbytes():
                storage.fill_(255)
                start, size = storage.data_ptr(), storage.nbytes()
                memory.allocate(start, size, f"torch.empty of {tuple(made.shape)}", written=False)
                weakref.finalize(made, memory.free, start, size)
            return made

        return empty

    with patch.object(torch, "empty", told(torch.empty)), patch.object(torch, "empty_like", told(torch.empty_like)):
        yield
