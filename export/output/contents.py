"""Writes the files of an artifact: the program, the tokenizer's files, and ``export.json``, the record of the
export."""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from eagle3.runner.contract import EXPORT_RECORD, PROGRAM_SUFFIX
from eagle3.runner.system.machine import version_of

TOKENIZER, SETTINGS, CHAT_TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
TOKENIZER_FILES = (
    TOKENIZER,
    SETTINGS,
    "special_tokens_map.json",
    CHAT_TEMPLATE,
    "generation_config.json",
)
PACKAGES = ("eagle3-export", "torch", "executorch", "torchao", "transformers", "safetensors")


def copy_tokenizer(checkpoint: Path, folder: Path) -> None:
    """Copy those files of the tokenizer that the checkpoint has."""
    for name in TOKENIZER_FILES:
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, folder / name)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_by_name(paths: Iterable[Path]) -> dict[str, str]:
    """Hash several files at a time, so that one is read while another is hashed. Returns each sha256 by file name."""
    paths = list(paths)
    with ThreadPoolExecutor() as pool:
        return {path.name: digest for path, digest in zip(paths, pool.map(sha256, paths), strict=True)}


class Writable(Protocol):
    """The contents of a file."""

    def write_to_file(self, file: Any, /) -> None:  # noqa: ANN401 - an open file, or one that also hashes
        """Write all of them."""


class HashedFile:
    """A file that hashes the data written to it, in a thread."""

    def __init__(self, file: BinaryIO, pool: ThreadPoolExecutor):
        self._file, self._pool, self._digest = file, pool, hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:
        hashing = self._pool.submit(self._digest.update, data)
        written = self._file.write(data)
        hashing.result()
        return written

    def sha256(self) -> str:
        """Return the sha256 of everything written so far."""
        return self._digest.hexdigest()


@contextmanager
def hashed_file(path: Path) -> Iterator[HashedFile]:
    with path.open("wb") as file, ThreadPoolExecutor(1) as pool:
        yield HashedFile(file, pool)


def write_files(files: Mapping[str, Writable], folder: Path) -> dict[str, str]:
    """Write files by name. Returns each sha256 by name."""
    digests = {}
    for name, contents in files.items():
        with hashed_file(folder / name) as file:
            contents.write_to_file(file)
        digests[name] = file.sha256()
    return digests


def package_versions() -> dict[str, str]:
    return {name: version_of(name) for name in PACKAGES}


def program_digest(model: Path) -> dict[str, Any]:
    """Return ``{"program": {"bytes", "sha256"}}`` for the program at the beginning of a ``.pte``, up to its first
    segment.

    A runner can check this part at once, for a file of any size. A file without ExecuTorch's extended header gives an
    empty dictionary.
    """
    from executorch.exir._serialize._program import _ExtendedHeader, _get_extended_header

    with model.open("rb") as file:
        header = _get_extended_header(file.read(_ExtendedHeader.NUM_HEAD_BYTES))
        if header is None:
            return {}
        file.seek(0)
        program = file.read(header.program_size)
    return {"program": {"bytes": len(program), "sha256": hashlib.sha256(program).hexdigest()}}


def write_record(folder: Path, record: dict[str, Any], known: Mapping[str, str]) -> dict[str, Any]:
    """Write ``export.json``, the record with the size and sha256 of every other file, and return its contents.

    ``known`` maps the names of files that were hashed while they were written to their sha256.
    """
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": known.get(path.name) or sha256(path)}
        for path in sorted(folder.iterdir())
        if path.name != EXPORT_RECORD
    }
    for name in files:
        if name.endswith(PROGRAM_SUFFIX):
            files[name] |= program_digest(folder / name)
    record = record | {"files": files}
    (folder / EXPORT_RECORD).write_text(json.dumps(record, indent=2) + "\n")
    return record
