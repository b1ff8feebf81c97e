"""Makes the types and tensors of Triton's interpreter faster: blocks of one shape share that shape.

Triton makes a shape of constants, its type and its name anew for every tensor, which takes about a fifth of the time of
a small kernel. The classes and their values stay the same.
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
    if lhs.shape is rhs.shape:
        return lhs, rhs
    return _broadcast_as_it_comes(self, lhs, rhs)


@contextmanager
def shared_shapes() -> Iterator[None]:
    """Make the tensors and types of this context with shared shapes."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(tl.block_type, "__init__", _init_block_type))
        stack.enter_context(mock.patch.object(tl.tensor, "__init__", _init_tensor))
        stack.enter_context(mock.patch.object(TritonSemantic, "broadcast_impl_value", _broadcast))
        yield
