"""The record of a format of weights and of its matmuls, for traces, checks and passes over graphs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from eagle3.export.lowering.cuda.kernels.sums import counters

_COUNTERS = {torch.device("cpu"): counters()}
"""The counters that a device's matmuls and attention use. Those of the host are made before any trace, so that a trace
takes them as a constant."""


def shared_counters(x: Tensor) -> Tensor:
    """Return the counters on the device of ``x``."""
    if x.device not in _COUNTERS:
        _COUNTERS[x.device] = counters(x.device)
    return _COUNTERS[x.device]


@dataclass(frozen=True)
class Product:
    """The operators that multiply by weights of one class. Each takes rows [M, K], the parts of a weight, and counters
    (``sums.counters``)."""

    weight: Any
    """The class of the weights; None for plain bfloat16."""
    few: Any
    """The operator for up to 16 rows, which reads each weight once for all of them."""
    many: Any
    """The operator for more rows; None for those of PyTorch."""
    parts: Callable[[Any], Sequence[Any]]
    """Returns the arguments that a weight is passed as."""
    by_limit: bool = False
    """True if the operators also take the most rows of any call of the operator for few rows, 8 or 16."""
    gate: Literal["tile", "halves"] | None = None
    """The tiles of a matmul with the gate of an MLP: no tile of 128 outputs spans gate and up, or each has outputs of
    both. None if ``few`` applies no gate."""
    asks_l2: bool = False
    """True if ``few`` takes the next matmul's weight, which it asks L2 for, and may begin before the kernel in front of
    it has ended."""

    @property
    def few_name(self) -> str:
        return self.few._qualname

    @property
    def names(self) -> list[str]:
        return [operator._qualname for operator in (self.few, self.many) if operator is not None]

    def __call__(self, operator: Any, x: Tensor, weight: Any, limit: int) -> Tensor:
        more = (limit,) if self.by_limit else ()
        return operator(x, *self.parts(weight), shared_counters(x), *more)
