"""Linears whose weights have their columns in an order of their own: the input is brought into it.

Weights that were quantized in the order of activations share scales between columns that are no neighbours; sorted by
groups they are like any other. Permuting what is added up changes nothing but the order of the sum.
"""

from collections.abc import Callable, Iterator

from torch import Tensor, nn
from torchao.utils import TorchAOBaseTensor

INPUT_ORDER = "input_order"
"""A tensor of this name, int64 [K], comes before the weight that it is for: column j of the weight multiplies column
``input_order[j]`` of the input."""


class InputOrders:
    """Those met while a checkpoint is read; ``key_map`` gives a tensor's name in the model."""

    def __init__(self, key_map: Callable[[str], str | None]):
        self.key_map = key_map
        self.waiting: dict[str | None, Tensor] = {}

    def takes(self, name: str, value: Tensor) -> bool:
        """Whether the tensor is an order, which is then kept for its weight."""
        linear, _, part = name.rpartition(".")
        if part == INPUT_ORDER:
            self.waiting[self.key_map(f"{linear}.weight")] = value
        return part == INPUT_ORDER

    def settled(self, own: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
        """What the model holds of a weight: a dense one has its columns in the input's order, and no other."""
        order = self.waiting.pop(own, None)
        if order is not None and isinstance(value, TorchAOBaseTensor):
            yield own.removesuffix("weight") + INPUT_ORDER, order
        elif order is not None:
            value = value[:, order.argsort()]
        yield own, value


def use_input_orders(model: nn.Module) -> None:
    """Bring the inputs of the linears that hold an order into it."""
    for module in model.modules():
        if INPUT_ORDER in module._buffers:
            module.register_forward_pre_hook(_permute)


def _permute(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    # no index_select: without a GPU it does not lower to CUDA
    return (args[0][..., getattr(module, INPUT_ORDER)],)
