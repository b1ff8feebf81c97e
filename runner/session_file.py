"""A conversation in a file: the tokens and the state of a model's caches, so that another process goes on from there.

Its parts, little-endian and without padding; ``native/session_file.cpp`` reads and writes the same:

1. ``HEAD``: ``MAGIC``, the artifact's sha256 (32 bytes), and eight int64: the number of tokens, the four ``Counters``,
   the bytes of the note and of the state, and 0
2. the tokens, int64 each
3. the note, in UTF-8
4. the state (``loop/state.py``)
5. the sha256 of everything before, 32 bytes
"""

import hashlib
import os
import struct
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from torch import Tensor

from eagle3.runner.contract import Metadata
from eagle3.runner.hosts.session import Session
from eagle3.runner.loop.cached_tokens import CachedTokens, Counters
from eagle3.runner.loop.state import read_pieces, state_bytes, write_pieces

MAGIC = b"eagle3s\x01"
HEAD = struct.Struct("<8s32s8q")
DIGEST_BYTES = 32
CHUNK = 1 << 20
DIGITS = 12  # of a sha256, in messages


@dataclass(frozen=True)
class Saved:
    """A conversation that was written to a file or read from one."""

    tokens: int
    """The number of tokens in the caches, with the newest, which is not computed yet."""
    bytes: int
    """The size of the file."""
    note: str
    """The text that was saved with it."""


class Head(NamedTuple):
    """The values at the beginning of a file."""

    artifact: str
    """The artifact's sha256 in hexadecimal digits."""
    counters: Counters
    tokens: list[int]
    note: str
    state_bytes: int


def check_can_save(metadata: Metadata) -> None:
    """Raise ValueError for an artifact that cannot give its state."""
    if not metadata.state_groups:
        raise ValueError(
            "the artifact has no method read_state, which keeps a conversation: export it again for cuda or xnnpack, "
            "without --no-sessions"
        )


def save(path: Path, session: Session, cached: CachedTokens, artifact: str, note: str = "") -> Saved:
    """Write the state of ``session``, whose caches hold the tokens of ``cached``. The file appears whole, readable by
    its owner alone. ``artifact`` is the artifact's sha256 in hexadecimal digits.

    Raises ValueError for an artifact that cannot give its state, OSError if the disk does not take the file.
    """
    check_can_save(session.metadata)
    slots = cached.counters.slots
    size = state_bytes(session, slots) if cached.tokens else 0
    pieces = read_pieces(session, slots) if cached.tokens else ()
    return write(path, Head(artifact, cached.counters, cached.tokens, note, size), pieces)


def write(path: Path, head: Head, pieces: Iterable[Tensor]) -> Saved:
    """Write a file whose state has these pieces, uint8 each. Raises OSError."""
    text = head.note.encode()
    numbers = len(head.tokens), *head.counters, len(text), head.state_bytes, 0
    with _written(path) as file:
        digest = hashlib.sha256()

        def add(data: bytes | memoryview) -> None:
            digest.update(data)
            file.write(data)

        add(HEAD.pack(MAGIC, bytes.fromhex(head.artifact), *numbers))
        add(struct.pack(f"<{len(head.tokens)}q", *head.tokens))
        add(text)
        for piece in pieces:
            add(piece.numpy().data)
        file.write(digest.digest())
        size = file.tell()
    return Saved(len(head.tokens), size, head.note)


def resume(path: Path, session: Session, cached: CachedTokens, artifact: str) -> Saved:
    """Read a file that ``save`` wrote, and write its state into ``session``. Whatever is wrong is found before anything
    is written; the caches then hold what they held.

    Raises ValueError for a file that is damaged, cut, of another artifact or of another program; OSError if it cannot
    be read.
    """
    check_can_save(session.metadata)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = read_head(file, path, artifact, session.metadata)
        if head.tokens and state_bytes(session, head.counters.slots) != head.state_bytes:
            raise ValueError(f"{path} is damaged (its state has {head.state_bytes:,} bytes): delete it")
        _check_digest(file, size, path)
        file.seek(size - DIGEST_BYTES - head.state_bytes)

        def take(piece: Tensor) -> None:
            if file.readinto(piece.numpy().data) != piece.numel():
                raise ValueError(f"{path} was cut while it was read: delete it")

        cached.clear()
        if head.tokens:
            write_pieces(session, head.counters.slots, take)
        cached.restore(head.tokens, head.counters)
    return Saved(len(head.tokens), size, head.note)


def read_head(file: BinaryIO, path: Path, artifact: str, metadata: Metadata) -> Head:
    """Read the beginning of a file. Raises ValueError unless it is a conversation with this artifact, of the recorded
    length, whose numbers are possible."""
    size = os.fstat(file.fileno()).st_size
    start = file.read(HEAD.size)
    if len(start) < HEAD.size or not start.startswith(MAGIC):
        raise ValueError(f"{path} is no conversation that eagle3 saved, or is damaged: give another file, or delete it")
    _, of, count, *numbers, note_bytes, states, reserved = HEAD.unpack(start)
    if of.hex() != artifact:
        raise ValueError(
            f"{path} belongs to another artifact (sha256 {of.hex()[:DIGITS]}..., this one has {artifact[:DIGITS]}...): "
            "open it with that one, or give another file"
        )
    counters = Counters(*numbers)
    expected = HEAD.size + 8 * count + note_bytes + states + DIGEST_BYTES
    possible = (
        min(count, *counters, note_bytes, states) >= 0
        and reserved == 0
        and count <= counters.slots + 1 <= 2 * metadata.max_seq_len
        and count <= metadata.max_seq_len
        and counters.draft_slots <= max(0, count - 1)
    )
    if not possible or expected != size:
        raise ValueError(f"{path} is damaged or cut ({size:,} bytes): delete it, or give another file")
    tokens = list(struct.unpack(f"<{count}q", file.read(8 * count)))
    note = file.read(note_bytes).decode(errors="replace")
    if any(not 0 <= token < metadata.vocab_size for token in tokens):
        raise ValueError(f"{path} is damaged (a token is outside the vocabulary): delete it, or give another file")
    return Head(artifact, counters, tokens, note, states)


def _check_digest(file: BinaryIO, size: int, path: Path) -> None:
    """Raise ValueError unless a file of ``size`` bytes ends with the sha256 of everything before."""
    file.seek(0)
    digest, left = hashlib.sha256(), size - DIGEST_BYTES
    while left and (data := file.read(min(CHUNK, left))):
        digest.update(data)
        left -= len(data)
    if file.read(DIGEST_BYTES) != digest.digest():
        raise ValueError(f"{path} is damaged (its sha256 differs): delete it, or give another file")


@contextmanager
def _written(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file that becomes ``path`` when it is complete. Its owner alone may read and write it."""
    descriptor, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # with the permissions 600
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside)
        raise
