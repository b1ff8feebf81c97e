"""The arithmetic of recurrent layers in plain PyTorch, row by row and of any floating dtype, for ``recurrent``."""

import torch
from torch import Tensor

from eagle3.targets.spec import ROLLBACK_ROWS


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
