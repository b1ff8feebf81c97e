"""A session's state as a sequence of bytes: what the caches hold, read from the methods and written back.

The bytes are those of the pieces, step after step. Step i has piece i of each buffer that has so many, in the order of
``read_state``. A buffer whose pieces have all been read or written repeats its last one until the others are done.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from eagle3.runner.contract import StateGroup
from eagle3.runner.hosts.session import Session


def read_pieces(session: Session, slots: int) -> Iterator[Tensor]:
    """Yield the pieces, uint8 each, that hold the state of a text written at positions 0 to ``slots`` - 1."""
    groups = session.metadata.state_groups
    counts = [group.pieces(slots) for group in groups]
    for step in range(max(counts)):
        values = session.read_state(_at(step, counts))
        for value, count in zip(values, _of_buffers(groups, counts), strict=True):
            if step < count:
                yield as_bytes(value)


def write_pieces(session: Session, slots: int, take: Callable[[Tensor], object]) -> None:
    """Write the state back. ``take`` fills each piece, uint8, with its bytes, in the order of ``read_pieces``."""
    groups = session.metadata.state_groups
    counts = [group.pieces(slots) for group in groups]
    values = [torch.empty_like(value) for value in session.read_state(_at(0, counts))]
    for step in range(max(counts)):
        for value, count in zip(values, _of_buffers(groups, counts), strict=True):
            if step < count:
                take(as_bytes(value))
        session.write_state(_at(step, counts), values)


def state_bytes(session: Session, slots: int) -> int:
    """Return the number of bytes of all pieces."""
    groups = session.metadata.state_groups
    counts = [group.pieces(slots) for group in groups]
    values = session.read_state(_at(0, counts))
    return sum(value.nbytes * count for value, count in zip(values, _of_buffers(groups, counts), strict=True))


def as_bytes(value: Tensor) -> Tensor:
    """Return a contiguous tensor's memory as uint8 [bytes]."""
    return value.view(-1).view(torch.uint8)


def _at(step: int, counts: list[int]) -> Tensor:
    return torch.tensor([min(step, count - 1) for count in counts])


def _of_buffers(groups: list[StateGroup], counts: list[int]) -> list[int]:
    return [count for group, count in zip(groups, counts, strict=True) for _ in range(group.buffers)]
