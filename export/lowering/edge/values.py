"""Describes traced values. Values with the same description are interchangeable."""

from torch import SymInt
from torch._subclasses.fake_tensor import FakeTensor


def description(value: FakeTensor) -> tuple:
    """Return a fake tensor's dtype, device, layout, shape, strides and offset; symbols are given by their
    expressions."""
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    exact = (size.node.expr if isinstance(size, SymInt) else size for size in sizes)
    return value.dtype, value.device, value.layout, value.requires_grad, *exact
