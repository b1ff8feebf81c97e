"""Makes random inputs for attention that takes the product of queries, keys and values."""

import torch

SLOTS, WINDOW = 300, 40


ROTARY = {
    "whole": lambda width: ([width, width // 2, 1], width),
    "a half": lambda width: ([width // 2, width // 4, 1], width // 2),
    "by half a table": lambda width: ([width, width // 2, 1], width // 2),
    "neighbours": lambda width: ([width, 1, 1], width),
    "neighbours of a half": lambda width: ([width // 2, 1, 2], width // 2),
    "none": lambda width: ([], 0),
}
"""Functions of a head's width, which return the kernel's ``rotary`` and the columns of the tables of angles."""


def made(
    rows: int,
    first: int,
    kv_heads: int,
    groups: int,
    width: int,
    window: int,
    norms: bool,
    slots: int = SLOTS,
    kind: str = "whole",
    bias: bool = False,
    plus: float = 0.0,
) -> tuple:
    """Return random inputs of the op except counters and rows of a tile. The caches are full of other values."""
    torch.manual_seed(first)
    heads = kv_heads * groups
    product = torch.randn(16, (heads + 2 * kv_heads) * width).bfloat16()[-rows:]
    caches = torch.randn(2, 1, kv_heads, 2 * window or slots, width).bfloat16()
    rotary, columns = ROTARY[kind](width)
    angles = torch.arange(16)[None, -rows:, None] * torch.rand(columns)
    weights = (torch.rand(2, width).bfloat16() + 0.5 - plus).unbind() if norms else (None, None)
    last = torch.arange(first, first + 16)[-rows:]
    begins = (last - window + 1).clamp(min=0) if window else torch.zeros_like(last)
    starts, eps = [0, heads * width, (heads + kv_heads) * width], [1e-6 * norms] * 3
    biases = torch.randn(product.shape[1]).bfloat16() if bias else None
    tables = (angles.cos(), angles.sin()) if rotary else (None, None)
    fused = biases, *tables, *weights, heads, starts, eps, plus, rotary
    return product, *caches, begins, last, 0.25, window or slots, *fused
