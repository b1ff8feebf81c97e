"""Descriptions of traced values: two of the same description are as good as each other."""

from torch import SymInt
from torch._subclasses.fake_tensor import FakeTensor


def description(value: FakeTensor) -> tuple:
    """Return a fake tensor's dtype, device, layout, shape, strides and offset, symbols by their expression."""
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    exact = (size.node.expr if isinstance(size, SymInt) else size for size in sizes)
    return value.dtype, value.device, value.layout, value.requires_grad, *exact
