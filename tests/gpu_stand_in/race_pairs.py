"""Finds unordered accesses of a launch to the same memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from race_log import Access

MOST_WRITERS = 64
"""Stores of one place that are compared with each other; of more, each with its 64 neighbours."""


@dataclass(eq=False)
class Meeting:
    """Two unordered accesses to the same memory, at least one of which writes; or one store whose lanes write to the
    same place."""

    early: Access
    """The one that came first in this run."""
    late: Access
    width: int
    """Bytes of a cell."""

    @property
    def same_program(self) -> bool:
        return self.early.program == self.late.program

    def common(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The cells that both accesses touch, and their indices in the cells of each."""
        early, late = self.early.cells(self.width), self.late.cells(self.width)
        return np.intersect1d(early, late, return_indices=True)

    def same_bits(self) -> bool:
        """Return True if the stores write the same bits to every place that both write."""
        if self.early.values is None or self.late.values is None:
            return False
        if self.early is self.late:
            both = np.stack((self.early.cells(self.width), self.early.pieces(self.width).astype(np.uint64)), 1)
            return len(np.unique(both, axis=0)) == len(np.unique(both[:, 0]))
        _, of_early, of_late = self.common()
        return np.array_equal(self.early.pieces(self.width)[of_early], self.late.pieces(self.width)[of_late])

    def describe(self) -> str:
        if self.early is self.late:
            return f"lanes of one store write {'the same' if self.same_bits() else 'different'} bits to one place"
        kinds = {self.early.kind, self.late.kind}
        if "atomic" in kinds:
            kind = "atomics of CTA scope" if len(kinds) == 1 else f"an atomic and a {(kinds - {'atomic'}).pop()}"
        elif len(kinds) == 1:
            kind = "stores of the same bits" if self.same_bits() else "stores of different bits"
        else:
            kind = "a load and a store"
        if self.same_program:
            return f"{kind} of one program meet without a barrier between them"
        return f"{kind} of two programs meet and nothing orders them"


class Writes:
    """The places that a launch writes, sorted, each with the accesses that write it."""

    def __init__(self, accesses: Sequence[Access]):
        writes = [access for access in accesses if access.writes]
        self.width = min((access.size for access in accesses), default=1)
        cells = [access.cells(self.width) for access in writes]
        numbers = [np.full(len(found), access.number) for found, access in zip(cells, writes, strict=True)]
        self.cells = np.concatenate(cells) if cells else np.zeros(0, np.uint64)
        self.numbers = np.concatenate(numbers) if cells else np.zeros(0, np.int64)
        order = np.lexsort((self.numbers, self.cells))
        self.cells, self.numbers = self.cells[order], self.numbers[order]

    def meeting_each_other(self) -> set[tuple[int, int]]:
        """Return the pairs of accesses that write to a common place. A store whose lanes do so is paired with
        itself."""
        pairs: set[tuple[int, int]] = set()
        for apart in range(1, min(MOST_WRITERS, len(self.cells) - 1) + 1):
            same = self.cells[apart:] == self.cells[:-apart]
            if not same.any():
                break
            found = np.stack((self.numbers[:-apart][same], self.numbers[apart:][same]), 1)
            pairs.update(map(tuple, np.unique(found, axis=0).tolist()))
        return pairs

    def meeting(self, load: Access) -> set[int]:
        """Return the accesses that write to a place that ``load`` reads."""
        if not self.cells.size:
            return set()
        cells = load.cells(self.width)
        if cells.max() < self.cells[0] or cells.min() > self.cells[-1]:
            return set()
        first, behind = np.searchsorted(self.cells, cells), np.searchsorted(self.cells, cells, "right")
        first, counts = first[behind > first], (behind - first)[behind > first]
        places = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        return set(np.unique(self.numbers[places]).tolist())


def meetings(accesses: Sequence[Access]) -> Iterator[Meeting]:
    """Yield the pairs of ``accesses`` that touch the same bytes without an order between them, as indices into
    ``accesses``."""
    writes = Writes(accesses)
    pairs = writes.meeting_each_other()
    for load in accesses:
        if load.kind == "load":
            pairs.update((min(number, load.number), max(number, load.number)) for number in writes.meeting(load))
    for a, b in sorted(pairs):
        early, late = accesses[a], accesses[b]
        if early.kind == late.kind == "atomic" and (early is late or "cta" not in (early.scope, late.scope)):
            continue
        if early.program == late.program:
            if early.interval == late.interval and not early.kind == late.kind == "atomic":
                yield Meeting(early, late, writes.width)
        elif not early.is_before(late):
            yield Meeting(early, late, writes.width)
