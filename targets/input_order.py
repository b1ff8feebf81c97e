"""Permutes the inputs of linears whose weight columns are stored in another order.

Weights that were quantized in activation order share scales between columns that are not adjacent. Sorted by group, the
columns have the usual layout. Permuting the input changes only the order of the sum.
"""

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from eagle3.targets.loading import is_plain

INPUT_ORDER = "input_order"
"""The last part of the name of an order, int64 [K]. It precedes its weight in a checkpoint. Column j of the weight
multiplies column ``input_order[j]`` of the input."""


class InputOrders:
    """Holds the orders that are found while a checkpoint is read. ``key_map`` returns a tensor's name in the model."""

    def __init__(self, key_map: Callable[[str], str | None]):
        self.key_map = key_map
        self.waiting: dict[str | None, Tensor] = {}

    def takes(self, name: str, value: Tensor) -> bool:
        """Return True if the tensor is an order, which is then kept for its weight."""
        linear, _, part = name.rpartition(".")
        if part == INPUT_ORDER:
            self.waiting[self.key_map(f"{linear}.weight")] = value
        return part == INPUT_ORDER

    def settled(self, own: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that the model holds for a weight. A dense weight's columns are put back into the input's
        order. A quantized weight keeps its columns, and its order comes before it."""
        order = self.waiting.pop(own, None)
        if order is not None and not is_plain(value):
            yield own.removesuffix("weight") + INPUT_ORDER, order
        elif order is not None:
            value = value[:, order.argsort()]
        yield own, value


def use_input_orders(model: nn.Module) -> None:
    """Make the linears that hold an order permute their inputs."""
    for module in model.modules():
        if INPUT_ORDER in module._buffers:
            module.register_forward_pre_hook(_permute)


def _permute(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    # no index_select: without a GPU it does not lower to CUDA
    return (args[0][..., getattr(module, INPUT_ORDER)],)
