"""A causal mask of a short window that is kept in keys and queries, for attention that takes no mask.

The first ``WINDOW_SLOTS`` slots of a cache are for the rows of a verify window. Their keys are written there and, for
later calls, at their positions too. Keys and queries have as many more columns as there are such slots: the key in slot
j holds ``MASKED`` in column j, and the query of row t holds 1 in each column behind t. So the score of a later row, or
of a slot that holds an older window, is ``MASKED``, whose softmax is zero, and all other scores stay as they are. Every
row then sees the same slots: these, and those of the positions before the window.
"""

import torch
from torch import Tensor

WINDOW_SLOTS = 8
"""The rows of the longest window that is computed so."""
COLUMNS = WINDOW_SLOTS
MASKED = -1e30
"""Finite, so that its product with 0 is 0. Scores of a trained model stay below 1e6."""


def masking_keys(head_dim: int, dtype: torch.dtype) -> Tensor:
    """Return what is added to the keys in the window's slots: [1, WINDOW_SLOTS, 1, head_dim + COLUMNS]."""
    return _beside(head_dim, MASKED * torch.eye(WINDOW_SLOTS), dtype)


def seeing_queries(head_dim: int, dtype: torch.dtype) -> Tensor:
    """Return what is added to the queries: [1, WINDOW_SLOTS + 1, 1, head_dim + COLUMNS]. Row t is the window's row t;
    the last is of queries that see none of the window's slots."""
    behind = torch.ones(WINDOW_SLOTS, COLUMNS).triu(1)
    return _beside(head_dim, torch.cat((behind, torch.ones(1, COLUMNS))), dtype)


def _beside(head_dim: int, columns: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.nn.functional.pad(columns, (head_dim, 0)).to(dtype)[None, :, None]
