"""The states of the last dialogues with an artifact, in memory and on disk, so that dialogues that take turns do not
compute each other's prompts again."""

import os
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from eagle3.runner.loop.cached_tokens import CachedTokens, Counters, common_prefix
from eagle3.runner.loop.state import read_pieces, state_bytes, write_pieces
from eagle3.runner.model import Model
from eagle3.runner.session_file import Head, check_can_save, read_head, resume, write
from eagle3.runner.system.command import one_line

WORTH = 32
"""The fewest tokens for which a state is kept or taken up. Computing fewer of them again costs about as much."""
SUFFIX = ".session"


@dataclass(eq=False)
class Kept:
    """A dialogue's state: its pieces in memory, its file, or both."""

    cached: CachedTokens
    bytes: int
    pieces: list[Tensor] | None = None
    file: Path | None = None
    gone: bool = False
    """True if the dialogue is no longer kept, so that a file that is still being written is to be deleted."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def written(self, file: Path) -> None:
        with self.lock:
            if self.gone:
                file.unlink(missing_ok=True)
            else:
                self.file = file

    def drop_file(self) -> None:
        with self.lock:
            if self.file is not None:
                self.file.unlink(missing_ok=True)
            self.file = None

    def drop(self) -> None:
        self.gone = True
        self.drop_file()


def held(tokens: Sequence[int], counters: Counters) -> CachedTokens:
    """Return the record of caches with these contents."""
    cached = CachedTokens()
    cached.restore(tokens, counters)
    return cached


class KeptDialogues:
    """The last dialogues with one artifact, the least recently used first. One thread calls it; files are written on
    another."""

    def __init__(self, size: int, say: Callable[[str], None], folder: Path | None = None):
        """``size``: the most bytes of states in memory, and again in ``folder``, where they outlive the process; with
        None nothing is written. ``say`` is called with lines for the log."""
        self._size, self._say, self._folder = size, say, folder
        self._kept: list[Kept] = []
        self._writing = ThreadPoolExecutor(1, "sessions")

    def open(self, model: Model) -> None:
        """Find the dialogues that ``folder`` holds. Raises ValueError if the artifact cannot give its state, OSError if
        the folder cannot be made."""
        check_can_save(model.metadata)
        if self._folder is None:
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in sorted(self._folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime):
            try:
                with path.open("rb") as file:
                    head = read_head(file, path, model.sha256, model.metadata)
            except (ValueError, OSError) as error:
                self._say(f"not taken up: {one_line(error)}")
                continue
            self._kept.append(Kept(held(head.tokens, head.counters), head.state_bytes, file=path))
        self._trim()

    def prepare(self, model: Model, prompt: Sequence[int], draft: bool = True) -> None:
        """Give a model that runs no generation the state that holds most of ``prompt``. What its caches hold of another
        dialogue is kept. ``draft`` is False if nothing will be drafted. A failure leaves the prompt to be computed."""
        try:
            self._prepare(model, prompt, draft and model.metadata.has_draft_cache)
        except (ValueError, OSError, RuntimeError) as error:
            self._say(f"computed anew: {one_line(error)}")
            model.forget()

    def _prepare(self, model: Model, prompt: Sequence[int], draft: bool) -> None:
        own = model.cached.reusable(prompt, model.metadata, draft)
        found = ((each.cached.reusable(prompt, model.metadata, draft), each) for each in self._kept)
        most, best = max(found, key=lambda pair: pair[0], default=(0, None))
        if most - own < WORTH:
            best = None
        if best is not None:
            self._used(best)  # so that what is kept now does not take its place
        if best is not None or len(model.cached.tokens) - own > WORTH:
            self.keep(model)
        if best is not None and not best.gone:
            self._restore(best, model)

    def keep(self, model: Model) -> None:
        """Keep what a model's caches hold, in place of an earlier state of the same dialogue."""
        tokens, counters = model.cached.tokens, model.cached.counters
        if len(tokens) <= WORTH:
            return
        with model.reserved():
            for each in list(self._kept):
                common = common_prefix(tokens, each.cached.tokens)
                if common >= len(tokens) - 1 and counters.draft_slots <= each.cached.draft_slots:
                    self._used(each)
                    return
                if common > len(each.cached.tokens) - WORTH:
                    self._remove(each)
            size = state_bytes(model.session, counters.slots)
            if size > self._size:
                return
            fresh = Kept(held(tokens, counters), size)
            fresh.pieces = list(read_pieces(model.session, counters.slots))
        self._kept.append(fresh)
        if self._folder is not None:
            self._writing.submit(self._write, fresh, model.sha256, self._folder)
        self._trim()

    def close(self, models: Sequence[Model]) -> None:
        """Write what the models hold to disk, if there is a folder, and wait for it."""
        if self._folder is not None:
            for model in models:
                try:
                    self.keep(model)
                except (ValueError, OSError, RuntimeError) as error:
                    self._say(f"not kept: {one_line(error)}")
        self._writing.shutdown()

    def _restore(self, kept: Kept, model: Model) -> None:
        if kept.pieces is not None:
            left = iter(kept.pieces)
            with model.reserved():
                model.cached.clear()
                write_pieces(model.session, kept.cached.counters.slots, lambda piece: piece.copy_(next(left)))
                model.cached.restore(kept.cached.tokens, kept.cached.counters)
        else:
            assert kept.file is not None
            try:
                with model.reserved():
                    resume(kept.file, model.session, model.cached, model.sha256)
            except (ValueError, OSError):
                self._remove(kept)
                raise

    def _write(self, kept: Kept, artifact: str, folder: Path) -> None:
        """Write a file; runs on the writing thread."""
        pieces = kept.pieces
        if kept.gone or pieces is None:
            return
        path = folder / f"{artifact[:12]}-{secrets.token_hex(8)}{SUFFIX}"
        try:
            write(path, Head(artifact, kept.cached.counters, kept.cached.tokens, "", kept.bytes), pieces)
        except OSError as error:
            self._say(f"not written: {one_line(error)}")
        else:
            kept.written(path)

    def _used(self, kept: Kept) -> None:
        self._kept.remove(kept)
        self._kept.append(kept)
        if kept.file is not None:
            os.utime(kept.file)

    def _remove(self, kept: Kept) -> None:
        self._kept.remove(kept)
        kept.drop()

    def _trim(self) -> None:
        """Drop the least recently used states beyond the size, in memory and on disk."""
        in_memory = on_disk = 0
        for each in reversed(self._kept):
            if each.pieces is not None:
                in_memory += each.bytes
                if in_memory > self._size:
                    each.pieces = None
            if each.file is not None:
                on_disk += each.bytes
                if on_disk > self._size:
                    each.drop_file()
        for each in [each for each in self._kept if each.pieces is None and each.file is None]:
            self._remove(each)
