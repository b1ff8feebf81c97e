"""Tracks the happens-before relation between the programs of a launch, by vector clocks.

A program counts its barriers; the part between two barriers is an interval. A program has many threads, but a single
thread makes an atomic operation. An atomic with release semantics therefore publishes only the intervals that a barrier
has ended. An atomic with acquire semantics makes the intervals published at its address known to its thread, and at the
next barrier to all threads. Both need a scope that covers other programs: gpu or sys. Read-modify-writes continue
earlier publications, whatever their own semantics; a plain store to the address ends them (PTX ISA, memory consistency
model: release patterns, acquire patterns).

The result of a scalar atomic reaches the other threads through shared memory and a barrier. If the kernel uses the
result, an interval ends there. Otherwise the compiler leaves that barrier out.
"""

from collections.abc import Mapping

import numpy as np

EVERYWHERE = ("gpu", "sys")
"""Scopes that hold for programs on other multiprocessors."""
Clock = dict[int, int]
"""The intervals that are known to be over, by program."""


def _merge(into: Clock, other: Mapping[int, int]) -> None:
    for program, intervals in other.items():
        into[program] = max(into.get(program, 0), intervals)


class Clocks:
    def __init__(self):
        self.interval: dict[int, int] = {}
        """The barriers that each program has passed."""
        self._known: dict[int, Clock] = {}
        self._acquired: dict[int, Clock] = {}
        self._published: dict[int, Clock] = {}

    def begin(self, program: int) -> None:
        self.interval.setdefault(program, 0)
        self._known.setdefault(program, {})

    def known(self, program: int) -> Clock:
        """Return the clock that all threads of ``program`` know. Callers may keep it, since it is replaced and never
        modified."""
        return self._known[program]

    def barrier(self, program: int) -> bool:
        """End an interval of a program. Returns True if its threads then know of more intervals."""
        self.interval[program] += 1
        acquired = self._acquired.pop(program, {})
        known = dict(self._known[program])
        _merge(known, acquired)
        news = known != self._known[program]
        self._known[program] = known
        return news

    def atomic(self, program: int, addresses: np.ndarray, semantics: str, scope: str) -> None:
        """Record an atomic operation. ``semantics`` is relaxed, acquire, release or acq_rel."""
        if scope not in EVERYWHERE:
            return
        acquired = self._acquired.setdefault(program, {})
        if semantics in ("acquire", "acq_rel"):
            for address in addresses.tolist():
                _merge(acquired, self._published.get(address, {}))
        if semantics in ("release", "acq_rel"):
            for address in addresses.tolist():
                published = self._published.setdefault(address, {})
                _merge(published, self._known[program])
                _merge(published, acquired)
                _merge(published, {program: self.interval[program]})

    def stored(self, addresses: np.ndarray) -> None:
        """Record a plain store, which replaces values that an atomic wrote."""
        if self._published:
            for address in np.intersect1d(addresses, np.fromiter(self._published, np.uint64)).tolist():
                del self._published[address]
