"""Checks launches of Triton's interpreter for results that may differ on a GPU, which runs the programs of a grid at
once.

The interpreter runs one program after the other, so its results do not show a race. The detector

* records every load, store, atomic and barrier, and reports two unordered accesses of one place, at least one of them
  a store (``race_clocks``): accesses of two programs, and accesses of one program without a barrier between them,
  because different threads may make them;
* reports loads of unwritten bytes, accesses of memory that the launch was not given, and counters whose values differ
  after the launch;
* runs the launch again in other orders of its programs from the same memory, and compares the results bit for bit.

``race_by_design`` lists intended accesses with the reason, and a condition that each must meet.

The detector does not see orders of arrival that no run has, the threads of a program, tensor memory, TMA, and shared
memory, whose barriers the compiler places.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from race_by_design import Verdict, by_design
from race_clocks import Clocks
from race_log import Access, Changes, Reach, Site, current_site
from race_memory import Memory
from race_pairs import Meeting, meetings

ORDERS = ("forward", "reversed", "shuffled", "delayed")
"""In the order ``delayed``, which is shuffled too, a program sees another's stores when it has acquired them or the
launch has ended."""


class Finding(NamedTuple):
    kernel: str
    what: str
    site: Site
    other: Site | None = None

    def __str__(self) -> str:
        other = f"\n    {self.other}" if self.other else ""
        return f"{self.kernel}: {self.what}\n    {self.site}{other}"


class Launch:
    """One run of all programs of a launch."""

    def __init__(self, kernel: str, delayed: bool, reach: Reach):
        self.kernel, self.delayed = kernel, delayed
        self.accesses: list[Access] = []
        self.changes, self.clocks = Changes(reach), Clocks()
        self.program, self._mark, self._revealed = 0, 0, set()
        self.counting: dict[int, Site] = {}
        """The place of each atomic whose result is used, by address."""
        self.replaced: dict[int, np.ndarray] = {}
        """The cells, of ``width`` bytes, in which a load (by its number) is to find another value than memory holds."""
        self.width = 1

    def begin(self, program: int) -> None:
        self.program, self._mark = program, self.changes.mark()
        self._revealed = set()
        self.clocks.begin(program)

    def end(self) -> None:
        if self.delayed:
            self.changes.take_back(self._mark, atomics=False)

    def note(self, kind: str, addresses: np.ndarray, size: int, site: Site, values=None, scope="") -> Access:
        clocks, program = self.clocks, self.program
        known = clocks.interval[program], clocks.known(program)
        found = Access(len(self.accesses), program, *known, kind, addresses, size, site, values, scope)
        self.accesses.append(found)
        return found

    def store(self, addresses: np.ndarray, size: int, values: np.ndarray, site: Site) -> None:
        self.note("store", addresses, size, site, values)
        self.changes.note(addresses, size)
        self.clocks.stored(addresses)

    def atomic(self, addresses: np.ndarray, size: int, semantics: str, scope: str, site: Site) -> None:
        self.note("atomic", addresses, size, site, scope=scope)
        self.changes.note(addresses, size, atomic=True)
        self.clocks.atomic(self.program, addresses, semantics, scope)

    def barrier(self) -> None:
        if self.clocks.barrier(self.program) and self.delayed:
            self._reveal()

    def _reveal(self) -> None:
        """Make the stores that the program has acquired visible to it. Its own stores take precedence."""
        known, own = self.clocks.known(self.program), []
        for access in self.accesses:
            if access.kind != "store" or access.number in self._revealed:
                continue
            if access.program == self.program:
                own.append(access)
            elif access.interval < known.get(access.program, 0):
                self.changes.write(access.addresses, access.values)
                self._revealed.add(access.number)
        for access in own:
            self.changes.write(access.addresses, access.values)

    def finish(self, shuffle: Callable[[list], None]) -> None:
        """Make all stores visible, in the order of the run if programs wait for each other, otherwise in random
        order."""
        if not self.delayed:
            return
        stores = [access for access in self.accesses if access.kind == "store"]
        if not any(access.kind == "atomic" for access in self.accesses):
            programs = sorted({access.program for access in stores})
            shuffle(programs)
            place = {program: at for at, program in enumerate(programs)}
            stores.sort(key=lambda access: place[access.program])
        for access in stores:
            self.changes.write(access.addresses, access.values)


class Detector:
    """Runs launches and counts its ``findings``.

    ``memory`` is None if allocations are unknown. ``orders`` are the orders in which each launch is run; the results of
    the first one remain. In the orders in ``analysed`` accesses are compared, in the others only results.
    """

    def __init__(self, orders: Sequence[str] = ORDERS, analysed: Sequence[str] = ORDERS, seed: int = 0):
        if not orders or {*orders, *analysed} - {*ORDERS}:
            raise ValueError(f"orders are {', '.join(orders)}: name some of {', '.join(ORDERS)}")
        self.orders, self.analysed = tuple(orders), tuple(analysed)
        self.reach: Reach
        """Set by the hooks."""
        self.memory: Memory | None = None
        self.findings: Counter[Finding] = Counter()
        self.by_design: Counter[str] = Counter()
        """The number of pairs of accesses that were allowed, by the reason."""
        self.launches: Counter[str] = Counter()
        self.launch: Launch | None = None
        self._random, self._watches_memory = random.Random(seed), False

    def report(self) -> str:
        return "\n".join(f"{count} x {finding}" for finding, count in self.findings.items())

    def run(self, kernel: str, programs: Sequence, run: Callable) -> None:
        """Run a launch in all orders. ``run(program)`` runs one of ``programs`` by the interpreter."""
        self.launches[kernel] += 1
        first = left = None
        for order in self.orders:
            self._watches_memory = self.memory is not None and first is None
            sequence = self._sequence(order, len(programs))
            launch = self._execute(Launch(kernel, order == "delayed", self.reach), sequence, programs, run)
            suspects = self._analyse(launch) if order in self.analysed else []
            own = launch.changes.now()
            if first is None:
                first, left = launch, own
                if len(self.orders) == 1 and not suspects:
                    return  # memory already has its final contents
                launch.changes.take_back()
            elif site := self._difference(first, left, launch):
                what = f"what it leaves in the order {order} is not what it leaves in the order {self.orders[0]}"
                self._found(launch, what, site)
            if suspects:
                self._prove_unused(launch, own, suspects, sequence, programs, run)
        for addresses, values in left:
            self.reach.poke(addresses, values)

    def _sequence(self, order: str, count: int) -> list[int]:
        numbers = list(range(count))
        if order == "reversed":
            numbers.reverse()
        elif order != "forward":
            self._random.shuffle(numbers)
        return numbers

    def _execute(self, launch: Launch, sequence: list[int], programs: Sequence, run: Callable) -> Launch:
        self.launch = launch
        try:
            for number in sequence:
                launch.begin(number)
                run(programs[number])
                launch.end()
        finally:
            self.launch = None
        launch.finish(self._random.shuffle)
        return launch

    def _analyse(self, launch: Launch) -> list[tuple[Meeting, Verdict]]:
        """Return those meetings that are by design only if the loaded values are not used."""
        accesses, suspects = launch.accesses, []
        for meeting in meetings(accesses):
            verdict = by_design(meeting, accesses)
            if verdict is None:
                self._found(launch, meeting.describe(), meeting.early.site, meeting.late.site)
            elif verdict.unused.size:
                suspects.append((meeting, verdict))
            else:
                self.by_design[verdict.reason] += 1
        for address, (before, size) in launch.changes.first_of_atomics().items():
            after = int(self.reach.peek(np.array([address], np.uint64), size)[0])
            if address in launch.counting and after != before:
                what = f"a counter holds {after} after the launch, {before} before"
                self._found(launch, what, launch.counting[address])
        return suspects

    def _prove_unused(
        self, launch: Launch, left: list, suspects: list, sequence: list[int], programs: Sequence, run: Callable
    ) -> None:
        """Run ``launch`` again with other values in cells that should not matter, and compare the results."""
        again = Launch(launch.kernel, launch.delayed, self.reach)
        for meeting, verdict in suspects:
            load = next(access for access in (meeting.early, meeting.late) if access.kind == "load")
            cells = again.replaced.get(load.number, verdict.unused)
            again.replaced[load.number] = np.union1d(cells, verdict.unused)
        again.width = suspects[0][0].width
        used = self._difference(launch, left, self._execute(again, sequence, programs, run))
        for meeting, verdict in suspects:
            if used:
                self._found(launch, meeting.describe(), meeting.early.site, meeting.late.site)
            else:
                self.by_design[verdict.reason] += 1

    def _difference(self, first: Launch, left: list, launch: Launch) -> Site | None:
        """Undo ``launch``, and return the site of a write whose result differs from that in ``first``; None if there is
        none."""
        different = [addresses[self.reach.peek(addresses, values.itemsize) != values] for addresses, values in left]
        theirs = launch.changes.now()
        launch.changes.take_back()
        known = np.concatenate([np.zeros(0, np.uint64), *(addresses for addresses, _ in left)])
        for addresses, values in theirs:
            changed = addresses[self.reach.peek(addresses, values.itemsize) != values]
            if changed.size:  # rarely, and the search takes long
                different.append(changed[~np.isin(changed, known)])
        wrong = np.concatenate(different) if different else known
        if not wrong.size:
            return None
        accesses = reversed(first.accesses + launch.accesses)
        return next(access.site for access in accesses if access.writes and wrong[0] in access.addresses)

    def _found(self, launch: Launch, what: str, site: Site, other: Site | None = None) -> None:
        self.findings[Finding(launch.kernel, what, site, other)] += 1

    # --- Calls by the hooks, about the running program

    def inside(self, addresses: np.ndarray, size: int, what: str) -> np.ndarray:
        """Return bool [n]: the elements that the launch may access; the others must not be read or written. ``what`` is
        "a load from", "a store to" or "an atomic on"."""
        if self.memory is None:
            return np.ones(addresses.shape, bool)
        inside = self.memory.inside(addresses, size)
        if self._watches_memory and not inside.all():
            self._found(self.launch, f"{what} memory that the launch was not given", current_site())
        return inside

    def load(self, addresses: np.ndarray, size: int) -> np.ndarray | None:
        """Record a load. Return the elements for which it must return another value than that in memory; None if there
        are none."""
        site = current_site()
        access = self.launch.note("load", addresses, size, site)
        if self._watches_memory and (name := self.memory.unwritten(addresses, size)):
            self._found(self.launch, f"a load of bytes of {name} that nobody has written", site)
        if access.number not in self.launch.replaced:
            return None
        width = self.launch.width
        return np.isin(access.cells(width), self.launch.replaced[access.number]).reshape(len(addresses), -1).any(1)

    def store(self, addresses: np.ndarray, size: int, values: np.ndarray) -> None:
        self.launch.store(addresses, size, values, current_site())
        if self._watches_memory:
            self.memory.write(addresses, size)

    def atomic(self, addresses: np.ndarray, size: int, semantics: str, scope: str) -> Callable[[], None]:
        """Check an atomic before it runs. Returns the function to call when its result is used."""
        launch, site = self.launch, current_site()
        launch.atomic(addresses, size, semantics, scope, site)

        def used() -> None:
            for address in addresses.tolist():
                launch.counting.setdefault(address, site)
            if addresses.size == 1:
                launch.barrier()

        return used

    def barrier(self) -> None:
        self.launch.barrier()
