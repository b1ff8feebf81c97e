"""Rewrites operations that ExecuTorch's partitioner for MLX leaves out into forms that it takes."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode

SLICE, FULL = torch.ops.aten.slice.Tensor, torch.ops.aten.full.default
EMPTY = {torch.ops.aten.empty.memory_format: 0, torch.ops.aten.new_empty.default: 1}
"""Operations that return memory without values, with the place of the size among their arguments."""

FORMS = Tensor.scatter, Tensor.scatter_, torch.scatter, Tensor.gather, torch.gather
PARAMETERS = "input", "dim", "index", "src", "value"


class MlxForms(TorchFunctionMode):
    """A mode for a trace. It rewrites ``scatter`` and ``gather`` along the last dimension, which route tokens to
    experts, as comparisons with the numbers of the columns."""

    def __torch_function__(
        self, func: Callable[..., Any], _types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func not in FORMS or not kwargs.keys() <= set(PARAMETERS):
            return func(*args, **kwargs)
        x, dim, *given = *args, *(kwargs[name] for name in PARAMETERS if name in kwargs)
        if dim % x.ndim != x.ndim - 1:
            return func(*args, **kwargs)
        if func in (Tensor.gather, torch.gather):
            return gathered(x, *given)
        return x.copy_(scattered(x, *given)) if func is Tensor.scatter_ else scattered(x, *given)


def _chosen(index: Tensor, columns: int) -> Tensor:
    """Return bool [..., k, columns], True in the column of each index [..., k]."""
    return index.unsqueeze(-1) == torch.arange(columns)


def scattered(x: Tensor, index: Tensor, value: Tensor | float) -> Tensor:
    """Return ``x`` [..., N] with ``value`` at ``index`` [..., k], which must differ from each other in a row."""
    chosen = _chosen(index, x.shape[-1])
    values = value.unsqueeze(-1) if isinstance(value, Tensor) else torch.full((), value, dtype=x.dtype)
    placed = torch.where(chosen, values, torch.zeros((), dtype=x.dtype)).sum(-2)
    return torch.where(chosen.any(-2), placed.to(x.dtype), x)


def gathered(x: Tensor, index: Tensor) -> Tensor:
    """Return the values of ``x`` [..., N] at ``index`` [..., k]."""
    return torch.where(_chosen(index, x.shape[-1]), x.unsqueeze(-2), torch.zeros((), dtype=x.dtype)).sum(-1)


def complete_arguments(program: ExportedProgram) -> None:
    """Give each slice of a traced program an end, since the partitioner counts arguments, and memory that is written
    later a value. In place."""
    for node in program.graph.nodes:
        if node.target in EMPTY:
            node.args, node.target = (node.args[EMPTY[node.target]], 0), FULL
            node.kwargs = {"dtype": node.meta["val"].dtype}
        elif node.target is SLICE and len(node.args) == 3:
            node.args = (*node.args, sys.maxsize)
        elif node.target is SLICE and len(node.args) > 3 and node.args[3] is None:
            node.args = (*node.args[:3], sys.maxsize, *node.args[4:])
