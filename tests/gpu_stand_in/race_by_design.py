"""Lists accesses that look like races but are intended, with their lines, the reason, and a condition that is
checked."""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from race_log import Access, Site
from race_pairs import Meeting

NOWHERE = np.zeros(0, np.uint64)


class Verdict(NamedTuple):
    reason: str
    unused: np.ndarray
    """Cells that hold the reason only if it does not matter what the load finds there."""


class Design(NamedTuple):
    reason: str
    lines: tuple[str, str]
    """``function: text`` of the lines of both accesses, in either order, as regular expressions."""
    check: Callable[[Meeting, Sequence[Access]], np.ndarray | None]
    """Returns the cells in which the value loaded has to be of no use; None where the reason does not hold."""


def _same_bits(meeting: Meeting, accesses: Sequence[Access]) -> np.ndarray | None:
    return NOWHERE if meeting.same_bits() else None


def _all_own_bits(meeting: Meeting, accesses: Sequence[Access]) -> np.ndarray | None:
    return None if _foreign(meeting, accesses).size else NOWHERE


def _foreign(meeting: Meeting, accesses: Sequence[Access]) -> np.ndarray:
    """Return the cells of which the load may depend on the other program: those in which the loading program has not
    itself stored the same bits before a barrier."""
    load, store = sorted((meeting.early, meeting.late), key=lambda access: access.kind)
    common, _, places = np.intersect1d(load.cells(meeting.width), store.cells(meeting.width), return_indices=True)
    own: dict[int, int] = {}
    for access in accesses[: load.number]:
        if access.program == load.program and access.kind == "store" and access.interval < load.interval:
            cells = access.cells(meeting.width)
            if cells.min() <= common[-1] and cells.max() >= common[0]:
                own.update(zip(cells.tolist(), access.pieces(meeting.width).tolist(), strict=True))
    stored = store.pieces(meeting.width)[places].tolist()
    foreign = [own.get(cell) != piece for cell, piece in zip(common.tolist(), stored, strict=True)]
    return common[foreign]


def _in_place(meeting: Meeting, accesses: Sequence[Access]) -> np.ndarray | None:
    """Return ``NOWHERE`` if one program loads elements and then stores each at its own place."""
    loads_first = (meeting.early.kind, meeting.late.kind) == ("load", "store")
    same = np.array_equal(meeting.early.addresses, meeting.late.addresses)
    return NOWHERE if meeting.same_program and loads_first and same else None


_WRITES_CACHE = r"write_keys_and_values: tl\.store\([KV](_SCALES)? "
_READS_CACHE = r"attended: ([kv] = tl\.load\([KV] |(scores|weights) \*= tl\.load\([KV]_SCALES )"
_WRITES = rf"write_queries: tl\.store\(Q |{_WRITES_CACHE}"
_READS = rf"_attention_kernel: q = tl\.load\(Q |{_READS_CACHE}"
_INDUCTOR = r"triton_\w+: .*\bin_out_ptr\d+\b"

BY_DESIGN = (
    Design(
        "attention: each program writes the queries and the new keys and values that it reads, so several store the "
        "same bits at one place; whichever comes last, the place holds them",
        (_WRITES, _WRITES),
        _same_bits,
    ),
    Design(
        "attention: what a program reads of the new rows it has stored itself, before a barrier; another program "
        "stores the same bits, and a load finds them either way",
        (_WRITES, _READS),
        _all_own_bits,
    ),
    Design(
        "attention: a block of keys begins before the first position of a program's rows or ends behind the last; what "
        "it loads there, old or new, has weight 0",
        (_WRITES_CACHE, _READS_CACHE),
        _foreign,
    ),
    Design(
        "Inductor: of a tensor that it names in_out_ptr an element is computed from what was loaded at its place, so "
        "the store waits for the load",
        (_INDUCTOR, _INDUCTOR),
        _in_place,
    ),
)


def by_design(meeting: Meeting, accesses: Sequence[Access]) -> Verdict | None:
    """Return the reason why the two accesses may overlap, None if there is none. ``accesses`` are all accesses of the
    launch."""
    lines = _line(meeting.early.site), _line(meeting.late.site)
    for design in BY_DESIGN:
        if any(all(map(re.match, design.lines, each)) for each in (lines, lines[::-1])):
            unused = design.check(meeting, accesses)
            if unused is not None:
                return Verdict(design.reason, unused)
    return None


def _line(site: Site) -> str:
    return f"{site.function}: {site.text}"
