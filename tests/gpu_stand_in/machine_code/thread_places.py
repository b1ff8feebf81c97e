"""Derives the addresses that each thread of a block accesses from a kernel's PTX, without the arguments' values.

An address is split into a number for each thread, a sum of values that all threads of a block have in common
(arguments, the block index), and the steps of loops. If two addresses have the same sum, it can be decided whether two
threads ever access the same byte. Sums are assumed not to overflow.
"""

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from machine_code.ptx import NUMBER, Registers, Unknown, computed
from machine_code.ptx_flow import Flow, Instruction

COPIES = ("mov", "cvt", "cvta")
BETWEEN_LANES = ("shfl", "vote", "match", "redux", "activemask", "elect", "mma", "wmma", "ldmatrix", "stmatrix")
"""Instructions by which the threads of a warp read each other's registers."""
WARP = 32
FLOAT = re.compile(r"(f|bf|tf|e)\d")
NAMED = re.compile(r"[%\w.-]+")
SIZE = re.compile(r"(?:v(\d)\.)?[a-z]+(\d+)$")


@dataclass(frozen=True)
class Value:
    """The sum of ``by_thread`` (int64 [threads]), of each register or argument in ``common`` times its factor, and of
    any multiple of ``step``."""

    by_thread: np.ndarray
    common: Mapping[str, int] = field(default_factory=dict)
    step: int = 0

    def is_number(self) -> bool:
        return not self.common and not self.step

    def is_common(self) -> bool:
        """Return True if the value is the same in all threads and in every iteration of a loop."""
        return not self.step and bool((self.by_thread == self.by_thread[0]).all())

    def plus(self, other: "Value", sign: int = 1) -> "Value":
        common = dict(self.common)
        for name, factor in other.common.items():
            common[name] = common.get(name, 0) + sign * factor
        kept = {name: factor for name, factor in common.items() if factor}
        return Value(self.by_thread + sign * other.by_thread, kept, math.gcd(self.step, other.step))

    def times(self, factor: int) -> "Value":
        common = {name: factor * each for name, each in self.common.items()}
        return Value(self.by_thread * factor, common, abs(self.step * factor))


class Places(Registers):
    """The values and addresses of one kernel's threads."""

    def __init__(self, flow: Flow):
        super().__init__()
        self.flow = flow

    def apart(self, one: Instruction, other: Instruction) -> bool:
        """Return True if no two threads can touch the same byte, one through the access ``one`` and another through
        ``other``; False if that is unknown."""
        return self._touched_by_two(one, other) is False

    def overwrite(self, one: Instruction, other: Instruction, together: bool = False) -> bool:
        """Return True if two threads may store different values to the same byte, one through ``one`` and another
        through ``other``; False if they do not, or if the addresses are unknown. ``together``: both are in the same
        iteration of every loop.

        A thread whose predicate is unknown may store.
        """
        return self._touched_by_two(one, other, together) is True and not self._store_the_same(one, other)

    def _touched_by_two(self, one: Instruction, other: Instruction, together: bool = False) -> bool | None:
        """Return whether two threads can touch the same byte through the two accesses; None if that is unknown."""
        try:
            first, second = (self._address(each) for each in (one, other))
        except Unknown:
            return None
        difference = first.plus(second, -1)
        if difference.common:
            return None
        step = 0 if together else difference.step
        distance = first.by_thread[:, None] - second.by_thread[None, :]
        near = np.zeros_like(distance, dtype=bool)
        for start, size in ((distance, accessed_bytes(other)), (-distance, accessed_bytes(one))):
            near |= (start % step < size) if step else (start >= 0) & (start < size)
        np.fill_diagonal(near, False)
        return bool(near[np.ix_(self._executing(one) & ~self._idle(one), self._executing(other))].any())

    def _store_the_same(self, one: Instruction, other: Instruction) -> bool:
        """Return True if both instructions store the same known values in all threads."""
        if one.parts != other.parts:
            return False
        stored = (NAMED.findall(each.operands[1]) for each in (one, other))
        for mine, theirs in zip(*stored, strict=True):
            try:
                difference = self.value(mine).plus(self.value(theirs), -1)
            except Unknown:
                return False
            if not self.value(mine).is_common() or difference.common or difference.by_thread.any():
                return False
        return True

    def _address(self, instruction: Instruction) -> Value:
        register, offset = instruction.place
        value = self.value(register)
        return Value(value.by_thread + offset, value.common, value.step)

    def _executing(self, instruction: Instruction) -> np.ndarray:
        """Return bool [threads]: True for each thread that may execute the access."""
        if not instruction.predicate:
            return np.ones(self.flow.threads, dtype=bool)
        return self._may_be(instruction.predicate, not instruction.negated)

    def _may_be(self, predicate: str, true: bool) -> np.ndarray:
        found = self.flow.definitions[predicate]
        if true and len(found) == 1 and found[0].name == "and.pred" and not found[0].predicate:
            first, second = (self._may_be(source, True) for source in found[0].operands[1:])
            return first & second
        with suppress(Unknown):
            value = self.value(predicate)
            if value.is_number():
                return (value.by_thread != 0) == true
        return self._may_hold(found[0]) if true and len(found) == 1 else np.ones(self.flow.threads, dtype=bool)

    def _may_hold(self, comparison: Instruction) -> np.ndarray:
        """Return bool [threads]: False where a comparison with a number cannot hold, whatever the common values are.

        The sum's remainder modulo the divisor of its common part is known. It can refute an equation, and also an upper
        bound of an unsigned sum, which is no smaller than its remainder. If the divisor is a power of 2, this also
        holds for sums that overflow. A signed sum whose common part is not negative is no smaller than its part by
        thread.
        """
        may = np.ones(self.flow.threads, dtype=bool)
        if comparison.parts[0] != "setp" or comparison.predicate or len(comparison.parts) != 3:
            return may
        try:
            value, bound = (self.value(source) for source in comparison.operands[1:3])
        except Unknown:
            return may
        _, relation, kind = comparison.parts
        number, divisor = _factor(bound), math.gcd(value.step, *value.common.values())
        if number is None:
            return may
        if relation == "lt" and kind == "s32" and not value.step:
            grows = all(factor > 0 and self._not_negative(name) for name, factor in value.common.items())
            return value.by_thread < number if grows else may
        if divisor < 2 or divisor & (divisor - 1):
            return may
        if relation == "eq":
            return (value.by_thread - number) % divisor == 0
        return value.by_thread % divisor < number if relation == "lt" and kind == "u32" else may

    def _not_negative(self, name: str) -> bool:
        """Return True if a register is never negative: a block's index, and values computed from it without a sign."""
        if re.fullmatch(r"%n?ctaid\.[xyz]|\d+", name):
            return True
        found = self.flow.definitions.get(name, [])
        if len(found) != 1 or found[0].predicate:
            return False
        kind, sources = found[0].parts[0], found[0].operands[1:]
        if kind == "rem":  # a remainder has the sign of the dividend
            return self._not_negative(sources[0])
        of_some = kind == "and" and any(map(self._not_negative, sources))
        return of_some or kind in ("mov", "add", "min", "max") and all(map(self._not_negative, sources))

    def _idle(self, load: Instruction) -> np.ndarray:
        """Return bool [threads]: True for threads that store nothing after a load and pass no value to other threads.
        It does not matter if such a thread loads a value that another thread stores later. These threads repeat the
        work of others because a tensor has fewer elements than the block has places."""
        busy, in_warp = np.zeros(self.flow.threads, dtype=bool), False
        if load.parts[0] != "ld":
            return busy
        for instruction in self.flow.behind(load):
            kind = instruction.parts[0]
            if kind in ("wgmma", "tcgen05"):
                return busy
            in_warp |= kind in BETWEEN_LANES
            if kind in ("st", "atom", "red", "cp"):
                busy |= self._executing(instruction)
        return ~(np.repeat(busy.reshape(-1, WARP).any(1), WARP) if in_warp else busy)

    def _worked_out(self, name: str) -> Value | None:
        threads = self.flow.threads
        if name == "%tid.x":
            return Value(np.arange(threads))
        if number := NUMBER.fullmatch(name):
            return Value(np.full(threads, int(number[1], 0)))
        if re.fullmatch(r"%n?ctaid\.[xyz]", name) or name in self.flow.pointers:
            return Value(np.zeros(threads, np.int64), {name: 1})
        definitions = self.flow.definitions.get(name, [])
        if any(definition.predicate for definition in definitions):
            return None
        if len(definitions) == 1:
            return self._result(definitions[0])
        return self._of_loop(name, definitions) if definitions else None

    def _of_loop(self, name: str, definitions: list[Instruction]) -> Value | None:
        """Return the value of a loop's variable: it starts as one value, and constants are added to it. None if it is
        not such a variable."""
        step, begins = 0, []
        for definition in definitions:
            added = self._added(name, definition)
            if added is None:
                begins.append(definition)
            else:
                step = math.gcd(step, added)
        if len(begins) != 1:
            return None
        begin = self._result(begins[0])
        return begin and Value(begin.by_thread, begin.common, math.gcd(begin.step, step))

    def _added(self, name: str, definition: Instruction) -> int | None:
        """Return the constant that a definition adds to the variable ``name``; None if it does anything else."""
        total = 0
        while definition.name.startswith(("mov.", "add.")):
            sources = definition.operands[1:]
            numbers = [int(found[1], 0) for found in map(NUMBER.fullmatch, sources) if found]
            others = [source for source in sources if not NUMBER.fullmatch(source)]
            if len(others) != 1:
                return None
            total += sum(numbers)
            if others[0] == name:
                return total
            following = self.flow.definitions.get(others[0], [])
            if len(following) != 1 or following[0].predicate:
                return None
            (definition,) = following
        return None

    def _result(self, instruction: Instruction) -> Value | None:
        """Return the result of an instruction, None if it is unknown."""
        kind, sources = instruction.parts[0], instruction.operands[1:]
        if kind == "ld":
            return self._argument(instruction)
        if any(FLOAT.match(part) for part in instruction.parts):
            return None
        try:
            given = [self.value(source) for source in sources]
        except Unknown:
            return None
        if all(value.is_number() for value in given):
            try:
                return Value(computed(instruction.name, [value.by_thread for value in given]))
            except Unknown:
                return None
        return _sum(instruction, given) or self._common(instruction, given)

    def _argument(self, instruction: Instruction) -> Value | None:
        """Return the value of a kernel argument: unknown, but the same in all threads. The argument may be chosen at
        run time."""
        if "param" not in instruction.parts:
            return None
        name, _ = instruction.place
        if name.startswith("%"):
            try:
                chosen = self.value(name)
            except Unknown:
                return None
            return self._common(instruction, [chosen])
        return Value(np.zeros(self.flow.threads, np.int64), {f"[{name}]": 1})

    def _common(self, instruction: Instruction, given: list[Value]) -> Value | None:
        """Return an unknown value that all threads share, named after the register; None if threads may differ."""
        if len(instruction.targets) != 1 or not all(value.is_common() for value in given):
            return None
        return Value(np.zeros(self.flow.threads, np.int64), {instruction.targets[0]: 1})


def _sum(instruction: Instruction, given: list[Value]) -> Value | None:
    """Evaluate additions, shifts and multiplications by constants on values that are not all numbers; otherwise
    None."""
    kind = instruction.parts[0]
    if kind in COPIES:
        return given[0]
    if kind in ("add", "sub"):
        return given[0].plus(given[1], 1 if kind == "add" else -1)
    if kind == "or" and _lie_apart(*given):
        return given[0].plus(given[1])
    if kind == "shl" and (shift := _factor(given[1])) is not None:
        return given[0].times(1 << shift)
    if kind in ("mul", "mad") and "hi" not in instruction.parts:
        first, second = given[:2] if _factor(given[1]) is not None else given[1::-1]
        factor = _factor(second)
        if factor is None:
            return None
        product = first.times(factor)
        return product.plus(given[2]) if kind == "mad" else product
    return None


def _factor(value: Value) -> int | None:
    """Return the number that a value is in every thread, None if it is not one number."""
    return int(value.by_thread[0]) if value.is_number() and value.is_common() else None


def _lie_apart(one: Value, other: Value) -> bool:
    """Return True if no bit is set in both values, one of which is a number in each thread, so that ``or`` adds
    them."""
    for low, high in ((one, other), (other, one)):
        unit = math.gcd(high.step, *high.common.values())
        below = (unit & -unit) - 1  # these bits of ``high`` come only from its part by thread
        if low.is_number() and low.by_thread.min() >= 0 and low.by_thread.max() <= below:
            return not (high.by_thread & below & low.by_thread).any()
    return False


def accessed_bytes(instruction: Instruction) -> int:
    """Return the bytes that a thread accesses."""
    if instruction.parts[0] == "cp":
        return int(instruction.operands[2], 0)
    found = SIZE.search(instruction.name)
    assert found is not None, f"{instruction.name} accesses no memory"
    return int(found[1] or 1) * int(found[2]) // 8
