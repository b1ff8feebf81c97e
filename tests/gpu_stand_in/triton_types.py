"""Makes the types and tensors of Triton's interpreter faster. The classes and their values stay the same.

- Blocks of one shape share that shape. Triton makes a shape of constants, its type and its name anew for every tensor,
  which takes about a fifth of the time of a small kernel.
- Operands of one type and shape are used as they are, and a number beside a block of one type and shape becomes the
  same block each time. Triton converts, checks and spreads both operands of every operation, which takes a third.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple
from unittest import mock

import triton.language as tl
from triton._utils import validate_block_shape
from triton.language import core
from triton.language.semantic import TritonSemantic


class Shape(NamedTuple):
    """The parts that tensors of one shape share. ``of_type`` has integers and ``of_tensor`` Triton's constants."""

    of_type: core.tuple
    of_tensor: core.tuple
    numel: core.constexpr


_shapes: dict[tuple[int, ...], Shape] = {}
_known: dict[int, Shape] = {}
"""The shapes by the ``id`` of their ``of_type``, which is never freed."""
_names: dict[tuple[int, str], str] = {}
_broadcast_as_it_comes = TritonSemantic.broadcast_impl_value
_operands_as_they_come = TritonSemantic.binary_op_type_checking_impl
_unwrap_as_it_comes = core._unwrap_if_constexpr


def _shape(sizes: Iterable[int | core.constexpr]) -> Shape:
    """Return the shape of these sizes. Raises what Triton raises for sizes that no block may have."""
    if found := _known.get(id(sizes)):
        return found
    values = tuple(size.value if isinstance(size, core.constexpr) else size for size in sizes)
    if values not in _shapes:
        validate_block_shape(values)
        constants = core.tuple([core.constexpr(size) for size in values])
        _shapes[values] = made = Shape(core.tuple(values), constants, core.constexpr(math.prod(values)))
        _known[id(made.of_type)] = made
    return _shapes[values]


NO_SHAPE = _shape(())


def _init_block_type(self: tl.block_type, element_ty: tl.dtype, shape: Iterable[int | core.constexpr]) -> None:
    assert isinstance(shape, (list, core.tuple))
    found = _shape(shape)
    if not found.of_type.values:
        raise TypeError("0d block_type is forbidden")
    self.element_ty, self.shape, self.numel = element_ty, found.of_type, found.numel.value
    key = id(found.of_type), str(element_ty)
    if key not in _names:
        _names[key] = f"<{self.shape}, {element_ty}>"
    self.name = _names[key]


def _init_tensor(self: tl.tensor, handle: object, type: tl.dtype) -> None:
    found = _shape(type.shape) if type.is_block() else NO_SHAPE
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = found.of_tensor, found.numel


def _broadcast(self: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    left, right = lhs.shape, rhs.shape
    if left is right:
        return lhs, rhs
    key = id(left), id(right)
    known = _spread.get(key)
    if known and known[0] is left and known[1] is right:
        return _spread_over(self, lhs, known[2]), _spread_over(self, rhs, known[2])
    made = _broadcast_as_it_comes(self, lhs, rhs)
    if lhs.type.is_block() and rhs.type.is_block() and len(left) == len(right):
        _spread[key] = left, right, made[0].type.shape
    return made


def _spread_over(self: TritonSemantic, value: tl.tensor, shape: core.tuple) -> tl.tensor:
    if value.type.shape is shape:
        return value
    return tl.tensor(self.builder.create_broadcast(value.handle, shape.values), tl.block_type(value.dtype, shape))


_spread: dict[tuple[int, int], tuple[core.tuple, core.tuple, core.tuple]] = {}
"""The shape of the result, by the ``id`` of two shapes of blocks; with it these two, so that no other object gets the
same ``id``."""
_same = tl.float32, tl.float64, *(getattr(tl, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))
AS_THEY_ARE = frozenset(map(id, _same))
"""The types whose operands no operation converts if both have them, each by its ``id``."""
_numbers: dict[tuple, tuple[core.tuple, tl.tensor]] = {}
"""Numbers as tensors, by the number, its type, the operand beside it and the operation's options. With each is the
operand's shape, so that its ``id`` stays that of this shape."""


def _operands(self: TritonSemantic, lhs: object, rhs: object, *options: bool, **more: bool) -> tuple:
    if type(rhs) is tl.tensor:
        if type(lhs) is tl.tensor and lhs.dtype is rhs.dtype and id(lhs.dtype) in AS_THEY_ARE:
            return _broadcast(self, lhs, rhs)
    elif type(rhs) in (int, float) and type(lhs) is tl.tensor:
        key = rhs, type(rhs), lhs.dtype.name, id(lhs.shape), options, *more.items()
        shape, number = _numbers.get(key, (None, None))
        if shape is lhs.shape:
            return lhs, number
        made = _operands_as_they_come(self, lhs, rhs, *options, **more)
        if made[0] is lhs:  # not converted, so that another operand of this type and shape is not either
            made[1].handle.data.flags.writeable = False
            _numbers[key] = lhs.shape, made[1]
        return made
    return _operands_as_they_come(self, lhs, rhs, *options, **more)


PLAIN = frozenset((tl.tensor, int, bool, float, str, type(None), tl.dtype, tl.block_type, tl.pointer_type))


def _unwrap(value: object) -> object:
    kind = type(value)
    if kind in PLAIN:
        return value
    return value.value if kind is core.constexpr else _unwrap_as_it_comes(value)


@contextmanager
def shared_shapes() -> Iterator[None]:
    """Make the tensors and types of this context with shared shapes, and its operands without repeated conversions."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(tl.block_type, "__init__", _init_block_type))
        stack.enter_context(mock.patch.object(tl.tensor, "__init__", _init_tensor))
        stack.enter_context(mock.patch.object(TritonSemantic, "broadcast_impl_value", _broadcast))
        stack.enter_context(mock.patch.object(TritonSemantic, "binary_op_type_checking_impl", _operands))
        stack.enter_context(mock.patch.object(core, "_unwrap_if_constexpr", _unwrap))
        stack.callback(_numbers.clear)
        stack.callback(_spread.clear)
        yield
