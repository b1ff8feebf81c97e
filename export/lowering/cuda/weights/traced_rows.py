"""The numbers of rows that a traced dimension stands for."""

import torch


def most_rows(length: int | torch.SymInt) -> int:
    """Return the upper bound of a dimension of a traced tensor."""
    return length if isinstance(length, int) else int(length.node.shape_env.bound_sympy(length.node.expr).upper)


def from_one_row(length: int | torch.SymInt) -> bool:
    """Return True if a dimension of a traced tensor is the number of rows of a method that accepts a single row, or
    that number plus the mask rows of a P-EAGLE. A trace gives the lower bound 2 to a dimension that begins at 1."""
    if isinstance(length, int):
        return length == 1
    return any(length.node.shape_env.bound_sympy(rows).lower <= 2 for rows in length.node.expr.free_symbols)
