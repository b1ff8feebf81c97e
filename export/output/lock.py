"""Allows one export for each output folder: a partial folder is locked while its export runs.

A second export into the same folder is refused. A partial folder without a lock was left by a killed export. The next
export removes it, or restores the earlier artifact that the killed one had renamed. Locks are ``flock`` on the folders
themselves and end with the process. Where folders cannot be locked (another platform, some network file systems), no
export is refused and nothing is removed.
"""

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from eagle3.runner.contract import EXPORT_RECORD

try:
    import fcntl
except ImportError:  # the platform is not Unix
    fcntl = None  # type: ignore[assignment]

PARTIAL, REPLACED = "partial", "replaced"
PATIENCE = 5.0  # the seconds that an export waits for others that begin at the same time


@contextmanager
def locked_folder(place: Path) -> Iterator[Path]:
    """Yield a new, locked folder next to ``place``, which will be renamed to it.

    Raises BlockingIOError if another export holds such a folder.
    """
    with _alone_in(place.parent):
        stale = refuse_a_second(place)
        partial = Path(tempfile.mkdtemp(prefix=f"{_prefix(place, PARTIAL)}{os.getpid()}-", dir=place.parent))
        lock = _lock(partial, wait=True)
    try:
        if lock is not None:
            _tidy(place, stale)
        partial.chmod(0o755)
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        _unlock(lock)


def refuse_a_second(place: Path) -> list[Path]:
    """Raise BlockingIOError if another export writes a folder next to ``place``; return the folders that killed exports
    left."""
    stale = []
    for path, process in _beside(place, PARTIAL):
        try:
            lock = _lock(path, shared=True)  # any number of exports may check at once
        except BlockingIOError:
            raise BlockingIOError(
                f"another export is writing {place} (process {process or 'unknown'}, in {path.name}): wait for its "
                "end, or name another --output-dir"
            ) from None
        if lock is not None:
            stale.append(path)
            _unlock(lock)
    return stale


def put_aside(partial: Path, place: Path) -> Path:
    """Return the path to which ``place`` is renamed while ``partial`` takes its name."""
    return partial.with_name(_prefix(place, REPLACED) + partial.name.removeprefix(_prefix(place, PARTIAL)))


def _tidy(place: Path, stale: list[Path]) -> None:
    """Remove the folders that killed exports left, and restore the artifact that one of them had renamed."""
    for path in stale:
        shutil.rmtree(path, ignore_errors=True)
    aside = sorted((path for path, _ in _beside(place, REPLACED)), key=lambda path: path.stat().st_ctime_ns)
    if aside and not (place.is_dir() and any(place.iterdir())):
        os.rename(aside.pop(), place)
    if (place / EXPORT_RECORD).is_file():  # ``place`` holds the new artifact or the restored earlier one
        for path in aside:
            shutil.rmtree(path, ignore_errors=True)


def _prefix(place: Path, kind: str) -> str:
    return f".{place.name}.{kind}-"


def _beside(place: Path, kind: str) -> list[tuple[Path, str | None]]:
    """Return the partial or replaced folders of exports to ``place``, each with the process id in its name."""
    pattern = re.compile(re.escape(_prefix(place, kind)) + r"(?:(\d+)-)?[a-z0-9_]{8}")
    found = []
    with suppress(FileNotFoundError, PermissionError), os.scandir(place.parent) as entries:
        for entry in entries:
            name = pattern.fullmatch(entry.name)
            if name and entry.is_dir(follow_symlinks=False):
                found.append((Path(entry.path), name[1]))
    return found


@contextmanager
def _alone_in(parent: Path) -> Iterator[None]:
    """Hold a lock on ``parent``, so that exports that begin at the same time check for each other in turn.

    An export that has waited for ``PATIENCE`` goes on without the lock, which another program may hold.
    """
    deadline, lock = time.monotonic() + PATIENCE, None
    while time.monotonic() < deadline:
        try:
            lock = _lock(parent)
            break
        except BlockingIOError:
            time.sleep(0.05)
    try:
        yield
    finally:
        _unlock(lock)


def _lock(folder: Path, shared: bool = False, wait: bool = False) -> int | None:
    """Lock a folder until its descriptor is closed or the process ends.

    Returns None if the folder cannot be locked: on another platform, on some network file systems, or if this user may
    not open it. Raises BlockingIOError if another process has the lock, unless ``wait`` is True.
    """
    if fcntl is None:
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return descriptor


def _unlock(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)
