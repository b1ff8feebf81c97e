"""The output folder: it appears whole or not at all.

Everything is written into a hidden folder beside the final one and renamed when it is complete. Whatever ends an export
early, the final name keeps what it had.
"""

import hashlib
import importlib.metadata
import json
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle3.runner.contract import EXPORT_RECORD, MODEL_FILE

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
PACKAGES = ("eagle3-export", "torch", "executorch", "torchao", "transformers", "safetensors")


def check_output(folder: Path, overwrite: bool) -> None:
    """Raises FileExistsError for a folder that is not empty, unless it is an artifact and ``overwrite``."""
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file: --output-dir wants a folder")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not overwrite:
        raise FileExistsError(f"{folder} is not empty: type --overwrite to replace it, or name another --output-dir")
    try:
        files = json.loads((folder / EXPORT_RECORD).read_text())["files"]
        own = {EXPORT_RECORD, *files} if MODEL_FILE in files else set()
    except (OSError, ValueError, KeyError, TypeError):
        own = set()
    strange = sorted(path.name for path in folder.iterdir() if path.name not in own)
    if strange:
        raise FileExistsError(
            f"{folder} holds {strange[0]}, which eagle3-export did not write: --overwrite replaces an artifact alone, "
            "name another --output-dir"
        )


@contextmanager
def whole_folder(folder: Path, overwrite: bool) -> Iterator[Path]:
    """Yield a folder to write into that becomes ``folder`` at the end; after an exception nothing has changed.

    Raises FileExistsError at the end where ``folder`` has meanwhile become what ``check_output`` refuses.
    """
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    partial.chmod(0o755)
    try:
        with _terminated_like_interrupted():
            yield partial
            check_output(folder, overwrite)
            _swap(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def full_disk_named(folder: Path, needed: int) -> Iterator[None]:
    """Turn whatever a full disk caused, in this process or in a compiler's, into one OSError with the numbers.

    ``needed``: bytes that the artifact takes, roughly.
    """
    try:
        yield
    except Exception as error:
        chain, cause = [], error
        while cause is not None:
            chain.append(cause)
            cause = cause.__cause__ or cause.__context__
        if not any("No space left on device" in str(link) for link in chain):
            raise
        places = {"output": folder.resolve().parent, "temporary files": Path(tempfile.gettempdir())}
        free = ", ".join(
            f"{name} ({path}): {shutil.disk_usage(path).free / 1e9:.1f} GB" for name, path in places.items()
        )
        raise OSError(
            f"no space left on the disk; the artifact takes about {needed / 1e9:.1f} GB, free for {free}: "
            "make room, name another --output-dir, or set TMPDIR"
        ) from error


def _swap(new: Path, folder: Path) -> None:
    """Rename ``new`` to ``folder``; what was there goes once the new one stands, and comes back if it does not."""
    earlier = new.with_name(new.name.replace(".partial-", ".replaced-"))
    try:
        if folder.exists():
            os.rename(folder, earlier)
        os.rename(new, folder)
    finally:
        if earlier.exists() and not folder.exists():
            os.rename(earlier, folder)
        shutil.rmtree(earlier, ignore_errors=True)


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that the partial folder goes with it."""

    def interrupt(signum, frame):
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # no other thread may set handlers
        yield
        return
    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def copy_tokenizer(checkpoint: Path, folder: Path) -> list[str]:
    """Copy the tokenizer's files that the checkpoint has; returns their names."""
    names = [name for name in TOKENIZER_FILES if (checkpoint / name).is_file()]
    for name in names:
        shutil.copyfile(checkpoint / name, folder / name)
    return names


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def package_versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def write_record(folder: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Write ``export.json``, the record with size and sha256 of every other file, and return what it holds."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.iterdir())
        if path.name != EXPORT_RECORD
    }
    record = record | {"files": files}
    (folder / EXPORT_RECORD).write_text(json.dumps(record, indent=2) + "\n")
    return record
