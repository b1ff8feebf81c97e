"""On which device a method's library holds each of its constants, read from its machine code.

AOTInductor's container refuses a weight whose device is another than its library says. No function of a library tells
it. The model's constructor writes it down: for each constant the library's name, its device's type from a variable, and
the program's name. The variables are set while the library loads, to what ``aoti_torch_device_type_cpu`` and
``aoti_torch_device_type_cuda`` return. Both are found by what the dynamic loader needs of any library, so that a
disassembler, debugging symbols, a run of the library or a GPU are not. x86-64 alone is read: there an instruction names
a variable by its distance, the last four bytes of the instruction.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from eagle3.runner.artifact.cuda_weights import WeightTable
from eagle3.runner.artifact.elf import DAMAGED, EXECUTABLE, Elf, Section

OWNERS = {"cpu": "CPU", "cuda": "GPU"}
DEVICES = {"aoti_torch_device_type_cpu": "cpu", "aoti_torch_device_type_cuda": "cuda"}
CONSTRUCTOR = "_ZN5torch12aot_inductor16AOTInductorModelC1E"
X86_64 = 62
CALL, CALL_BY_SLOT, JUMP_BY_SLOT, STORE_RESULT = b"\xe8", b"\xff\x15", b"\xff\x25", b"\x89\x05"
BRANCH_TARGET = b"\xf3\x0f\x1e\xfa"
"""Of x86-64: calls and jumps, directly or by a slot in the table of functions; a store of what a function returned to a
variable; what may stand before code that is jumped to."""
LOAD_ADDRESS = {bytes([prefix, 0x8D, 0x05 | register << 3]) for prefix in (0x48, 0x4C) for register in range(8)}


def constant_devices(library: bytes) -> dict[str, str]:
    """The program's name of each constant to "cpu" or "cuda". Raises ValueError for a library that cannot be read."""
    elf = Elf(library)
    try:
        if elf.machine != X86_64:
            raise ValueError(f"it is for another processor, ELF machine {elf.machine}")
        return dict(_named(_mentions(elf, _device_variables(elf))))
    except DAMAGED as error:
        raise ValueError(f"the devices of a library's constants cannot be read ({error})") from error


def constant_faults(method: str, table: WeightTable, devices: Mapping[str, str]) -> Iterator[str]:
    """A line where a method's library has weights on another device than its ``table``, or does not name them.
    ``devices``: what ``constant_devices`` gives."""
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
    """The program's name is the first text after the device."""
    device = ""
    for _, kind, found in sorted(mentions):
        if kind == "device":
            if device:
                raise ValueError("of two constants in a row the first has no name")
            device = found
        elif device:
            yield found, device
            device = ""


def _mentions(elf: Elf, variables: dict[int, str]) -> list[tuple[int, str, str]]:
    """Where the constructor names the variable of a device, or a text."""
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
    """int64 [bytes - 3]: the address that an instruction names whose last four bytes begin at each byte."""
    fours = np.lib.stride_tricks.sliding_window_view(np.frombuffer(code, np.uint8), 4)
    distances = np.ascontiguousarray(fours).view(np.int32)[:, 0]
    return distances.astype(np.int64) + np.arange(len(distances)) + (address + 4)


def _device_variables(elf: Elf) -> dict[int, str]:
    """Addresses of the variables that are set to the type of a device."""
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


def _stubs(elf: Elf, section: Section, slots: dict[int, str]) -> dict[int, str]:
    """Addresses of the code that jumps to a function by its slot, as the linker puts it there for calls."""
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
