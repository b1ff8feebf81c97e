"""Computes from a kernel's PTX how many 128-byte lines and 32-byte sectors a warp's loads from global memory touch.

Machine code shows a load's width but not its addresses. The PTX, which a fatbin holds beside the machine code, has the
arithmetic from the thread index and the kernel's parameters to each address; strides are constants in it. This module
evaluates that arithmetic for the threads of a block. The terms are Nsight Compute's: a *request* is an instruction of a
warp, a *sector* is 32 bytes, and four sectors make a *line* of L1. Its "Sectors/Req" for global loads is
``Load.sectors``.

The block evaluated is the first one, as it enters the loop with matrix multiplications (without such a loop: the code
up to the last one). Each tensor is assumed to begin on a line, and masks are assumed to let all threads load. Loads
whose address depends on loaded data are left out.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

LINE, SECTOR, WARP = 128, 32, 32
TENSOR = 40  # an address holds the number of its parameter above this many bits

STATEMENT = re.compile(
    r"^[^\S\n]*(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)[^\S\n]*([^;\n]*?)[^\S\n]*;|^(\$L\w+):", re.MULTILINE
)
POINTER = re.compile(r"\.param \.u64 \.ptr[^\n,]* \w+_param_(\d+)")
THREADS = re.compile(r"\.reqntid (\d+)")
PRODUCT = re.compile(r"mma\.|wgmma\.")
LOAD = re.compile(r"ld\.global\S*?(?:\.v(\d))?\.[busf](\d+)$")
COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global")
REGISTER = re.compile(r"%\w+")
PLACE = re.compile(r"\[\s*(%\w+)\s*(?:\+\s*(-?\w+))?\s*\]")
NUMBER = re.compile(r"(-?(?:0x[0-9A-Fa-f]+|\d+))U?")
BLOCK = re.compile(r"%(n?)ctaid\.([xyz])")


@dataclass(frozen=True)
class Load:
    """A load instruction from the pointer ``parameter`` (a number), of ``bytes`` per thread.

    ``lines`` and ``sectors`` are the mean counts that a warp touches; ``fewest`` is the number of lines that the same
    bytes would take side by side.
    """

    parameter: int
    bytes: int
    lines: float
    sectors: float
    fewest: float


def loads(ptx: str, grid: Sequence[int], rows: int) -> tuple[Load, ...]:
    """Return the loads in the loop that multiplies matrices, for a ``grid`` of blocks and ``rows`` as the value of
    every parameter that is not a pointer.

    Returns () without PTX or without matrix multiplications. Leaves out loads whose addresses cannot be computed.
    """
    threads = THREADS.search(ptx)
    if not threads:
        return ()
    kernel = _Kernel(ptx, int(threads[1]), grid, rows)
    return tuple(filter(None, map(kernel.load, kernel.body())))


class Unknown(Exception):
    """A value that is loaded, or arithmetic that this module does not do."""


Values = np.ndarray
"""The value of a register in each thread, int64 [threads]: 64-bit values are signed, narrower ones unsigned."""


class Statement(NamedTuple):
    """An instruction or a label."""

    negated: str
    predicate: str
    name: str
    text: str
    label: str

    def arguments(self) -> list[str]:
        return re.split(r"\s*,\s*", self.text)


class Registers:
    """The values of registers and operands, worked out once each. ``_worked_out`` returns one, or raises Unknown."""

    def __init__(self) -> None:
        self.known: dict = {}

    def value(self, name: str) -> Any:
        """Return the value of a register or an operand. Raises Unknown."""
        if name not in self.known:
            self.known[name] = None  # stays None if the value is unknown or depends on itself
            self.known[name] = self._worked_out(name)
        found = self.known[name]
        if found is None:
            raise Unknown(name)
        return found


class _Kernel(Registers):
    """The first block of a kernel, with the values of its threads' registers."""

    def __init__(self, ptx: str, threads: int, grid: Sequence[int], rows: int):
        super().__init__()
        self.statements = [Statement(*found) for found in STATEMENT.findall(ptx)]
        self.pointers = set(map(int, POINTER.findall(ptx)))
        self.threads, self.grid, self.rows = threads, dict(zip("xyz", grid, strict=True)), rows
        self.definitions: dict[str, Statement] = {}  # the first definition holds a loop variable's initial value
        for statement in self.statements:
            target = statement.arguments()[0]
            if LOAD.match(statement.name):  # the load replaces the zeros assigned before it
                self.definitions |= dict.fromkeys(REGISTER.findall(statement.text.split("[")[0]), statement)
            elif REGISTER.fullmatch(target) and not statement.predicate:
                self.definitions.setdefault(target, statement)

    def body(self) -> list[Statement]:
        """Return the innermost loop that multiplies matrices, or everything up to the last multiplication."""
        numbered = list(enumerate(self.statements))
        products = [at for at, statement in numbered if PRODUCT.match(statement.name)]
        labels = {statement.label: at for at, statement in numbered if statement.label}
        branches = [(labels.get(each.text), at) for at, each in numbered if each.name.startswith("bra")]
        loops = [(start, end) for start, end in branches if start is not None and start < end]
        found = [(start, end) for start, end in loops if any(start < at < end for at in products)]
        start, end = min(found, key=lambda loop: loop[1] - loop[0], default=(0, max(products, default=0)))
        return self.statements[start:end]

    def load(self, statement: Statement) -> Load | None:
        """Return the load that a statement makes; None for another instruction, for a load that no thread executes, and
        for one whose addresses are unknown."""
        load = LOAD.match(statement.name)
        if not load and not COPY.match(statement.name):
            return None
        size = int(load[1] or 1) * int(load[2]) // 8 if load else int(statement.arguments()[2], 0)
        register, offset = (PLACE.findall(statement.text) or [("", "")])[-1]
        try:
            at = self.value(register) + int(offset or "0", 0)
        except Unknown:
            return None
        if not self._executed(statement):
            return None
        found = [_touched(warp, size) for warp in at.reshape(-1, WARP)]
        return Load(int(at[0] >> TENSOR) - 1, size, *np.mean(found, axis=0).tolist())

    def _executed(self, statement: Statement) -> bool:
        """Return True if any thread may execute the load. The compiler keeps some loads whose mask is off in every
        thread."""
        try:
            return not statement.predicate or bool((self.value(statement.predicate) != bool(statement.negated)).any())
        except Unknown:
            return True

    def _worked_out(self, name: str) -> Values:
        if name == "%tid.x":
            return np.arange(self.threads)
        if name in self.definitions:
            statement = self.definitions[name]
            sources = statement.arguments()[1:]
            if statement.name.startswith("ld.param"):
                return np.array([self._parameter(number) for number in self.value(sources[0].strip("[] ")).tolist()])
            return computed(statement.name, [self.value(source) for source in sources])
        if block := BLOCK.fullmatch(name):
            return np.full(self.threads, self.grid[block[2]] if block[1] else 0)
        number = NUMBER.fullmatch(name) or re.search(r"_param_(\d+)$", name)
        if not number:
            raise Unknown(name)
        return np.full(self.threads, int(number[1], 0))

    def _parameter(self, number: int) -> int:
        return (number + 1) << TENSOR if number in self.pointers else self.rows


def _touched(at: Values, size: int) -> tuple[int, int, int]:
    """Return the lines and sectors that a warp's addresses touch, and the fewest lines that its bytes could take."""
    lines, sectors = (len({*(at // unit), *((at + size - 1) // unit)}) for unit in (LINE, SECTOR))
    return lines, sectors, -(-len(np.unique(at)) * size // LINE)


# Arithmetic of integers

COMPARED = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
COMPUTED: dict[str, Callable[..., Values]] = {
    "mov": np.positive,
    "cvt": np.positive,
    "cvta": np.positive,
    "neg": np.negative,
    "not": np.invert,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": lambda a, b: np.trunc(a / b).astype(np.int64),
    "rem": np.fmod,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shl": np.left_shift,
    "shr": np.right_shift,
}


def computed(operation: str, sources: list[Values]) -> Values:
    """Evaluate an integer or predicate instruction on its source values. Raises Unknown for any other instruction."""
    name, *modifiers = operation.split(".")
    types = [_type(modifier) for modifier in modifiers]
    last = types[-1] if types else None
    if last is None:
        raise Unknown(operation)
    bits, signed = last
    result_bits = 2 * bits if "wide" in modifiers else bits
    if name == "mad":
        return _of_bits(computed(operation.replace("mad", "mul"), sources[:2]) + sources[2], result_bits, False)
    given = [_of_bits(each, bits, signed) for each in sources]
    if name == "selp":
        return np.where(given[2], *given[:2])
    if name == "bfe":
        return _of_bits(_of_bits(given[0] >> given[1], int(given[2][0]), signed), bits, False)
    if name == "setp" and len(modifiers) == 2:
        return COMPARED[modifiers[0]](*given).astype(np.int64)
    converted = types[0] if name == "cvt" else (result_bits, False)
    if name not in COMPUTED or converted is None or ("hi" in modifiers and bits == 64):
        raise Unknown(operation)
    result = COMPUTED[name](*given)
    if "hi" in modifiers:
        result = result >> bits
    return _of_bits(result, converted[0], False)


def _type(modifier: str) -> tuple[int, bool] | None:
    """Return (bits, signed) of an integer type; None for any other modifier."""
    found = re.fullmatch(r"([usb])(\d+)|pred", modifier)
    return found and (int(found[2] or 1), found[1] == "s")


def _of_bits(value: Values, bits: int, signed: bool) -> Values:
    """Return the lowest ``bits`` bits of ``value`` as a number."""
    if bits == 64:
        return value
    low = value & (1 << bits) - 1
    return low - (low >> bits - 1 << bits) if signed else low
