"""Finds data races in global memory by reading a kernel's PTX.

Within a block: a store by one warp and a load by another of the same address are ordered only by a barrier
(``bar.sync``) on every path between them. Without one the load sometimes returns the old value. An interpreter that
runs the threads of a block together cannot show this. This module therefore follows a kernel's instructions along every
path and looks for two accesses without a barrier between them, of which one is a load. Two accesses may overlap if
their addresses come from the same pointer argument; different arguments are assumed to be different memory. Accesses
that provably stay within one thread are left out (``thread_places.py``).

Two stores by two threads are a fault as well if their values may differ, but only where their addresses are known for
each thread. Unknown addresses are assumed to differ, because many instructions side by side store one tile, often with
strides that are arguments. The tests' race detector compares the elements of all stores.

Between blocks of a grid: memory is handed over by an atomic (NVIDIA's PTX ISA, memory consistency model). The atomic
must release and acquire at GPU scope. A barrier must come before it, to release what the other threads of the block
stored, and after it, to acquire for the other threads.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from machine_code.ptx_flow import Flow, Instruction
from machine_code.thread_places import Places

LOAD, STORE, ATOMIC = "loaded", "stored", "changed by an atomic"
HARMLESS = ("param", "shared", "local", "const")
MEMORY = ("ld", "st", "atom", "red", "cp", "multimem", "tensormap", "discard", "applypriority")
ASYNC_GROUPS = ("commit_group", "wait_group", "wait_all", "mbarrier")
INTO_L2 = ["async", "bulk", "prefetch", "L2"]
"""A request to L2, which no thread sees."""
FUNCTIONS = ("__assertfail", "vprintf")
NO_BARRIER = "with no barrier on a path between them"
OVERWRITTEN = f"stored by two threads, {NO_BARRIER}"
UNRELEASED = f"stored by all threads, then released by an atomic of one, {NO_BARRIER}"
CACHED = "stored, then loaded by a load that is for constants (ld.global.nc)"
WEAK = "stored, then loaded after an atomic that does not release and acquire for the GPU"
UNFOLLOWED = "stored by other blocks, then loaded with no barrier after the atomic that acquires it"


@dataclass(frozen=True)
class Fault:
    """A possible race between two instructions on the memory of a pointer ``argument``; ``what`` says it in words."""

    argument: str
    first: Instruction
    second: Instruction
    what: str

    def __str__(self) -> str:
        return f"{self.argument} is {self.what}: PTX {self.first} and {self.second}"


def faults(ptx: str, names: Mapping[int, str] | None = None) -> list[Fault]:
    """Return a kernel's faults. Each argument and kind of fault is reported once, by the first pair of instructions.

    ``names`` maps argument numbers to names. Raises ValueError for instructions that this module does not know.
    """
    kernel = _Kernel(Flow(ptx), names or {})
    found: dict[tuple[str, str], Fault] = {}
    for fault in kernel.faults():
        found.setdefault((fault.argument, fault.what), fault)
    return list(found.values())


class _State(NamedTuple):
    """The accesses on any path to an instruction, as bit sets.

    ``recent``: accesses since the last barrier. ``stored``: stores since the kernel began. ``weakly``: stores before an
    atomic that does not release and acquire at GPU scope. ``unfollowed``: stores before an atomic that does, while no
    barrier has followed it.
    """

    recent: int = 0
    stored: int = 0
    weakly: int = 0
    unfollowed: int = 0

    def merged(self, other: "_State") -> "_State":
        return _State(*(mine | theirs for mine, theirs in zip(self, other, strict=True)))


class _Kernel:
    def __init__(self, flow: Flow, names: Mapping[int, str]):
        self.flow, self.names, self.places = flow, names, Places(flow)
        kinds = ((at, access_of(instruction)) for at, instruction in enumerate(flow.instructions))
        self.accesses = {at: kind for at, kind in kinds if kind}
        self.bits = {at: 1 << bit for bit, at in enumerate(self.accesses)}

    def arguments(self, at: int) -> frozenset[str]:
        name, _ = self.flow.instructions[at].place
        found = self.flow.bases.get(name, frozenset())
        if not found:
            raise ValueError(f"PTX {self.flow.instructions[at]}: the argument from which {name} comes is unknown")
        return found

    @cached_property
    def before(self) -> dict[int, _State]:
        """The state before each instruction that can be reached."""
        states, changed = {0: _State()}, [0]
        while changed:
            at = changed.pop()
            after = self._after(at, states[at])
            for following in self.flow.following[at]:
                earlier = states.get(following)
                merged = after if earlier is None else earlier.merged(after)
                if merged != earlier:
                    states[following] = merged
                    changed.append(following)
        return states

    def _after(self, at: int, state: _State) -> _State:
        instruction = self.flow.instructions[at]
        if is_barrier(instruction):
            return state._replace(recent=0, unfollowed=0)
        if at not in self.accesses:
            return state
        recent, stored, weakly, unfollowed = state
        if self.accesses[at] == ATOMIC:
            if is_strong(instruction):
                weakly, unfollowed = 0, unfollowed | stored
            else:
                weakly |= stored
        elif self.accesses[at] == STORE:
            stored |= self.bits[at]
        return _State(recent | self.bits[at], stored, weakly, unfollowed)

    def faults(self) -> Iterator[Fault]:
        for at, kind in self.accesses.items():
            if at not in self.before:
                continue  # the instruction cannot be reached
            recent, stored, weakly, unfollowed = self.before[at]
            yield from self._unordered(at, kind, recent)
            if kind == LOAD:
                cached = "nc" in self.flow.instructions[at].parts
                for stores, what in ((stored if cached else 0, CACHED), (weakly, WEAK), (unfollowed, UNFOLLOWED)):
                    yield from self._met(at, stores, what)
            if kind == STORE:  # ``recent`` has the store itself if no barrier separates iterations
                yield from self._overwritten(at, at, together=True)
            if kind == ATOMIC and is_strong(self.flow.instructions[at]):
                yield from self._unreleased(at, recent)

    def _unordered(self, at: int, kind: str, recent: int) -> Iterator[Fault]:
        for other in self._of(recent):
            pair = self.accesses[other], kind
            if LOAD in pair and pair != (LOAD, LOAD):
                yield from self._pair(other, at, f"{pair[0]}, then {kind} by other threads, {NO_BARRIER}")
            elif pair == (STORE, STORE):
                yield from self._overwritten(other, at)

    def _unreleased(self, at: int, recent: int) -> Iterator[Fault]:
        for other in self._of(recent):
            if self.accesses[other] == STORE and not self.arguments(other) & self.arguments(at):
                for argument in self.arguments(other):
                    yield self._fault(argument, other, at, UNRELEASED)

    def _met(self, at: int, stored: int, what: str) -> Iterator[Fault]:
        for other in self._of(stored):
            for argument in self.arguments(other) & self.arguments(at):
                yield self._fault(argument, other, at, what)

    def _pair(self, first: int, second: int, what: str) -> Iterator[Fault]:
        shared = self.arguments(first) & self.arguments(second)
        if shared and not self.places.apart(self.flow.instructions[first], self.flow.instructions[second]):
            for argument in shared:
                yield self._fault(argument, first, second, what)

    def _overwritten(self, first: int, second: int, together: bool = False) -> Iterator[Fault]:
        shared = self.arguments(first) & self.arguments(second)
        stores = self.flow.instructions[first], self.flow.instructions[second]
        if shared and self.places.overwrite(*stores, together):
            for argument in shared:
                yield self._fault(argument, first, second, OVERWRITTEN)

    def _of(self, bits: int) -> Iterable[int]:
        return [at for at, bit in self.bits.items() if bits & bit]

    def _fault(self, argument: str, first: int, second: int, what: str) -> Fault:
        number = argument.rpartition("_param_")[2]
        name = self.names.get(int(number)) if number.isdigit() else None
        shown = f"argument {number} ({name})" if name else f"argument {number}"
        return Fault(shown, self.flow.instructions[first], self.flow.instructions[second], what)


def access_of(instruction: Instruction) -> str | None:
    """Return LOAD, STORE or ATOMIC for an access to global memory, otherwise None.

    Raises ValueError for an instruction whose memory space is not known.
    """
    kind, *parts = instruction.parts
    if kind == "call" and not any(name in operand for operand in instruction.operands for name in FUNCTIONS):
        raise ValueError(f"PTX {instruction}: {instruction.name} {' '.join(instruction.operands)} is not supported")
    if kind not in MEMORY or kind == "cp" and (parts[1:2] and parts[1] in ASYNC_GROUPS or parts[:4] == INTO_L2):
        return None
    copies = kind == "cp" and parts[:2] in (["async", "ca"], ["async", "cg"])
    if copies or kind == "ld" and "global" in parts:
        return LOAD
    if kind in ("st", "atom", "red") and "global" in parts:
        return STORE if kind == "st" else ATOMIC
    if kind in ("ld", "st", "atom", "red") and any(part.split("::")[0] in HARMLESS for part in parts):
        return None
    raise ValueError(f"PTX {instruction}: {instruction.name} is not supported: its memory space is unknown")


def is_barrier(instruction: Instruction) -> bool:
    """Return True for a barrier that waits for all threads of a block."""
    kind, *parts = instruction.parts
    whole = len(instruction.operands) == 1 and not instruction.predicate
    return whole and kind in ("bar", "barrier") and "sync" in parts and "warp" not in parts


def is_strong(instruction: Instruction) -> bool:
    """Return True if an atomic releases and acquires at GPU scope, or at a larger one."""
    return "acq_rel" in instruction.parts and not {"cta", "cluster"} & set(instruction.parts)
