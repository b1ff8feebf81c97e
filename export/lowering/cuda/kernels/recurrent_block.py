"""Computes what the rows of a block read of each other, in a recurrent chunk whose key channels have log decays.

A product of a query and a key is weighed channel by channel with the decays between their rows. A matrix product takes
one factor for each row, so the decays are split at a row between the two. Two neighbouring segments of 1, 2, 4, ...
rows meet there: the later row decays from there on, the earlier one up to there. Each pair of rows is in two such
segments of one length, and each length is one product on the tensor cores.

From one length to the next, a row's factor gains those of the other segment, whose log decays a product with ones adds.
So no exponent is positive, and no sum is a difference of others, which would round what is left of a channel.

The reference for ``recurrent.py`` is here as well: the layers in plain PyTorch, row by row, in any floating dtype.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3.targets.spec import ROLLBACK_ROWS


@triton.jit
def products_of_channels(
    key, query, decay, SLICES: tl.constexpr, BLOCK: tl.constexpr, SLICE: tl.constexpr, DOUBLINGS: tl.constexpr
):  # fmt: skip
    # All given are [SLICES, BLOCK, SLICE]. Returns what the keys, below the diagonal, and the queries of a block read
    # of its keys, [BLOCK, BLOCK] each; the keys and the queries decayed from the block's first row through their own,
    # and the keys from behind their own row through the last.
    index = tl.arange(0, BLOCK)
    row, column = index[None, :, None], index[None, None, :]
    of_keys = tl.zeros((SLICES, BLOCK, BLOCK), tl.float32)
    of_queries = tl.where(row == column, tl.sum(query * key, 2, keep_dims=True), 0.0)
    left = key
    key *= tl.exp(decay)
    query *= tl.exp(decay)
    for doubling in tl.range(DOUBLINGS):
        second = (row >> doubling) % 2 == 1
        other = (row >> (doubling + 1) == column >> (doubling + 1)) & (row >> doubling != column >> doubling)
        pair = other & second
        turned = tl.permute(left, (0, 2, 1))
        of_keys += tl.where(pair, tl.dot(key, turned, input_precision="tf32x3"), 0.0)
        of_queries += tl.where(pair, tl.dot(query, turned, input_precision="tf32x3"), 0.0)
        others = tl.broadcast_to(tl.where(other, 1.0, 0.0), (SLICES, BLOCK, BLOCK))
        through = tl.exp(tl.dot(others, decay, input_precision="tf32x3"))
        key = tl.where(second, key * through, key)
        query = tl.where(second, query * through, query)
        left = tl.where(second, left, left * through)
    return tl.sum(of_keys, 0), tl.sum(of_queries, 0), key, query, left


def state_before(state: Tensor, changes: Tensor, first: int, committed: int, key: Tensor, value: Tensor) -> Tensor:
    """Return the state before position ``first`` of one before ``committed``; ``key`` and ``value`` give the shapes."""
    state = state.clone() if first else torch.zeros_like(state)
    widths = key[:, 0].numel(), value[:, 0].numel()
    widths = *widths, changes.shape[-1] - sum(widths)
    for position in range(max(committed, first - ROLLBACK_ROWS, 0), first):
        keys, update, decay = changes[0, position % changes.shape[1], 0].split(widths)
        state = _decayed(state, decay) + _change(keys.view(len(key), -1), update.view(len(value), -1))
    return state


def run_rows(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs and the updates of rows, [value heads, T, d_v] each, and the state after them."""
    out, updates = torch.empty_like(value), torch.empty_like(value)
    for row in range(key.shape[1]):
        updates[:, row], state = value[:, row], _decayed(state, decay[:, row])
        if beta is not None:
            updates[:, row] -= _dot(state, key[:, row])
            updates[:, row] *= beta[:, row, None]
        state += _change(key[:, row], updates[:, row])
        out[:, row] = _dot(state, query[:, row])
    return out, updates, state


def _decayed(state: Tensor, decay: Tensor) -> Tensor:
    """Return a state decayed by one row's logarithms: of each head, or of each channel of each head."""
    return state * decay.reshape(len(state), -1, 1).exp()


def _change(key: Tensor, update: Tensor) -> Tensor:
    return key.repeat_interleave(len(update) // len(key), 0)[:, :, None] * update[:, None, :]


def _dot(state: Tensor, key: Tensor) -> Tensor:
    """Return [value heads, d_v] of a state and a key or query of each key head."""
    return (key.repeat_interleave(len(state) // len(key), 0)[:, None] @ state)[:, 0]


def ring_after(changes: Tensor, first: int, key: Tensor, update: Tensor, decay: Tensor) -> Tensor:
    """Return the ring with the changes of rows from position ``first`` on."""
    rows = torch.cat([each.transpose(0, 1).flatten(1) for each in (key, update, decay)], 1)
    return changes.index_copy(1, (first + torch.arange(len(rows))) % changes.shape[1], rows[None, :, None])
