"""ExecuTorch's loader of checkpoints without torchao's tensor classes, which its package imports.

Those classes import all of torchao, which takes two seconds, and a checkpoint of plain tensors does not need them. A
plan and its twin check load nothing else.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec, module_from_spec
from typing import Any

from torch import Tensor, dtype, nn

PACKAGE = "executorch.extension.llm.export"
Convert = Callable[[str, Tensor], Tensor]


def load_tensors(
    model: nn.Module,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: dtype,
    key_map: Callable[[str], str | None] | None = None,
    convert: Convert | None = None,
) -> None:
    """Assign ``tensors`` to a model on the meta device, by ExecuTorch's ``load_checkpoint``.

    Args:
        dtype: of the floating tensors, after ``convert``
        key_map: a tensor's name in the model, None for one that is left out
        convert: what a tensor becomes, ``default_form`` unless given
    """
    with _bare(PACKAGE):
        from executorch.extension.llm.export.load import load_checkpoint
    form = convert or default_form
    load_checkpoint("", model, key_map=key_map, convert=form, dtype=dtype, raw_iter=lambda _: tensors)


def default_form(name: str, weight: Tensor) -> Tensor:
    """Convert a quantized tensor as ExecuTorch's ``to_default`` does; return a plain tensor unchanged."""
    if is_plain(weight):
        return weight
    from executorch.extension.llm.export.quant.convert import to_default

    return to_default(name, weight)


def as_stored(_name: str, weight: Tensor) -> Tensor:
    return weight


def is_plain(value: Any) -> bool:  # noqa: ANN401
    """Return True for a tensor of PyTorch's own classes, as opposed to torchao's."""
    return type(value) in (Tensor, nn.Parameter)


def dequantized(_name: str, value: Tensor) -> Tensor:
    """Return a checkpoint's quantized tensor in float32, which is exact: a code times its scale has no more bits than
    float32 holds. Return a plain tensor unchanged."""
    if is_plain(value):
        return value
    import torch
    from executorch.extension.llm.export.quant import dequantize_weight

    return dequantize_weight(value, torch.float32)


@contextmanager
def _bare(name: str) -> Iterator[None]:
    """Put an empty package in the place of ``name``, so that its modules can be imported without it. Afterwards the
    package counts as not imported, but its modules stay. Does nothing if the package is imported already."""
    if name in sys.modules:
        yield
        return
    spec = find_spec(name)
    assert spec is not None, name
    sys.modules[name] = module_from_spec(spec)
    try:
        yield
    finally:
        del sys.modules[name]
