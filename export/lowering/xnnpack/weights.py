"""What each tensor of a target becomes as it is read: XNNPACK runs in float32, so quantized weights are dequantized,
exactly: a code times its scale has no more bits than float32 holds."""

from typing import Any

import torch
from executorch.extension.llm.export.quant import dequantize_weight
from torch import Tensor
from torchao.utils import TorchAOBaseTensor


class Dequantized:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, name: str, value: Tensor) -> Tensor:
        if not isinstance(value, TorchAOBaseTensor):
            return value
        self.count += 1
        return dequantize_weight(value, torch.float32)

    def record(self) -> dict[str, Any]:
        """How many weights were dequantized."""
        return {"dequantized": self.count} if self.count else {}
