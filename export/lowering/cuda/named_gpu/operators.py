"""Part 5: makes Python operators work on fake tensors of a GPU that is not there.

``~x``, ``x[i]``, ``x[i] = y`` and ``x.copy_(y)`` first switch to the tensor's device, which a CPU build of torch
refuses even for a fake tensor. The ATen operations that they stand for do not. ExecuTorch's Triton ops use these
operators, and so does Inductor when it makes an assignment in place.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from eagle3.export.patching.patches import all_replaced

aten = torch.ops.aten
_get: Callable[..., Tensor] = Tensor.__getitem__
_set: Callable[..., None] = Tensor.__setitem__
_invert, _copy = Tensor.__invert__, Tensor.copy_


def _item(tensor: Tensor, index: object) -> Tensor:
    if tensor.device.type != "cuda":
        return _get(tensor, index)
    if isinstance(index, slice) and index.step is None:
        return aten.slice.Tensor(tensor, 0, index.start, index.stop)
    if isinstance(index, int | torch.SymInt):
        return aten.select.int(tensor, 0, index)
    if isinstance(index, Tensor):
        return aten.index.Tensor(tensor, [index])
    return _get(tensor, index)


def _set_item(tensor: Tensor, index: object, value: object) -> None:
    if tensor.device.type == "cuda" and isinstance(value, Tensor) and isinstance(index, slice):
        aten.copy_.default(_item(tensor, index), value)
    elif tensor.device.type == "cuda" and isinstance(value, Tensor) and isinstance(index, Tensor):
        aten.index_put_.default(tensor, [index], value)
    else:
        _set(tensor, index, value)


def _inverted(tensor: Tensor) -> Tensor:
    return torch.bitwise_not(tensor) if tensor.device.type == "cuda" else _invert(tensor)


def _copied(tensor: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    copy = aten.copy_.default if tensor.device.type == "cuda" else _copy
    return copy(tensor, source, non_blocking)


@contextmanager
def operators() -> Iterator[None]:
    """Make the operators work on fake tensors of a GPU, for the kinds of index above."""
    values = {"__getitem__": _item, "__setitem__": _set_item, "__invert__": _inverted, "copy_": _copied}
    with all_replaced({f"torch.Tensor.{name}": value for name, value in values.items()}):
        yield
