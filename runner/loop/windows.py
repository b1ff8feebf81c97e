"""Cuts a text into calls of an artifact's methods: prefill chunks, verify windows and deferred draft slots."""

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle3.runner.contract import Metadata
from eagle3.runner.hosts.session import Step


class Seed:
    """The draft slots from ``slot`` on that are not yet written: for each, the token after it and the target's
    feature."""

    def __init__(self, slot: int = 0):
        self.slot, self.rows = slot, 0
        self.tokens: list[Tensor] = []
        self._features: list[Tensor] = []

    def add(self, tokens: Tensor, feature: Tensor | None) -> None:
        """Add slots with ``tokens`` [1, T] and ``feature`` [1, T, H], None if no draft reads it."""
        self.rows += tokens.shape[1]
        self.tokens.append(tokens)
        if feature is not None:
            self._features.append(feature)

    def all(self) -> tuple[Tensor, Tensor]:
        if len(self.tokens) == 1:
            return self.tokens[0], self._features[0]
        return torch.cat(self.tokens, dim=1), torch.cat(self._features, dim=1)


def window_of(anchor: Tensor, proposed: Sequence[int]) -> Tensor:
    """Return the window [1, 1 + k] of the anchor [1, 1] and k proposals."""
    return torch.cat([anchor, torch.tensor([proposed])], dim=1) if proposed else anchor


def first_row(step: Step) -> Step:
    ids, *others = (None if each is None else each[:, :1] for each in step)
    assert ids is not None
    return Step(ids, *others)


def chunks(start: int, end: int, metadata: Metadata) -> list[tuple[int, int]]:
    """Split the positions from ``start`` to ``end`` into the longest chunks that ``prefill`` takes, and a rest shorter
    than its minimum into verify windows."""
    window, spans = metadata.window, []
    while start < end:
        left = end - start
        size = min(left, metadata.max_prefill if left >= metadata.min_prefill else window)
        spans.append((start, start + size))
        start += size
    return spans
