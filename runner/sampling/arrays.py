"""Functions that numpy and PyTorch name differently, so that sampling is written once for logits on host and device.

On the host numpy is two to five times quicker than PyTorch on arrays of a window's size.
"""

from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

STRIDED, LONG = 64, 8192

Array = TypeVar("Array", np.ndarray, Tensor)


class Arrays(Protocol[Array]):
    """The interface of ``Host`` and ``Device``."""

    xp: Any
    """The library, for functions that have the same name in both."""

    def view(self, logits: Tensor, /) -> Array:
        """Return a tensor as an array of this library, without a copy."""

    def array(self, values: np.ndarray) -> Array: ...
    def floats(self, integers: Array) -> Array: ...
    def host(self, ids: Array) -> np.ndarray: ...
    def largest(self, rows: Array, count: int) -> Array:
        """Return the ``count`` largest of each row [1, R, V], ascending: [1, R, count]."""


class Host:
    """Array functions for numpy arrays on the host."""

    xp: Any = np

    view = staticmethod(Tensor.numpy)

    def array(self, values: np.ndarray) -> np.ndarray:
        return np.asarray(values)

    def floats(self, integers: np.ndarray) -> np.ndarray:
        return integers.astype(np.float32)

    def host(self, ids: np.ndarray) -> np.ndarray:
        return ids

    def largest(self, rows: np.ndarray, count: int) -> np.ndarray:
        vocabulary = rows.shape[-1]
        if vocabulary >= LONG and count <= vocabulary // STRIDED:
            return np.stack([_largest_of_long(row, count) for row in rows[0]])[None]
        if count < vocabulary:
            rows = np.partition(rows, vocabulary - count, axis=-1)[..., vocabulary - count :]
        return np.sort(rows, axis=-1)


def _largest_of_long(row: np.ndarray, count: int) -> np.ndarray:
    """Return the ``count`` largest values. The ``count``-th largest maximum of strided groups bounds them from
    below."""
    groups = len(row) // STRIDED
    maxima = row[: groups * STRIDED].reshape(STRIDED, groups).max(axis=0)
    candidates = row[row >= np.partition(maxima, groups - count)[groups - count]]
    return np.sort(np.partition(candidates, len(candidates) - count)[len(candidates) - count :])


class Device:
    """Array functions for tensors on an accelerator."""

    xp: Any = torch

    def __init__(self, device: torch.device):
        self._device = device

    def view(self, logits: Tensor) -> Tensor:
        return logits

    def array(self, values: np.ndarray) -> Tensor:
        return torch.as_tensor(values, device=self._device)

    def floats(self, integers: Tensor) -> Tensor:
        return integers.float()

    def host(self, ids: Tensor) -> np.ndarray:
        return ids.cpu().numpy()

    def largest(self, rows: Tensor, count: int) -> Tensor:
        return rows.topk(count).values.flip(-1)
