"""What a warp's loads from global memory touch, by a kernel's PTX: 128-byte lines and 32-byte sectors of a request.

Machine code has a load's width, not its addresses. The PTX that it was assembled from, which a fatbin holds beside it,
has the arithmetic from a thread's number and the kernel's parameters to each address, strides being constants in it. So
the addresses of a block's threads are worked out here. Terms are Nsight Compute's: a *request* is a warp's instruction,
a *sector* 32 bytes, four to a *line* of L1; its "Sectors/Req" of global loads is ``Load.sectors``.

The block is the first, as it enters the loop that multiplies (without a loop: up to the last product). Each tensor is
taken to begin on a line, and masks to let all threads load. What depends on loaded data is left out.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

LINE, SECTOR, WARP = 128, 32, 32
TENSOR = 40  # bits of an address below the number of the parameter that it is in

STEP = re.compile(r"^[^\S\n]*(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)[^\S\n]*([^;\n]*?)[^\S\n]*;|^(\$L\w+):", re.MULTILINE)
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
    """An instruction that loads from the pointer ``parameter`` (by number), ``bytes`` a thread: the lines and sectors
    that a warp touches, the mean of a block's warps, and the ``fewest`` lines for its bytes side by side."""

    parameter: int
    bytes: int
    lines: float
    sectors: float
    fewest: float


def loads(ptx: str, grid: Sequence[int], rows: int) -> tuple[Load, ...]:
    """Those of the loop that multiplies matrices, over a ``grid`` of blocks, of a kernel whose numbers are ``rows``.

    Empty where nothing is multiplied, and without PTX; a load whose addresses cannot be worked out is left out.
    """
    threads = THREADS.search(ptx)
    if not threads:
        return ()
    kernel = _Kernel(ptx, int(threads[1]), grid, rows)
    return tuple(filter(None, map(kernel.load, kernel.body())))


class Unknown(Exception):
    """A value that is loaded, or arithmetic that this module does not do."""


Values = np.ndarray
"""Of a register, int64 [threads]: 64 bits with their sign, fewer without."""


class Step(NamedTuple):
    """An instruction, or a label."""

    negated: str
    predicate: str
    name: str
    text: str
    label: str

    def arguments(self) -> list[str]:
        return re.split(r"\s*,\s*", self.text)


class _Kernel:
    """One block of it."""

    def __init__(self, ptx: str, threads: int, grid: Sequence[int], rows: int):
        self.steps = [Step(*found) for found in STEP.findall(ptx)]
        self.pointers = set(map(int, POINTER.findall(ptx)))
        self.threads, self.grid, self.rows = threads, dict(zip("xyz", grid, strict=True)), rows
        self.known: dict[str, Values | None] = {}
        self.definitions: dict[str, Step] = {}  # the first: what a loop changes, as it is when the loop is entered
        for step in self.steps:
            target = step.arguments()[0]
            if LOAD.match(step.name):  # in place of the zeros that stand before it
                self.definitions |= dict.fromkeys(REGISTER.findall(step.text.split("[")[0]), step)
            elif REGISTER.fullmatch(target) and not step.predicate:
                self.definitions.setdefault(target, step)

    def body(self) -> list[Step]:
        """The innermost loop that multiplies, or everything up to the last product."""
        products = [at for at, step in enumerate(self.steps) if PRODUCT.match(step.name)]
        labels = {step.label: at for at, step in enumerate(self.steps) if step.label}
        branches = [(labels.get(step.text), at) for at, step in enumerate(self.steps) if step.name.startswith("bra")]
        loops = [(start, end) for start, end in branches if start is not None and start < end]
        found = [(start, end) for start, end in loops if any(start < at < end for at in products)]
        start, end = min(found, key=lambda loop: loop[1] - loop[0], default=(0, max(products, default=0)))
        return self.steps[start:end]

    def load(self, step: Step) -> Load | None:
        """None for what is no load, one that no thread makes, and one whose addresses are not known."""
        load = LOAD.match(step.name)
        if not load and not COPY.match(step.name):
            return None
        size = int(load[1] or 1) * int(load[2]) // 8 if load else int(step.arguments()[2], 0)
        register, offset = (PLACE.findall(step.text) or [("", "")])[-1]
        try:
            at = self.value(register) + int(offset or "0", 0)
        except Unknown:
            return None
        if not self._made(step):
            return None
        found = [_touched(warp, size) for warp in at.reshape(-1, WARP)]
        return Load(int(at[0] >> TENSOR) - 1, size, *np.mean(found, axis=0).tolist())

    def _made(self, step: Step) -> bool:
        """Whether any thread makes it: some loads stand there for the compiler's eyes alone."""
        try:
            return not step.predicate or bool((self.value(step.predicate) != bool(step.negated)).any())
        except Unknown:
            return True

    def value(self, name: str) -> Values:
        """Of a register or an operand. Raises Unknown."""
        if name not in self.known:
            self.known[name] = None  # where it is asked for on the way, or is not found
            self.known[name] = self._worked_out(name)
        found = self.known[name]
        if found is None:
            raise Unknown(name)
        return found

    def _worked_out(self, name: str) -> Values:
        if name == "%tid.x":
            return np.arange(self.threads)
        if name in self.definitions:
            step = self.definitions[name]
            sources = step.arguments()[1:]
            if step.name.startswith("ld.param"):
                return np.array([self._parameter(number) for number in self.value(sources[0].strip("[] ")).tolist()])
            return computed(step.name, [self.value(source) for source in sources])
        if block := BLOCK.fullmatch(name):
            return np.full(self.threads, self.grid[block[2]] if block[1] else 0)
        number = NUMBER.fullmatch(name) or re.search(r"_param_(\d+)$", name)
        if not number:
            raise Unknown(name)
        return np.full(self.threads, int(number[1], 0))

    def _parameter(self, number: int) -> int:
        return (number + 1) << TENSOR if number in self.pointers else self.rows


def _touched(at: Values, size: int) -> tuple[int, int, int]:
    """Lines and sectors of a warp, and the fewest lines for its bytes."""
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
    """What an instruction of integers or predicates makes of its sources. Raises Unknown for any other."""
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
    """Bits, and whether they have a sign; None for what is no type of integers."""
    found = re.fullmatch(r"([usb])(\d+)|pred", modifier)
    return found and (int(found[2] or 1), found[1] == "s")


def _of_bits(value: Values, bits: int, signed: bool) -> Values:
    """The low ``bits`` as a number."""
    if bits == 64:
        return value
    low = value & (1 << bits) - 1
    return low - (low >> bits - 1 << bits) if signed else low
