"""An artifact's files against what ``export.json`` says of them, before anything of them is loaded.

ExecuTorch checks a program's form and no weight: of single flipped bytes some change tokens and some end the process.
So sizes are always compared, and sha256 where that takes less than a second: of all files while they are small, of the
program at the head of ``model.pte`` however large the rest is, of everything with ``verify``.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.runner.contract import EXPORT_RECORD, MODEL_FILE

QUICK_BYTES = 200_000_000
"""Read and hashed at every opening, smallest files first: under a second at 250 MB/s, SHA-256 without instructions of
its own on a slow core."""

DIGITS = 12  # of a sha256 in a message


def silent(_line: str) -> None:
    """Say nothing."""


@dataclass(frozen=True)
class Digest:
    """The first ``bytes`` bytes of a file have this sha256, in hexadecimal digits."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Recorded:
    """An entry of ``export.json``: a whole file, and of ``model.pte`` the program at its head too (None: an earlier
    exporter did not record it)."""

    whole: Digest
    program: Digest | None


@dataclass(frozen=True)
class FileState:
    """A recorded file as found. ``bytes`` is None where it is missing; ``matches`` is True where the sha256 is as
    recorded, False where something differs, None where only sizes were compared. ``fault`` is a line about it."""

    name: str
    bytes: int | None
    matches: bool | None
    fault: str | None


@dataclass(frozen=True)
class Comparison:
    """``recorded``: there was a record of this ``model.pte``. ``program_fault`` is the line about a program that must
    not be loaded; a fault of its weights alone is none."""

    recorded: bool
    files: tuple[FileState, ...] = ()
    program_fault: str | None = None

    @property
    def faults(self) -> list[str]:
        return [state.fault for state in self.files if state.fault]

    def refuse_faults(self) -> None:
        """Raises ValueError for the first fault, with the names of all other files that have one."""
        faulty = [state for state in self.files if state.fault]
        if faulty:
            others = ", ".join(state.name for state in faulty[1:])
            raise ValueError(f"{faulty[0].fault}" + (f" (not as recorded either: {others})" if others else ""))


def compare(model: Path, verify: bool = False, say: Callable[[str], None] = silent) -> Comparison:
    """Compare the files of the artifact that ``model`` belongs to with the ``export.json`` beside it.

    ``verify`` reads every file to its end. ``say`` takes a line for the user: that there is no record to compare with,
    or which large file is being read.

    Raises ValueError for a record that eagle3-export did not write, and where ``verify`` finds none.
    """
    record = read_record(model.parent)
    if record is None or model.name not in record:
        lacks = f"{model.parent} has no {EXPORT_RECORD}" if record is None else f"{EXPORT_RECORD} does not name it"
        if verify:
            raise ValueError(f"{model}: {lacks}: there is nothing to verify against, copy the artifact's whole folder")
        say(
            f"Not checked: {model} ({lacks}). If it is damaged, tokens may be wrong or the process may end without a "
            "word: copy the artifact's whole folder"
        )
        return Comparison(recorded=False)
    hashed = set(record) if verify else _quick(record)
    states = []
    for name, entry in sorted(record.items()):
        if name in hashed and entry.whole.bytes > QUICK_BYTES:
            say(f"verifying {name}, {entry.whole.bytes / 1e9:.1f} GB")
        states.append(_found(model.parent / name, entry, name in hashed))
    fault = next(state.fault for state in states if state.name == model.name)
    return Comparison(True, tuple(states), fault if fault and not _program_is_whole(model, record) else None)


def digest(file: Path, count: int) -> Digest:
    """Of the first ``count`` bytes, for a head that fits in memory."""
    with file.open("rb") as stream:
        return Digest(count, hashlib.sha256(stream.read(count)).hexdigest())


def read_record(folder: Path) -> dict[str, Recorded] | None:
    """File name to what ``export.json`` says of it; None where there is no such file.

    Raises ValueError for one that cannot be read or has not the form that eagle3-export writes.
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


def read_export(folder: Path) -> dict[str, Any]:
    """All that ``export.json`` says; empty where it cannot be read."""
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
    """The files that are hashed unasked."""
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
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != whole.sha256:
            difference = f"sha256 {_differing(sha256, whole.sha256)}"
    if difference is None:
        return FileState(path.name, size, True if hashed else None, None)
    fault = f"{path} is damaged, or was edited after the export ({difference}): copy or export it again"
    return FileState(path.name, size, False, fault)


def _differing(found: str, recorded: str) -> str:
    return f"{found[:DIGITS]}..., {EXPORT_RECORD} says {recorded[:DIGITS]}..."


def _program_is_whole(model: Path, record: dict[str, Recorded]) -> bool:
    """Of a file that differs: whether only what lies behind the program may."""
    entry = record[model.name]
    return (
        entry.program is not None
        and model.is_file()
        and model.stat().st_size == entry.whole.bytes
        and digest(model, entry.program.bytes) == entry.program
    )
