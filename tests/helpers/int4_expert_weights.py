"""Makes INT4 weights of experts, and random choices of experts."""

from typing import NamedTuple

import torch
from torch import Tensor


class Weights(NamedTuple):
    gate_up: Tensor
    gate_up_scale: Tensor
    down: Tensor
    down_scale: Tensor


def weights_of(count: int, hidden: int, width: int) -> Weights:
    def weight(n: int, k: int) -> tuple[Tensor, Tensor]:
        codes = torch.randint(-128, 128, (count, n, k // 2), dtype=torch.int8)
        return codes, (torch.rand(count, k // 32, n) / 4 / k**0.5).bfloat16()

    return Weights(*weight(2 * width, hidden), *weight(hidden, width))


def choices(rows: int, count: int, top_k: int) -> tuple[Tensor, Tensor]:
    chosen = torch.stack([torch.randperm(count)[:top_k] for _ in range(rows)])
    return chosen, torch.rand(rows, top_k) + 0.5
