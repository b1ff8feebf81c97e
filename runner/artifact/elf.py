"""Reads ELF shared libraries as the dynamic loader does: symbols and needed libraries."""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

SYSTEM_LIBRARIES = re.compile(r"lib(c|m|stdc\+\+|gcc_s|pthread|dl|rt)\.so|ld-linux")
# These numbers are from the System V ABI, those of VERNEED and VERSYM from the Linux Standard Base.
DYNAMIC, DYNSYM, VERNEED, VERSYM = 6, 11, 0x6FFFFFFE, 0x6FFFFFFF
NEEDED = 1
MACHINES = {62: "x86_64", 183: "aarch64"}
WEAK, ABSOLUTE = 2, 0xFFF1
DAMAGED = (struct.error, LookupError, ValueError, OverflowError)
"""The exceptions that reading a damaged file may raise."""


@dataclass(frozen=True)
class Symbol:
    """A dynamic symbol.

    ``place`` is the symbol's offset in the file in bytes, None if another library defines it. ``provider`` is that
    library, if it is recorded. ``address`` and ``size``, in bytes, are the symbol's memory once the file is loaded.
    """

    name: str
    weak: bool
    place: int | None
    provider: str | None
    address: int
    size: int

    def is_needed(self) -> bool:
        system = self.provider is not None and SYSTEM_LIBRARIES.match(self.provider)
        return bool(self.name) and self.place is None and not self.weak and not system


@dataclass(frozen=True)
class Section:
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int  # the index of the section that holds this one's strings


class Elf:
    """A 64-bit ELF file. Raises ValueError for any other file; reading a damaged one raises one of ``DAMAGED``."""

    def __init__(self, data: bytes):
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"library begins with {data[:6]!r}, not as a 64-bit ELF file does: export it again")
        self.data = data

    @property
    def machine(self) -> str:
        """The processor that the file is for, as ``platform.machine`` names it."""
        (number,) = struct.unpack_from("<H", self.data, 0x12)
        return MACHINES.get(number, f"ELF machine {number}")

    @cached_property
    def sections(self) -> list[Section]:
        (at,) = struct.unpack_from("<Q", self.data, 0x28)
        size, count = struct.unpack_from("<HH", self.data, 0x3A)
        rows = (struct.unpack_from("<IIQQQQIIQQ", self.data, at + index * size) for index in range(count))
        return [Section(*row[1:7]) for row in rows]

    @cached_property
    def symbols(self) -> list[Symbol]:
        """The dynamic symbols."""
        (table,) = self._of_type(DYNSYM)
        versions = [version for section in self._of_type(VERSYM) for version in self._rows("H", section)]
        found = []
        for index, (name, info, _, at, address, size) in enumerate(self._rows("IBBHQQ", table)):
            place = None
            if at:
                section = None if at == ABSOLUTE else self.sections[at]
                place = address if section is None else address - section.address + section.offset
            provider = self._providers.get(versions[index][0]) if versions else None
            found.append(Symbol(self._string(table.link, name), info >> 4 == WEAK, place, provider, address, size))
        return found

    @cached_property
    def asks_for(self) -> list[str]:
        """The libraries that the loader loads together with this one."""
        entries = ((section, row) for section in self._of_type(DYNAMIC) for row in self._rows("QQ", section))
        return [self._string(section.link, value) for section, (tag, value) in entries if tag == NEEDED]

    def _of_type(self, kind: int) -> list[Section]:
        return [section for section in self.sections if section.type == kind]

    def _rows(self, layout: str, section: Section) -> Iterator[tuple]:
        end = section.offset + section.size
        if end > len(self.data):
            raise ValueError(f"a section ends at byte {end} of {len(self.data)}")
        return struct.iter_unpack(f"<{layout}", self.data[section.offset : end])

    def _string(self, strings: int, offset: int) -> str:
        at = self.sections[strings].offset + offset
        return self.data[at : self.data.index(b"\0", at)].decode()

    @cached_property
    def _providers(self) -> dict[int, str]:
        """Map the index of a symbol's version to the library that defines it."""
        found = {}
        for section in self._of_type(VERNEED):
            at, following = section.offset, True
            while following:
                _, count, file, entries, following = struct.unpack_from("<HHIII", self.data, at)
                entry_at = at + entries
                for _ in range(count):
                    _, _, version, _, next_entry = struct.unpack_from("<IHHII", self.data, entry_at)
                    found[version] = self._string(section.link, file)
                    entry_at += next_entry
                at += following
        return found
