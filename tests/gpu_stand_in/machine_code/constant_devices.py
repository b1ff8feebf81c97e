"""Reads from a library's machine code which device each of its constants is on.

AOTInductor's container refuses a weight if the library expects it on another device. A library has no function that
returns the expected device. The code of the model's constructor contains it: for each constant it stores the library's
name, the device type from a variable, and the program's name. The variables are set while the library loads, to the
results of ``aoti_torch_device_type_cpu`` and ``aoti_torch_device_type_cuda``. This module finds constructor and
variables through the tables that the dynamic loader uses. It needs no disassembler, no debugging symbols, no GPU, and
does not run the library. It reads only x86-64 code, where the last four bytes of an instruction hold the distance to
the variable.
"""

import struct
from collections.abc import Iterator, Mapping
from functools import cached_property

import numpy as np

from eagle3.runner.artifact.cuda_weights import WeightTable
from eagle3.runner.artifact.elf import DAMAGED, Elf, Section

OWNERS = {"cpu": "CPU", "cuda": "GPU"}
DEVICES = {"aoti_torch_device_type_cpu": "cpu", "aoti_torch_device_type_cuda": "cuda"}
CONSTRUCTOR = "_ZN5torch12aot_inductor16AOTInductorModelC1E"
X86_64 = 62
RELA, EXECUTABLE = 4, 4
"""Numbers of the System V ABI: the type of a section of relocations, and the flag of a section with code."""
CALL, CALL_BY_SLOT, JUMP_BY_SLOT, STORE_RESULT = b"\xe8", b"\xff\x15", b"\xff\x25", b"\x89\x05"
BRANCH_TARGET = b"\xf3\x0f\x1e\xfa"
"""Opcodes of x86-64: calls and jumps, direct or through a slot of the global offset table; a store of a function's
result in a variable; the marker that may precede the target of an indirect jump (``endbr64``)."""
LOAD_ADDRESS = {bytes([prefix, 0x8D, 0x05 | register << 3]) for prefix in (0x48, 0x4C) for register in range(8)}


class Code(Elf):
    """A library as the dynamic loader maps it."""

    @cached_property
    def machine(self) -> int:
        return struct.unpack_from("<H", self.data, 0x12)[0]

    def relocations(self) -> Iterator[tuple[str, int]]:
        """Yield (name of a symbol, address of the slot that the symbol's address is written to)."""
        for section in self._of_type(RELA):
            for slot, info, _ in self._rows("QQq", section):
                if info >> 32:
                    yield self.symbols[info >> 32].name, slot

    def at_address(self, address: int, size: int) -> bytes:
        """Return the bytes of the file that are loaded at ``address``. Raises LookupError."""
        loaded = (each for each in self.sections if each.address and each.address <= address < each.address + each.size)
        section = next(loaded, None)
        if section is None:
            raise LookupError(f"no section has address {address:#x}")
        start = section.offset + address - section.address
        return self.data[start : start + size]

    def text_at(self, address: int) -> str:
        """Return the zero-terminated text at ``address``. Raises LookupError or ValueError."""
        start = self.at_address(address, 1 << 12)
        return start[: start.index(b"\0")].decode()


def constant_devices(library: bytes) -> dict[str, str]:
    """Map the program's name of each constant to "cpu" or "cuda". Raises ValueError for an unreadable library."""
    elf = Code(library)
    try:
        if elf.machine != X86_64:
            raise ValueError(f"it is for another processor, ELF machine {elf.machine}")
        return dict(_named(_mentions(elf, _device_variables(elf))))
    except DAMAGED as error:
        raise ValueError(f"the devices of a library's constants cannot be read ({error})") from error


def constant_faults(method: str, table: WeightTable, devices: Mapping[str, str]) -> Iterator[str]:
    """Yield one error line if the library expects a weight on another device than ``table`` says, or has no such
    constant.

    ``devices`` is the result of ``constant_devices``.
    """
    wrong = [
        (weight.name, weight.device, devices.get(weight.name))
        for weight in table.weights
        if devices.get(weight.name) != weight.device
    ]
    if wrong:
        (name, device, other), *more = wrong
        held = f"has the constant {name} on the {OWNERS[other]}" if other else f"does not name the constant {name}"
        others = f", and {len(more)} others" if more else ""
        yield f"the library of {method} {held}{others}; its weight is on the {OWNERS[device]}"


def _named(mentions: list[tuple[int, str, str]]) -> Iterator[tuple[str, str]]:
    """Yield (program's name, device). The name is the first text after the device."""
    device = ""
    for _, kind, found in sorted(mentions):
        if kind == "device":
            if device:
                raise ValueError("of two constants in a row the first has no name")
            device = found
        elif device:
            yield found, device
            device = ""


def _mentions(elf: Code, variables: dict[int, str]) -> list[tuple[int, str, str]]:
    """Find where the constructor refers to a device's variable or a text: (offset, "device" or "text", value)."""
    constructor = next((symbol for symbol in elf.symbols if symbol.name.startswith(CONSTRUCTOR)), None)
    if constructor is None:
        raise ValueError("it has no constructor of AOTInductor's model")
    code = elf.at_address(constructor.address, constructor.size)
    named = _named_addresses(code, constructor.address)
    found = []
    for address, device in variables.items():
        found += [(at, "device", device) for at in np.flatnonzero(named == address).tolist()]
    for at in range(3, len(named)):
        if code[at - 3 : at] in LOAD_ADDRESS:
            found.append((at, "text", elf.text_at(int(named[at]))))
    return found


def _named_addresses(code: bytes, address: int) -> np.ndarray:
    """Return int64 [bytes - 3]. Element i is the address that an instruction refers to if its last four bytes begin at
    byte i of ``code``, which is loaded at ``address``."""
    fours = np.lib.stride_tricks.sliding_window_view(np.frombuffer(code, np.uint8), 4)
    distances = np.ascontiguousarray(fours).view(np.int32)[:, 0]
    return distances.astype(np.int64) + np.arange(len(distances)) + (address + 4)


def _device_variables(elf: Code) -> dict[int, str]:
    """Map the addresses of the variables that hold a device type to "cpu" or "cuda"."""
    slots = {slot: DEVICES[name] for name, slot in elf.relocations() if name in DEVICES}
    executable = [section for section in elf.sections if section.flags & EXECUTABLE and section.size > 8]
    stubs: dict[int, str] = {}
    for section in executable:
        stubs |= _stubs(elf, section, slots)
    found: dict[int, str] = {}
    for section in executable:
        code = elf.at_address(section.address, section.size)
        named = _named_addresses(code, section.address)
        for opcode, targets in ((CALL, stubs), (CALL_BY_SLOT, slots)):
            for at in np.flatnonzero(np.isin(named, list(targets))).tolist():
                after = at + 4
                if code[at - len(opcode) : at] == opcode and code[after : after + 2] == STORE_RESULT:
                    found[int(named[after + 2])] = targets[int(named[at])]
    if "cuda" not in found.values() and "cpu" not in found.values():
        raise ValueError("it has no variable with the type of a device")
    return found


def _stubs(elf: Code, section: Section, slots: dict[int, str]) -> dict[int, str]:
    """Map the addresses of the linker's stubs, which jump to a function through its slot, to the slot's device."""
    code = elf.at_address(section.address, section.size)
    named = _named_addresses(code, section.address)
    found = {}
    for at in np.flatnonzero(np.isin(named, list(slots))).tolist():
        start = at - len(JUMP_BY_SLOT)
        if code[start:at] == JUMP_BY_SLOT:
            device = slots[int(named[at])]
            found[section.address + start] = device
            if code[start - len(BRANCH_TARGET) : start] == BRANCH_TARGET:
                found[section.address + start - len(BRANCH_TARGET)] = device
    return found
