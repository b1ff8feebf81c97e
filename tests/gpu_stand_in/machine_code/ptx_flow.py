"""Reads a kernel's PTX as a graph of instructions, with the pointer arguments that each address may come from.

A register may be assigned several times (a loop's variable, a zero before a load that a predicate skips), so its
possible sources are collected over all assignments. Values loaded from memory are assumed not to be pointers, except
from shared memory, where the compiler may hand pointers from thread to thread: as 64 bits, or in a vector.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

LINE = re.compile(
    r"\s*(?:\{\s*)?(?:(?P<label>[$\w]+):(?!:)\s*)?(?:\{\s*)?"
    r"(?:(?:@(?P<negated>!?)(?P<predicate>[%\w]+)\s+)?(?P<name>[a-z][\w.:]*)\s*(?P<text>[^;]*?)\s*;)?"
)
LOCATION = re.compile(r"\s*\.loc\s+(\d+)\s+([1-9]\d*)")
FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"(?:[^"]*/)?([^"/]*)"', re.MULTILINE)
POINTER = re.compile(r"\.param\s+\.u64\s+\.ptr\b[^\n,]*?(\w+_param_\d+)")
VARIABLE = re.compile(r"^\s*(?:\.\w+\s+)*\.(?:global|const)\s[^=;\n]*?([\w$]+)\s*(?:\[|=|;)", re.MULTILINE)
THREADS = re.compile(r"\.reqntid (\d+)")
PLACE = re.compile(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\w+))?\s*\]")
OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]\s][^,]*")
REGISTER = re.compile(r"%[a-z]+\d+")
NAME = re.compile(r"[A-Za-z_$][\w$]*")
SHARED = "shared memory"
"""The place of all values in shared memory, beside registers."""
BRANCHES, ENDS = ("bra", "brx"), ("ret", "exit", "trap")


@dataclass(frozen=True)
class Instruction:
    """An instruction. ``line`` counts the PTX's lines from 1; ``source`` is the file and line that it was compiled
    from, "" if unknown."""

    line: int
    source: str
    negated: bool
    predicate: str
    name: str
    operands: tuple[str, ...]

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """``ld.global.v4.b32``: ld, global, v4, b32."""
        return tuple(self.name.split("."))

    @cached_property
    def place(self) -> tuple[str, int]:
        """Return the last address among the operands: its register or variable, and its offset in bytes."""
        register, offset = PLACE.findall(" ".join(self.operands))[-1]
        return register, int(offset or "0", 0)

    @cached_property
    def targets(self) -> list[str]:
        """Return the registers that the instruction assigns: those of its first operand, unless that is an address (a
        store)."""
        if not self.operands or self.operands[0].startswith("["):
            return []
        return REGISTER.findall(self.operands[0])

    @cached_property
    def sources(self) -> list[str]:
        """Return the registers and variables whose values the instruction reads."""
        found = [word for operand in self.operands[1:] for word in re.findall(r"[%\w$.]+", operand)]
        return [word for word in found if REGISTER.fullmatch(word) or NAME.fullmatch(word)]

    def __str__(self) -> str:
        return f"line {self.line} ({self.source})" if self.source else f"line {self.line}"


class Flow:
    """The body of the first kernel in ``ptx``; a block of it has ``threads`` threads.

    Raises ValueError if there is no kernel, or for a branch that this module does not know.
    """

    def __init__(self, ptx: str):
        self.pointers = frozenset(POINTER.findall(ptx) + VARIABLE.findall(ptx))
        self.instructions: list[Instruction] = []
        self.labels: dict[str, list[int]] = defaultdict(list)
        self._read(ptx)
        threads = THREADS.search(ptx)
        if not self.instructions or not threads:
            raise ValueError("there is no kernel with a number of threads in the PTX")
        self.threads = int(threads[1])
        self.definitions: dict[str, list[Instruction]] = defaultdict(list)
        for instruction in self.instructions:
            for register in instruction.targets:
                self.definitions[register].append(instruction)

    def _read(self, ptx: str) -> None:
        files, source, depth = dict(FILE.findall(ptx)), "", 0
        for number, line in enumerate(ptx.splitlines(), 1):
            if not depth and not line.startswith("{"):
                continue  # a line before the kernel's body
            depth += line.count("{") - line.count("}")
            if not depth:
                return
            if located := LOCATION.match(line):
                source = f"{files.get(located[1], 'source')}:{located[2]}"
            found = LINE.match(line)
            assert found is not None  # the pattern also matches an empty line
            if found["label"]:
                self.labels[found["label"]].append(len(self.instructions))
            if found["name"]:
                operands = tuple(operand.strip() for operand in OPERAND.findall(found["text"]))
                read = bool(found["negated"]), found["predicate"] or "", found["name"], operands
                self.instructions.append(Instruction(number, source, *read))

    @cached_property
    def following(self) -> list[tuple[int, ...]]:
        """The indices of the instructions that may follow each instruction."""
        return [tuple(self._following(at)) for at in range(len(self.instructions))]

    def behind(self, instruction: Instruction) -> list[Instruction]:
        """Return the instructions that may follow an instruction on any path."""
        begin = next(at for at, each in enumerate(self.instructions) if each is instruction)
        seen, todo = set[int](), [begin]
        while todo:
            new = set(self.following[todo.pop()]) - seen
            seen |= new
            todo += new
        return [self.instructions[at] for at in seen]

    def _following(self, at: int) -> Iterator[int]:
        instruction = self.instructions[at]
        kind = instruction.parts[0]
        if kind in BRANCHES:
            places = self.labels.get(instruction.operands[0])
            if kind != "bra" or not places:
                raise ValueError(f"PTX {instruction}: {instruction.name} {instruction.operands[0]} is not supported")
            yield min(
                places, key=lambda place: abs(place - at)
            )  # inline assembly repeats labels, in scopes of a few lines
        falls_through = kind not in (*BRANCHES, *ENDS) or instruction.predicate
        if falls_through and at + 1 < len(self.instructions):
            yield at + 1

    @cached_property
    def bases(self) -> dict[str, frozenset[str]]:
        """Map each register or variable to the pointer arguments and variables that its value may come from."""
        found: dict[str, set[str]] = defaultdict(set)
        users: dict[str, list[str]] = defaultdict(list)
        for instruction in self.instructions:
            kind, of_shared = instruction.parts[0], any(part.startswith("shared") for part in instruction.parts)
            if kind == "ld" and of_shared:
                users[SHARED] += instruction.targets if _may_load_pointers(instruction) else []
            elif kind == "st" and of_shared:
                for source in instruction.sources:
                    users[source].append(SHARED)
            elif kind not in ("setp", "set", "atom", "call") and not _loads(instruction):
                for source in instruction.sources:
                    users[source] += instruction.targets
        changed = list(self.pointers)
        for name in changed:
            found[name] = {name}
        while changed:
            source = changed.pop()
            for register in users[source]:
                if not found[source] <= found[register]:
                    found[register] |= found[source]
                    changed.append(register)
        return {register: frozenset(names) for register, names in found.items()}


def _may_load_pointers(instruction: Instruction) -> bool:
    """Return True for a load of 64 bits or of a vector. One register of fewer bits holds no address of global
    memory."""
    *parts, kind = instruction.parts
    return kind.endswith("64") or not {"v2", "v4"}.isdisjoint(parts)


def _loads(instruction: Instruction) -> bool:
    """Return True for a load from memory. Reading a kernel argument does not count."""
    return instruction.parts[0] == "ld" and "param" not in instruction.parts
