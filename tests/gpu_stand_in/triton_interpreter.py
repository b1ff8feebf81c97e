"""Runs kernels in Triton's interpreter, with the fixes that the tests need."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.experimental.gluon  # noqa: F401  (imported first, before the language's own kernels are wrapped)
import triton.language as tl
from race_hooks import fresh_memory
from triton.language.semantic import TritonSemantic
from triton.runtime import JITFunction, interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle
from triton_types import shared_shapes


def _widen(handle: TensorHandle) -> np.ndarray:
    return (handle.data.astype(np.uint32) << 16).view(np.float32) if handle.dtype.scalar == tl.bfloat16 else handle.data


def _dot(self, a, b, d, *_) -> TensorHandle:
    return TensorHandle(np.matmul(_widen(a), _widen(b), dtype=np.float32) + d.data, d.dtype.scalar)


def _exact_dot(self, a, b, d, *_) -> TensorHandle:
    products = np.matmul(_widen(a).astype(np.float64), _widen(b).astype(np.float64))
    return TensorHandle((products + d.data).astype(np.float32), d.dtype.scalar)


@contextmanager
def exact_dots() -> Iterator[None]:
    """Add the products of a dot in float64. In float32 NumPy adds those of 8 and of 16 columns in different orders,
    while an instruction of a tensor core takes 8 columns in either case."""
    with mock.patch.object(InterpreterBuilder, "create_dot", _exact_dot):
        yield


_cast_as_it_comes = InterpreterBuilder.cast_impl


def _cast(self, src, dst_type) -> TensorHandle:
    if src.dtype.scalar == dst_type.scalar == tl.bfloat16:
        return src
    if src.dtype.scalar == tl.bfloat16:
        src = TensorHandle(_widen(src), tl.float32)
    if dst_type.scalar != tl.bfloat16:
        return _cast_as_it_comes(self, src, dst_type)
    wide = torch.from_numpy(np.array(src.data, dtype=np.float32))
    return TensorHandle(wide.bfloat16().view(torch.uint16).numpy(), tl.bfloat16)


_multiply_as_it_comes = InterpreterBuilder.create_fmul


def _multiply(self, lhs, rhs) -> TensorHandle:
    if lhs.dtype.scalar != tl.bfloat16:
        return _multiply_as_it_comes(self, lhs, rhs)
    return _cast(self, TensorHandle(_widen(lhs) * _widen(rhs), tl.float32), tl.bfloat16)


WIDE = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def _check_overflow(self, lhs: tl.tensor, rhs: tl.tensor, operation: Callable) -> None:
    """Refuse integer overflow. The interpreter's own check does so only in debug mode, and creates a dozen tensors in
    any mode."""
    kind = lhs.type.scalar
    if kind.int_bitwidth >= 64:
        return
    found = WIDE[operation.__name__](lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
    fits = found.min() >= kind.get_int_min_value() and found.max() <= kind.get_int_max_value()
    assert fits, f"int{kind.int_bitwidth} overflow detected for operation {operation.__name__}"


_look_up = interpreter._get_np_dtype
_numpy_types: dict[str, np.dtype] = {}


def _numpy_type(kind: tl.dtype) -> np.dtype:
    """Return the numpy type of a Triton type. The interpreter's own function builds a table at each call."""
    element = kind.element_ty if isinstance(kind, tl.block_type) else kind
    name = "pointer" if isinstance(element, tl.pointer_type) else element.name
    if name not in _numpy_types:
        _numpy_types[name] = _look_up(element)
    return _numpy_types[name]


@contextmanager
def _language_changed_once() -> Iterator[None]:
    """Make the interpreter patch Triton's language once in this context, instead of at each launch and at each call of
    a device function."""
    change, changed = interpreter._patch_lang, {}

    def once(function: Callable) -> interpreter._LangPatchScope:
        modules = frozenset(name for name in ("tl", "core") if name in function.__globals__)
        if modules not in changed:
            changed[modules] = change(function)
        return interpreter._LangPatchScope()  # which restores nothing

    try:
        with mock.patch.object(interpreter, "_patch_lang", once):
            yield
    finally:
        for scope in reversed(changed.values()):
            scope.restore()


PREFETCH, AT_ONCE = "cp.async.bulk.prefetch.L2.global", 16


class _Nothing:
    """Stands for the result of an assembly that returns 0 for each element of its arguments."""

    def __init__(self, shape: tuple[int, ...]):
        self.shape = shape

    def get_result(self, _place: int) -> TensorHandle:
        return TensorHandle(np.zeros(self.shape, np.int32), tl.int32)


def _inline_asm(self, asm, _constraints, values, _types, _pure, _pack) -> _Nothing:
    """Give the assembly of ``ask_l2`` and ``ask_l2_by_all`` its meaning: a prefetch of a number of bytes from each
    address on. It refuses what the instruction does not take, and any other assembly."""
    if PREFETCH not in asm:
        raise NotImplementedError(f"assembly without a meaning in the interpreter: {asm}")
    addresses, sizes = (value.data.ravel().tolist() for value in values)
    for address, size in zip(addresses, sizes, strict=True):
        assert size > 0 and size % AT_ONCE == 0, f"L2 is asked for {size} bytes, not a multiple of {AT_ONCE}"
        assert address % AT_ONCE == 0, f"L2 is asked for bytes from {address:#x} on, not a multiple of {AT_ONCE}"
        if noted := getattr(self, "asked_l2", None):
            noted(address, size)
    return _Nothing(values[0].data.shape)


@contextmanager
def asked_of_l2() -> Iterator[list[tuple[int, int]]]:
    """Yield a list of the ranges of addresses, [first, end), that kernels ask L2 for within this context."""
    asked: list[tuple[int, int]] = []

    def noted(_self, address: int, size: int) -> None:
        asked.append((address, address + size))

    with mock.patch.object(InterpreterBuilder, "asked_l2", noted, create=True):
        yield asked


@contextmanager
def mended() -> Iterator[None]:
    """Fix the interpreter, which multiplies the bits of bf16 values, truncates to bf16, and reads integers as bf16
    bits; and replace its slowest operations by faster ones."""
    with ExitStack() as stack:
        stack.enter_context(
            mock.patch.multiple(
                InterpreterBuilder,
                create_dot=_dot,
                cast_impl=_cast,
                create_fmul=_multiply,
                create_inline_asm=_inline_asm,
            )
        )
        stack.enter_context(mock.patch.object(interpreter, "_get_np_dtype", _numpy_type))
        stack.enter_context(mock.patch.object(TritonSemantic, "binary_op_sanitize_overflow_impl", _check_overflow))
        stack.enter_context(shared_shapes())
        stack.enter_context(_language_changed_once())
        yield


def _on_host(function: Callable) -> Callable:
    def run(*given: tl.tensor) -> tl.tensor:
        out = function(*(torch.from_numpy(np.ascontiguousarray(each.handle.data)) for each in given)).numpy()
        return tl.core.tensor(TensorHandle(out, given[0].dtype), given[0].type)

    return run


class _Libdevice:
    """CUDA's device functions, computed by PyTorch's functions of the same names."""

    add_rn = staticmethod(_on_host(torch.add))

    def __getattr__(self, name: str) -> Callable:
        return _on_host(getattr(torch, name))


LIBDEVICE = _Libdevice()


def _restore(before: dict[Any, dict[str, Any]]) -> None:
    for owner, values in before.items():
        for name, value in values.items():
            if vars(owner).get(name) is not value and not name.startswith("__"):
                setattr(owner, name, value)


@contextmanager
def interpreted(*modules: ModuleType) -> Iterator[None]:
    """Run the kernels of ``modules``, and the functions that they call, on host tensors. Afterwards Triton's language,
    which the interpreter patches, is restored."""
    before = {owner: dict(vars(owner)) for owner in (tl, tl.core, tl.math, tl.standard, tl.tensor)}
    with ExitStack() as stack:
        stack.callback(_restore, before)
        stack.enter_context(mended())
        stack.enter_context(fresh_memory())
        for module in (tl, tl.standard, *modules):  # the reductions of Triton's language are kernels too
            kernels = {name: value for name, value in vars(module).items() if isinstance(value, JITFunction)}
            wrapped = {name: InterpretedFunction(kernel.fn) for name, kernel in kernels.items()}
            if hasattr(module, "libdevice"):
                wrapped["libdevice"] = LIBDEVICE
            stack.enter_context(mock.patch.multiple(module, **wrapped))
        yield


@contextmanager
def loaded_before_waits() -> Iterator[list[np.ndarray]]:
    """Yield a list of the addresses that programs load before they wait for the kernel in front, one array per load. A
    store before the wait, and a program that does not wait, fail an assertion."""
    loaded, waits = [], [False]
    place, load = InterpreterBuilder.set_grid_idx, InterpreterBuilder.create_masked_load
    store = InterpreterBuilder.create_masked_store

    def placed(self, *at: int) -> None:
        assert not waits[0], "a program did not wait"
        waits[0] = True
        place(self, *at)

    def noted(self, ptrs: TensorHandle, mask: TensorHandle, *rest: Any) -> TensorHandle:
        if waits[0]:
            loaded.append(ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)].ravel())
        return load(self, ptrs, mask, *rest)

    def stored(self, *given: Any) -> None:
        assert not waits[0], "a program stored before it waited"
        return store(self, *given)

    builder = {"set_grid_idx": placed, "create_masked_load": noted, "create_masked_store": stored}
    language = {"gdc_wait": lambda: waits.__setitem__(0, False), "gdc_launch_dependents": lambda: None}
    with mock.patch.multiple(tl.extra.cuda, **language), mock.patch.multiple(InterpreterBuilder, **builder):
        yield loaded
    assert not waits[0], "a program did not wait"


@contextmanager
def words_read(kind: tl.dtype | None = tl.uint32) -> Iterator[list[np.ndarray]]:
    """Yield a list of the addresses of the values of a type, 32-bit words by default, that kernels load within this
    context, one array per load; of None, those of all values."""
    read: list[np.ndarray] = []
    load = InterpreterBuilder.create_masked_load

    def counted(self, ptrs: TensorHandle, mask: TensorHandle, other: TensorHandle, *options: Any) -> TensorHandle:
        if kind in (None, ptrs.get_element_ty()):
            read.append(ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)].ravel())
        return load(self, ptrs, mask, other, *options)

    with mock.patch.object(InterpreterBuilder, "create_masked_load", counted):
        yield read


def within(read: list[np.ndarray], tensor: torch.Tensor) -> np.ndarray:
    """Return those of the addresses that lie in a tensor."""
    at = np.concatenate([each.ravel() for each in read])
    return at[(at >= tensor.data_ptr()) & (at < tensor.data_ptr() + tensor.nbytes)]
