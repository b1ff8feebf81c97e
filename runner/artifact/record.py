"""Compares an artifact's files with their record in ``export.json`` before any of them is loaded.

ExecuTorch checks the form of a program but not its weights. A single flipped byte may change tokens or crash the
process. Sizes are therefore always compared. The sha256 is compared for small files (in less than a second), for the
program at the head of ``model.pte`` whatever the size of the rest, and with ``verify`` for every file.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.runner.contract import EXPORT_RECORD, MODEL_FILE
from eagle3.runner.system.machine import size_text

QUICK_BYTES = 200_000_000
"""Bytes that are hashed at every opening, smallest files first: under a second at 250 MB/s, which is SHA-256 on a slow
core without SHA instructions."""

DIGITS = 12  # the number of a sha256's digits that messages show


def silent(_line: str) -> None:
    """Discard a line."""


@dataclass(frozen=True)
class Digest:
    """The first ``bytes`` bytes of a file have this sha256, in hexadecimal digits."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Recorded:
    """An entry of ``export.json``: the digest of a whole file and, for ``model.pte``, of the program at its head (None
    if an earlier exporter did not record it)."""

    whole: Digest
    program: Digest | None


@dataclass(frozen=True)
class FileState:
    """A recorded file as it was found.

    ``bytes`` is None if it is missing. ``matches`` is True if the sha256 is as recorded, False if something differs,
    None if only sizes were compared. ``fault`` is an error line, None if nothing is wrong.
    """

    name: str
    bytes: int | None
    matches: bool | None
    fault: str | None


@dataclass(frozen=True)
class Comparison:
    """The result of ``compare``. ``recorded``: there is a record of this ``model.pte``. ``program_fault``: the error
    line if the program must not be loaded; damage to its weights alone does not count."""

    recorded: bool
    files: tuple[FileState, ...] = ()
    program_fault: str | None = None

    @property
    def faults(self) -> list[str]:
        return [state.fault for state in self.files if state.fault]

    def refuse_faults(self) -> None:
        """Raise ValueError for the first fault, with the names of all other files that have one."""
        faulty = [state for state in self.files if state.fault]
        if faulty:
            others = ", ".join(state.name for state in faulty[1:])
            raise ValueError(f"{faulty[0].fault}" + (f" (not as recorded either: {others})" if others else ""))


def compare(model: Path, verify: bool = False, say: Callable[[str], None] = silent) -> Comparison:
    """Compare the files of the artifact that ``model`` belongs to with the ``export.json`` beside it.

    ``verify`` reads every file to its end. ``say`` is called with a line for the user: there is no record to compare
    with, or a large file is being read.

    Raises ValueError for a record that eagle3-export did not write, and with ``verify`` if there is no record.
    """
    record = read_record(model.parent)
    if record is None or model.name not in record:
        lacks = f"{model.parent} has no {EXPORT_RECORD}" if record is None else f"{EXPORT_RECORD} does not name it"
        if verify:
            raise ValueError(f"{model}: {lacks}: there is nothing to verify against, copy the artifact's whole folder")
        say(
            f"Not checked: {model} ({lacks}). If it is damaged, tokens may be wrong or the process may crash without a "
            "message: copy the artifact's whole folder"
        )
        return Comparison(recorded=False)
    hashed = set(record) if verify else _quick(record)
    states = []
    for name, entry in sorted(record.items()):
        if name in hashed and entry.whole.bytes > QUICK_BYTES:
            say(f"verifying {name}, {size_text(entry.whole.bytes)}")
        states.append(_found(model.parent / name, entry, name in hashed))
    fault = next(state.fault for state in states if state.name == model.name)
    return Comparison(True, tuple(states), fault if fault and not _program_is_whole(model, record) else None)


def digest(file: Path, count: int) -> Digest:
    """Return the digest of the first ``count`` bytes of a file. They must fit in memory."""
    with file.open("rb") as stream:
        return Digest(count, hashlib.sha256(stream.read(count)).hexdigest())


def read_record(folder: Path) -> dict[str, Recorded] | None:
    """Map each file name in ``export.json`` to its entry; None if there is no such file.

    Raises ValueError if it cannot be read or does not have the form that eagle3-export writes.
    """
    path = folder / EXPORT_RECORD
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        record = {name: _recorded(name, entry) for name, entry in files.items()}
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): copy or export it again") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not what eagle3-export writes ({error}): copy or export it again") from error
    if MODEL_FILE not in record:
        raise ValueError(
            f"{path} is not what eagle3-export writes (no {MODEL_FILE} among its files): copy or export it again"
        )
    return record


def model_sha256(model: Path) -> str:
    """Return the sha256 of a ``model.pte`` as its ``export.json`` says, without one the file's own: what tells
    artifacts apart whose states must not be mixed up. With weights beside the program, theirs is hashed with it."""
    record = read_record(model.parent) or {}
    files = [model, *sorted(model.parent.glob("*.ptd"))]
    found = [record[path.name].whole.sha256 if path.name in record else _sha256(path) for path in files]
    return found[0] if len(found) == 1 else hashlib.sha256("".join(found).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_export(folder: Path) -> dict[str, Any]:
    """Return the whole content of ``export.json``; {} if it cannot be read."""
    try:
        record = json.loads((folder / EXPORT_RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _recorded(name: str, entry: dict[str, Any]) -> Recorded:
    if Path(name).name != name:
        raise ValueError(f"{name!r} is no file name")
    whole = _digest(entry)
    program = _digest(entry["program"]) if "program" in entry else None
    if program and program.bytes > whole.bytes:
        raise ValueError(f"{name} has {whole.bytes:,} bytes, its program {program.bytes:,}")
    return Recorded(whole, program)


def _digest(entry: dict[str, Any]) -> Digest:
    size, sha256 = entry["bytes"], entry["sha256"]
    if type(size) is not int or size < 0 or type(sha256) is not str or len(bytes.fromhex(sha256)) != 32:
        raise ValueError(f"bytes {size!r}, sha256 {sha256!r}")
    return Digest(size, sha256.lower())


def _quick(record: dict[str, Recorded]) -> set[str]:
    """Return the names of the files that are hashed even without ``verify``."""
    names, total = set(), 0
    for name in sorted(record, key=lambda name: record[name].whole.bytes):
        total += record[name].whole.bytes
        if total <= QUICK_BYTES:
            names.add(name)
    return names


def _found(path: Path, entry: Recorded, hashed: bool) -> FileState:
    whole, program = entry.whole, entry.program
    if not path.is_file():
        fault = (
            f"{path} is missing ({EXPORT_RECORD} says {whole.bytes:,} bytes), left out of a copy or removed after the "
            "export: copy or export it again"
        )
        return FileState(path.name, None, False, fault)
    size, difference = path.stat().st_size, None
    if size != whole.bytes:
        difference = f"{size:,} bytes, {EXPORT_RECORD} says {whole.bytes:,}"
    elif program and (found := digest(path, program.bytes)) != program:
        difference = f"sha256 of its program {_differing(found.sha256, program.sha256)}"
    elif hashed:
        sha256 = _sha256(path)
        if sha256 != whole.sha256:
            difference = f"sha256 {_differing(sha256, whole.sha256)}"
    if difference is None:
        return FileState(path.name, size, True if hashed else None, None)
    fault = f"{path} is damaged, or was edited after the export ({difference}): copy or export it again"
    return FileState(path.name, size, False, fault)


def _differing(found: str, recorded: str) -> str:
    return f"{found[:DIGITS]}..., {EXPORT_RECORD} says {recorded[:DIGITS]}..."


def _program_is_whole(model: Path, record: dict[str, Recorded]) -> bool:
    """Return True if a ``model.pte`` that differs from its record has the recorded size and program, so that only its
    weights may differ."""
    entry = record[model.name]
    return (
        entry.program is not None
        and model.is_file()
        and model.stat().st_size == entry.whole.bytes
        and digest(model, entry.program.bytes) == entry.program
    )
