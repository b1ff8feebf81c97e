"""An argmax of long rows that uses many blocks. Inductor's own uses one block per row, even for 262,144 logits."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._inductor import decomposition
from torch.nn import functional as F

from eagle3.export.patching.patches import with_items

BLOCK = 2048


def block_of(width: int) -> int:
    """Return the block size for rows of ``width``: their divisor nearest to ``BLOCK``, if there is one within a factor
    of 2, otherwise ``BLOCK``. A divisor needs no padding of the rows, which would be a separate launch."""
    near = (size for size in range(BLOCK // 2, 2 * BLOCK) if width % size == 0)
    return min(near, key=lambda size: abs(size - BLOCK), default=BLOCK)


def argmax_of_blocks(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Compute ``torch.argmax`` over the last dimension, with the first of equal values as the result.

    Returns NotImplemented, which makes Inductor use its own argmax, for another dimension and for rows of at most two
    blocks.
    """
    if dim not in (-1, x.ndim - 1) or x.shape[-1] <= 2 * BLOCK:
        return NotImplemented
    size = block_of(x.shape[-1])
    blocks = F.pad(x, (0, -x.shape[-1] % size), value=float("-inf")).unflatten(-1, (-1, size))
    greatest, within = blocks.max(-1)
    block = greatest.argmax(-1, keepdim=True)
    ids = block * size + within.gather(-1, block)
    return ids if keepdim else ids.squeeze(-1)


@contextmanager
def argmax_over_blocks() -> Iterator[None]:
    """Make Inductor use ``argmax_of_blocks``."""
    decomposition.fast_random_decomps.cache_clear()
    try:
        with with_items(
            "torch._inductor.decomposition.decompositions", {torch.ops.aten.argmax.default: argmax_of_blocks}
        ):
            yield
    finally:
        decomposition.fast_random_decomps.cache_clear()
