"""Tracks the memory that a kernel may access, and which of its bytes were written."""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(eq=False)
class Allocation:
    start: int
    size: int
    name: str
    written: np.ndarray | None
    """bool by byte; None: all of them."""

    @property
    def end(self) -> int:
        return self.start + self.size


class Memory:
    """Allocations by address. A new allocation replaces those that it overlaps, since they must have been freed."""

    def __init__(self):
        self._starts: list[int] = []
        self._allocations: list[Allocation] = []

    def allocate(self, address: int, size: int, name: str, written: bool) -> None:
        """Add an allocation. With ``written``, all of its bytes count as written, otherwise none."""
        if not size:
            return
        self.free(address, size)
        at = bisect.bisect_left(self._starts, address)
        self._starts.insert(at, address)
        self._allocations.insert(at, Allocation(address, size, name, None if written else np.zeros(size, bool)))

    def free(self, address: int, size: int) -> None:
        at = max(bisect.bisect_right(self._starts, address) - 1, 0)
        while at < len(self._starts) and self._starts[at] < address + size:
            if self._allocations[at].end > address:
                del self._starts[at], self._allocations[at]
            else:
                at += 1

    def at(self, address: int) -> Allocation | None:
        at = bisect.bisect_right(self._starts, address) - 1
        return self._allocations[at] if at >= 0 and address < self._allocations[at].end else None

    def inside(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Return bool [n]: True if the ``size`` bytes at an address lie in one allocation."""
        found = np.zeros(addresses.shape, bool)
        for _, here in self._of(addresses, size):
            found |= here
        return found

    def write(self, addresses: np.ndarray, size: int) -> None:
        for allocation, here in self._of(addresses, size):
            if allocation.written is not None:
                allocation.written[_bytes(allocation, addresses[here], size)] = True

    def unwritten(self, addresses: np.ndarray, size: int) -> str:
        """Return the name of an allocation in which some of these bytes are unwritten, "" if all are written."""
        for allocation, here in self._of(addresses, size):
            written = allocation.written
            if written is not None and not written[_bytes(allocation, addresses[here], size)].all():
                return allocation.name
        return ""

    def _of(self, addresses: np.ndarray, size: int) -> Iterator[tuple[Allocation, np.ndarray]]:
        """Yield each allocation with bool [n], True for the elements that lie in it."""
        left = np.ones(addresses.shape, bool)
        while left.any():
            lowest = addresses[left].min()
            found = self.at(int(lowest))
            if found is None:
                left &= addresses != lowest
                continue
            below = left & (addresses < np.uint64(found.end))
            yield found, below & (addresses + np.uint64(size) <= np.uint64(found.end))
            left &= ~below


def _bytes(allocation: Allocation, addresses: np.ndarray, size: int) -> np.ndarray:
    first = (addresses - np.uint64(allocation.start)).astype(np.int64)
    return first[:, None] + np.arange(size)
