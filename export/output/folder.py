"""Makes the output folder. It appears whole or not at all, and only files that an export wrote are ever deleted.

An export writes into ``.NAME.partial`` next to the folder and renames it at the end. Between two renames the earlier
folder is ``.NAME.replaced``. An export that ends early leaves the earlier contents. The partial folder is locked
(``flock``) while its export runs, so a second export into the same folder is refused, and the next export cleans up
after a killed one.
"""

import json
import logging
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType

from eagle3.export.output.contents import sha256
from eagle3.runner.contract import EXPORT_RECORD, MODEL_FILE
from eagle3.runner.system.command import Terminated
from eagle3.runner.system.machine import size_text

try:
    import fcntl
except ImportError:  # the platform is not Unix
    fcntl = None  # type: ignore[assignment]

PATIENCE = 1.0
"""The seconds in which a folder is tried again, since another process may hold it only to look at its lock."""


def check_output(folder: Path, overwrite: bool) -> None:
    """Raise OSError for a folder that cannot be made or replaced, and for one that must not be replaced.

    Mount points and the working folder must not be replaced, nor a folder that is not empty, unless ``overwrite`` is
    given and every file in it is as ``export.json`` records it.
    """
    place = _resolved(folder)
    try:
        _check_parent(folder, place)
        if place.is_dir():
            _check_place(folder, place)
            _check_content(folder, place, overwrite)
        elif place.exists():
            raise FileExistsError(f"{folder} is a file: --output-dir must name a folder")
    except PermissionError as error:
        at = error.filename or place
        raise PermissionError(f"this user has no permission for {at}: name another --output-dir") from error


@contextmanager
def whole_folder(folder: Path, overwrite: bool) -> Iterator[Path]:
    """Yield a folder to write into that becomes ``folder`` at the end. After an exception ``folder`` is unchanged.

    Raises BlockingIOError at once if another export writes into the same folder, and FileExistsError at the end if
    ``check_output`` by then refuses ``folder``.
    """
    place = _resolved(folder)
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = _beside(place, "partial")
    with _stopped_by_interrupt():
        lock = _claim(partial, place)
        try:
            _tidy(place, partial)
            check_output(place, overwrite)  # tidying may have restored an earlier artifact
            _wait_for_name(place)
            yield partial
            check_output(place, overwrite)
            _swap(partial, place)
        except BaseException:
            if lock is None or _is_of(lock, partial):
                shutil.rmtree(partial, ignore_errors=True)
            raise
        finally:
            if lock is not None:
                os.close(lock)


def refuse_a_second(folder: Path) -> None:
    """Raise BlockingIOError if another export is writing ``folder``."""
    place = _resolved(folder)
    with suppress(OSError):
        lock = os.open(_beside(place, "partial"), os.O_RDONLY)
        try:
            if not _locked(lock, shared=True):
                raise _second(place)
        finally:
            os.close(lock)


@contextmanager
def full_disk_named(folder: Path, needed: int) -> Iterator[None]:
    """Turn any error that a full disk caused, in this process or in a compiler, into one OSError with the needed and
    the free space.

    ``needed`` is the approximate size of the artifact in bytes.
    """
    try:
        yield
    except Exception as error:
        if not is_full_disk(error):
            raise
        places = {"output": folder.resolve().parent, "temporary files": Path(tempfile.gettempdir())}
        free = ", ".join(f"{name} ({path}): {size_text(shutil.disk_usage(path).free)}" for name, path in places.items())
        raise OSError(
            f"no space left on the disk; the artifact takes about {size_text(needed)}, free for {free}: "
            "make room, name another --output-dir, or set TMPDIR"
        ) from error


def is_full_disk(error: BaseException) -> bool:
    """Return True if an error, or one that caused it, says that a disk is full."""
    cause: BaseException | None = error
    while cause is not None:
        if "No space left on device" in str(cause):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _resolved(folder: Path) -> Path:
    try:
        return folder.resolve()
    except RuntimeError as error:  # Python 3.11's error for links that form a cycle
        raise OSError(f"{folder} is a link that leads back to itself: name another --output-dir") from error


def _check_parent(folder: Path, place: Path) -> None:
    above = next((path for path in place.parents if path.exists()), place)
    if not above.is_dir():
        raise NotADirectoryError(f"{above} is a file, so {folder} cannot be made in it: name another --output-dir")
    if not os.access(above, os.W_OK | os.X_OK):
        raise PermissionError(13, "not writable", str(above))


def _check_place(folder: Path, place: Path) -> None:
    if _is_mount_point(place):
        raise OSError(
            f"{folder} is a mount point, which cannot be replaced by a rename: type --output-dir {folder / 'NAME'}"
        )
    with suppress(FileNotFoundError):  # the working folder was removed
        if Path.cwd().is_relative_to(place):
            raise OSError(
                f"{folder} {'is' if Path.cwd() == place else 'contains'} the working folder {Path.cwd()}, which would "
                f"be replaced under the shell: type --output-dir {folder / 'NAME'}"
            )


def _is_mount_point(place: Path) -> bool:
    """Return True if ``place`` is a mount point. Linux's own list also has bind mounts of the same file system."""
    if os.path.ismount(place):
        return True
    escaped = re.sub(rb"[ \t\n\\]", lambda found: b"\\%03o" % ord(found[0]), os.fsencode(place))
    with suppress(OSError):
        return any(line.split(b" ")[4] == escaped for line in Path("/proc/self/mountinfo").read_bytes().splitlines())
    return False


def _check_content(folder: Path, place: Path, overwrite: bool) -> None:
    if not any(place.iterdir()):
        return
    if not overwrite:
        raise FileExistsError(f"{folder} is not empty: type --overwrite to replace it, or name another --output-dir")
    strange = _not_written(place)
    if strange is not None:
        name, why = strange
        raise FileExistsError(
            f"{folder} holds {name}, which eagle3-export did not write ({why}): --overwrite replaces only artifacts, "
            "name another --output-dir"
        )
    if not os.access(place, os.W_OK | os.X_OK):
        raise PermissionError(13, "not writable", str(place))


def _not_written(place: Path) -> tuple[str, str] | None:
    """Return the first entry of a folder that is not as ``export.json`` records it, and why; None for an artifact."""
    with os.scandir(place) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        if not entry.is_file(follow_symlinks=False):
            return entry.name, "it is a link" if entry.is_symlink() else "it is not a file"
    recorded = _recorded(place / EXPORT_RECORD)
    if recorded is None:
        return entries[0].name, f"{EXPORT_RECORD} is missing or is not the record of an export"
    files = [entry for entry in entries if entry.name != EXPORT_RECORD]
    for entry in files:
        if entry.name not in recorded:
            return entry.name, f"{EXPORT_RECORD} does not list it"
        size, listed = entry.stat().st_size, recorded[entry.name][0]
        if size != listed:
            return entry.name, f"{size} bytes, but {listed} in {EXPORT_RECORD}"
    for entry in files:
        state = entry.stat()
        identity = state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns
        if _sha256_of(Path(entry.path), identity) != recorded[entry.name][1]:
            return entry.name, f"its sha256 is not that of {EXPORT_RECORD}"
    return None


@cache
def _sha256_of(path: Path, _identity: tuple[int, ...]) -> str:
    """Return a file's sha256, cached until the file changes, since an artifact is checked before an export and at its
    end."""
    return sha256(path)


def _recorded(file: Path) -> dict[str, tuple[int, str]] | None:
    """Return the bytes and the sha256 of each file, by name; None for a file that is not the record of an export."""
    try:
        files = json.loads(file.read_text(encoding="utf-8"))["files"]
        recorded = {name: (entry["bytes"], entry["sha256"]) for name, entry in files.items()}
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    whole = all(type(size) is int and type(digest) is str for size, digest in recorded.values())
    return recorded if whole and MODEL_FILE in recorded else None


@contextmanager
def _stopped_by_interrupt() -> Iterator[None]:
    """Let Ctrl-C unwind as KeyboardInterrupt and SIGTERM as Terminated, so that the partial folder is removed.

    PyTorch's tracer may turn the exception into another error and log a traceback. This context turns that error back
    and disables logging.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    stopped: type[KeyboardInterrupt] | None = None
    logged = logging.root.manager.disable

    def interrupt(number: int, _frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = Terminated if number == signal.SIGTERM else KeyboardInterrupt
        logging.disable(logging.CRITICAL)
        raise stopped

    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    previous = {number: handler for number, handler in previous.items() if handler not in (signal.SIG_IGN, None)}
    for number in previous:
        signal.signal(number, interrupt)
    try:
        yield
    except Exception as error:
        if stopped:
            raise stopped from error
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        logging.disable(logged)


def _beside(place: Path, kind: str) -> Path:
    return place.with_name(f".{place.name}.{kind}")


def _second(place: Path) -> BlockingIOError:
    return BlockingIOError(
        f"another export is writing {place} (in {_beside(place, 'partial').name}): wait for its end, or name another "
        "--output-dir"
    )


def _claim(partial: Path, place: Path) -> int | None:
    """Make the partial folder and lock it until the returned descriptor is closed or the process ends.

    Returns None if folders cannot be locked here (another platform, some network file systems). An existing folder is
    refused there, since nothing tells whether its export still runs.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        existed = partial.exists()
        if partial.is_symlink() or (existed and not partial.is_dir()):
            raise FileExistsError(f"{partial} is no folder of an export: remove it, or name another --output-dir")
        partial.mkdir(exist_ok=True)
        try:
            lock = os.open(partial, os.O_RDONLY)
        except FileNotFoundError:  # the export that had it before ended in between
            continue
        try:
            locked = _locked(lock)
        except OSError as error:
            os.close(lock)
            if existed:
                raise FileExistsError(
                    f"{partial} exists, and folders cannot be locked here: if no other export writes it, remove it, or "
                    "name another --output-dir"
                ) from error
            return None
        if locked and _is_of(lock, partial):  # not renamed by the export that had it before
            return lock
        os.close(lock)
        if time.monotonic() > deadline:
            raise _second(place)
        time.sleep(0.02)


def _locked(descriptor: int, shared: bool = False) -> bool:
    """Lock a folder; return False if another export has it. Raises OSError where folders cannot be locked."""
    if fcntl is None:
        raise OSError("this platform has no flock")
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_of(descriptor: int, path: Path) -> bool:
    """Return True if ``path`` is still the folder that ``descriptor`` was opened for."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def _tidy(place: Path, partial: Path) -> None:
    """Remove what a killed export left in ``partial``, and restore the artifact that it had renamed."""
    for left in partial.iterdir():
        shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
    earlier = _beside(place, "replaced")
    if (earlier / EXPORT_RECORD).is_file():
        if not (place.is_dir() and any(place.iterdir())):
            os.rename(earlier, place)
        elif (place / EXPORT_RECORD).is_file():
            shutil.rmtree(earlier, ignore_errors=True)  # the export that renamed it may be removing it now


def _wait_for_name(place: Path) -> None:
    """Raise FileExistsError if the name that the earlier folder takes in ``_swap`` stays taken, before an export
    computes anything. The export that took it may be removing its folder now; a killed one may have left a part."""
    earlier, deadline = _beside(place, "replaced"), time.monotonic() + PATIENCE
    while os.path.lexists(earlier):
        if time.monotonic() > deadline:
            raise FileExistsError(
                f"{earlier} exists, and {place} takes that name while it is replaced: remove it, or name another "
                "--output-dir"
            )
        time.sleep(0.02)


def _swap(new: Path, place: Path) -> None:
    """Rename ``new`` to ``place``. The earlier folder is removed afterwards, or restored if the rename fails."""
    earlier = _beside(place, "replaced")
    is_free = not os.path.lexists(earlier)
    try:
        if place.exists():
            shutil.copymode(place, new)
            if any(place.iterdir()):  # a rename replaces an empty folder
                os.rename(place, earlier)
        os.rename(new, place)
    finally:
        if is_free and earlier.exists() and not place.exists():
            os.rename(earlier, place)
        if is_free and not new.exists():  # it is ``place`` now
            shutil.rmtree(earlier, ignore_errors=True)
