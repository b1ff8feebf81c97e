"""The softcap, a smooth bound for attention scores before the softmax, or for logits."""

import torch
from torch import Tensor


def softcapped(scores: Tensor, cap: float | None) -> Tensor:
    """Return cap * tanh(scores / cap) for scores of any shape, in their dtype; without a cap, the scores themselves."""
    return scores if cap is None else torch.tanh(scores / cap) * cap
