"""An artifact as a language model that generates and streams text. Every command uses it."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Unpack

from eagle3.runner.artifact.near_ties import near_tie_of
from eagle3.runner.artifact.record import model_sha256, read_export
from eagle3.runner.contract import MODEL_FILE, Metadata
from eagle3.runner.hosts.session import Session
from eagle3.runner.loop.adaptive_chain import AdaptiveChain
from eagle3.runner.loop.cached_tokens import CachedTokens
from eagle3.runner.loop.lookup_choice import LookupChoice, pays
from eagle3.runner.loop.lossless import Replay, replay
from eagle3.runner.options import AUTO, OptionFields, Options
from eagle3.runner.sampling.constraint import Constraint, Grammars
from eagle3.runner.session_file import Saved, resume, save
from eagle3.runner.stream import Piece, Result, Stream, choose
from eagle3.runner.text.chat import check_messages
from eagle3.runner.text.text import TOKENIZER_FILE, Text

__all__ = ["BusyError", "Model", "Piece", "Prompt", "Result", "Stream"]

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or the messages of a conversation, which the chat template renders."""


NOTED_ROUNDS, FAR_BELOW = 20, 1 / 3
"""The rounds after which few accepted proposals are no chance, and the share of the measured number that is few."""
MILD = 0.7
"""The highest temperature at which acceptance is compared with that of greedy text."""


class BusyError(RuntimeError):
    """Raised if another generation of this model is running, since the model has one KV cache."""


class Model:
    """An opened artifact, or any other session. It runs one generation at a time, whatever the thread. A process may
    have several models open."""

    def __init__(
        self,
        metadata: Metadata,
        open_session: Callable[[], Session],
        folder: Path | None = None,
        sha256: Callable[[], str] | None = None,
    ):
        """``open_session`` is called when the methods are first needed. ``folder`` has the tokenizer; with None the
        model takes token ids only. ``sha256`` returns the artifact's, by default that of the ``model.pte`` in
        ``folder``."""
        self.metadata, self._open_session, self._folder = metadata, open_session, folder
        self._sha256 = sha256
        self.cached = CachedTokens()
        self._running = threading.Lock()
        self._current: weakref.ref[Stream] | None = None

    @cached_property
    def session(self) -> Session:
        """The session with the loaded methods."""
        return self._open_session()

    @cached_property
    def sha256(self) -> str:
        """The artifact's sha256 in hexadecimal digits. Raises ValueError for a model without an artifact."""
        if self._sha256 is not None:
            return self._sha256()
        if self._folder is None:
            raise ValueError("the model has no artifact, so that no conversation with it can be saved")
        return model_sha256(self._folder / MODEL_FILE)

    @property
    def current(self) -> Stream | None:
        """The stream that the KV caches belong to, None if no stream is running."""
        return None if self._current is None else self._current()

    @cached_property
    def chain(self) -> AdaptiveChain:
        """The adaptive chain length, which keeps what it learned."""
        return AdaptiveChain(self.metadata.chain_len)

    @cached_property
    def lookup(self) -> LookupChoice:
        """The lookup in the text, which keeps what it learned."""
        return LookupChoice(self.metadata.chain_len, self.metadata.window - 1)

    def lookup_for(self, options: Options) -> LookupChoice | None:
        """Return the lookup if ``options`` ask for it, otherwise None."""
        asked = options.chain_len != 0 and pays(self.metadata) if options.ngram is None else options.ngram
        return self.lookup if asked else None

    @cached_property
    def text(self) -> Text:
        """The tokenizer. Raises FileNotFoundError if the artifact has none."""
        if self._folder is None:
            raise FileNotFoundError("there is no tokenizer: give token ids")
        return Text(self._folder)

    @property
    def has_text(self) -> bool:
        return self._folder is not None and (self._folder / TOKENIZER_FILE).is_file()

    @cached_property
    def grammars(self) -> Grammars:
        """The compiler of ``structured_outputs``. Raises the errors of ``Text`` and ``Grammars``."""
        return Grammars(self.text.folder / TOKENIZER_FILE, self.metadata)

    def constraint(self, options: Options) -> Constraint | None:
        """Return the compiled grammar of ``options``, None without one. Raises ValueError for an invalid grammar."""
        return None if options.structured_outputs is None else self.grammars.compile(options.structured_outputs)

    def encode(self, prompt: Prompt) -> list[int]:
        """Return token ids of a prompt. Raises ValueError for an invalid prompt, FileNotFoundError for text without a
        tokenizer."""
        if isinstance(prompt, str):
            if not prompt:
                raise ValueError("the prompt is empty: give some text")
            self.text.check_length(prompt, self.metadata.max_seq_len)
            return self.text.encode(prompt)
        given: list[Any] = list(prompt) if isinstance(prompt, Iterable) else [None]
        if given and all(isinstance(message, Mapping) for message in given):
            messages = check_messages([dict(message) for message in given])
            self.text.check_length("\n".join(each["content"] for each in messages), self.metadata.max_seq_len)
            return self.text.encode_messages(messages)
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in given):
            raise ValueError("a prompt is text, a list of token ids or a list of messages")
        return given

    def generate(self, prompt: Prompt, **options: Unpack[OptionFields]) -> Result:
        """Run ``stream`` to its end."""
        with self.stream(prompt, **options) as stream:
            for _ in stream:
                pass
        return stream.result

    def stream(self, prompt: Prompt, **options: Unpack[OptionFields]) -> "Stream":
        """Return a stream with one ``Piece`` per round. All arguments are checked before this returns.

        Args:
            prompt: text, token ids or messages. A beginning that the caches hold is not computed again. An answer to
                messages also ends at the tokenizer's own end token
            options: the fields of ``Options``, such as temperature=0.7, max_new_tokens=200, stop=["\\n\\n"]

        Raises:
            ValueError: the artifact does not accept the prompt or an option
            FileNotFoundError: text for an artifact without a tokenizer
            BusyError: another generation of this model has not ended (raised by the iteration)

        A loop ``for piece in model.stream(...)`` that is left by ``break`` or an exception ends its generation. A
        stream that a variable holds can be continued later, so the model stays busy until the stream is closed or
        deleted.
        """
        asked = Options.of(**options)
        ids = self.encode(prompt)
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping) and not asked.ignore_eos:
            ends = [end for end in self.text.turn_end_ids if end < self.metadata.vocab_size]
            asked = replace(asked, stop_token_ids=(*asked.stop_token_ids, *ends))
        return Stream(self, ids, asked)

    def replay(self, result: Result) -> Replay:
        """Compare a result with the same generation without speculation. Raises BusyError during another generation."""
        with self.reserved():
            self.cached.clear()
            constraint = self.constraint(result.options)
            make_choice = partial(choose, result.options, self.metadata, constraint, result.prompt_token_ids)
            chain = self.chain if result.options.chain_len == AUTO else result.options.chain_len
            tie = near_tie_of(self.metadata, self._folder)
            lookup = self.lookup_for(result.options)
            return replay(self.session, result.prompt_token_ids, result.token_ids, make_choice, chain, tie, lookup)

    def acceptance_note(self, result: Result) -> str | None:
        """Return a line for the user if far fewer of the head's proposals were accepted than ``export.json`` says,
        otherwise None. A processor whose kernels compute a quantized head otherwise is not seen in the text, which
        stays right."""
        options, stats = result.options, result.stats
        if options.chain_len is not None or options.temperature > MILD or options.adjusts or options.structured_outputs:
            return None
        rounds = stats.num_drafts - stats.num_lookup_drafts
        if rounds < NOTED_ROUNDS or self._folder is None:
            return None
        check = read_export(self._folder).get("check")
        measured = check.get("mean_acceptance_length") if isinstance(check, dict) else None
        if not isinstance(measured, float):
            return None
        accepted = (stats.num_accepted_tokens - stats.num_lookup_accepted_tokens) / rounds
        if accepted >= (measured - 1) * FAR_BELOW:
            return None
        return (
            f"few proposals are accepted: {accepted:.2f} a round in {rounds} rounds, {measured - 1:.2f} on the prompts "
            "of the export. Text of another kind can be the cause; if every text shows it, this processor computes the "
            "draft head otherwise"
        )

    def save(self, path: str | Path, note: str = "") -> Saved:
        """Write the tokens and the state of the caches into a file, whole or not at all, which its owner alone may
        read.

        ``resume`` of this artifact, in another process or by the native runner, goes on from there: the next prompt
        that begins with these tokens costs only its new ones. ``note`` is text to be kept with it. The file is about as
        large as the caches that the text fills.

        Raises ValueError for an artifact exported with ``--no-sessions``, BusyError during a generation, OSError.
        """
        with self.reserved():
            return save(Path(path), self.session, self.cached, self.sha256, note)

    def resume(self, path: str | Path) -> Saved:
        """Write the state that ``save`` kept into the caches. What they held is forgotten.

        Raises ValueError for a file that is damaged, cut or of another artifact, and then changes nothing; BusyError
        during a generation; OSError.
        """
        with self.reserved():
            return resume(Path(path), self.session, self.cached, self.sha256)

    def forget(self) -> None:
        """Forget the tokens in the KV caches, so that the next prompt is computed from its beginning."""
        self.cached.clear()

    def close(self) -> None:
        """Free the memory; the model cannot be used afterwards. An unfinished stream ends. Raises BusyError if another
        thread is computing a piece."""
        if (stream := self.current) is not None:
            with suppress(ValueError):  # another thread is executing the stream
                stream.close()
        with self.reserved():
            self.cached.clear()
            if "session" in self.__dict__:
                self.session.close()

    @contextmanager
    def reserved(self, stream: "weakref.ref[Stream] | None" = None) -> Iterator[None]:
        """Reserve the KV caches for the caller, or for ``stream``. Raises BusyError if another generation has them."""
        if not self._acquire():
            raise BusyError(
                "a generation of this model is running, and the model has one KV cache: end, close or delete it "
                "first, or load the artifact a second time"
            )
        self._current = stream
        try:
            yield
        finally:
            self._current = None
            self._running.release()

    def _acquire(self) -> bool:
        if self._running.acquire(blocking=False):
            return True
        stream = self.current
        if stream is None or stream.running:
            return False
        del stream
        gc.collect()  # that stream may be in an unreachable reference cycle, such as that of a traceback
        return self._running.acquire(blocking=False)

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
