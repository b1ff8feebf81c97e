"""An artifact as a language model: generate, stream, converse. What every command stands on."""

import secrets
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from eagle3.runner.adaptive_chain import AdaptiveChain
from eagle3.runner.cache import CachedTokens
from eagle3.runner.choice import Choice, Greedy
from eagle3.runner.contract import Metadata
from eagle3.runner.loop import STOP, Generation, check_request, generate
from eagle3.runner.lossless import Replay, replay
from eagle3.runner.options import AUTO, Options
from eagle3.runner.sampling.logprobs import Logprobs, TokenLogprobs
from eagle3.runner.sampling.sampler import Sampler
from eagle3.runner.session import Session
from eagle3.runner.statistics import GenerationStats
from eagle3.runner.text import TOKENIZER_FILE, Text, TextStream

ABORT = "abort"
"""As in vLLM: the generation was left or interrupted before its end."""

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or the messages of a conversation, which the model's chat template puts together."""


class BusyError(RuntimeError):
    """A generation is under way in this model: it has one KV cache."""


@dataclass(frozen=True)
class Piece:
    """What a round gave. ``text`` is what is sure to stay; with a stop string in sight it lags behind ``token_ids``."""

    text: str
    token_ids: list[int]


@dataclass(frozen=True)
class Result:
    """A generation. ``text`` is None where the artifact has no tokenizer."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    """The new ones; a stop token and the token that completed a stop string are included."""
    text: str | None
    finish_reason: str
    """"stop" (an end token or a stop string), "length" (the budget or the context), "abort"."""
    stop_reason: int | str | None
    """The end token or the stop string."""
    options: Options
    """With the seed that was taken."""
    stats: GenerationStats
    logprobs: list[TokenLogprobs] | None = None

    def as_json(self) -> dict[str, Any]:
        record: dict[str, Any] = {"token_ids": self.token_ids, "text": self.text, "finish_reason": self.finish_reason}
        if self.stop_reason is not None:
            record["stop_reason"] = self.stop_reason
        if not self.options.plain:
            record["seed"] = self.options.seed
        if self.logprobs is not None:
            record["logprobs"] = [each.as_json() for each in self.logprobs]
        return record | {"stats": self.stats.as_json()}


class Model:
    """An opened artifact, or any other session. Not for two generations at once, from whatever threads; several models
    may be open in a process."""

    def __init__(self, metadata: Metadata, open_session: Callable[[], Session], folder: Path | None = None):
        """``open_session`` is called when the methods are first needed; ``folder`` has the tokenizer, None: token ids
        alone."""
        self.metadata, self._open_session, self._folder = metadata, open_session, folder
        self.cached = CachedTokens()
        self.current: Stream | None = None
        """Whose the caches are."""
        self._running = threading.Lock()

    @cached_property
    def session(self) -> Session:
        """The methods, loaded."""
        return self._open_session()

    @cached_property
    def chain(self) -> AdaptiveChain:
        """The chain length by itself, which keeps what it learned."""
        return AdaptiveChain(self.metadata.chain_len)

    @cached_property
    def text(self) -> Text:
        """The tokenizer. Raises FileNotFoundError where the artifact has none."""
        if self._folder is None:
            raise FileNotFoundError("there is no tokenizer: give token ids")
        return Text(self._folder)

    @property
    def has_text(self) -> bool:
        return self._folder is not None and (self._folder / TOKENIZER_FILE).is_file()

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises ValueError for what is no prompt, FileNotFoundError without a tokenizer."""
        if isinstance(prompt, str):
            if not prompt:
                raise ValueError("the prompt is empty: give some text")
            return self.text.encode(prompt)
        given = list(prompt) if isinstance(prompt, Iterable) else [None]
        if given and all(isinstance(message, Mapping) for message in given):
            return self.text.encode_messages([dict(message) for message in given])
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in given):
            raise ValueError("a prompt is text, a list of token ids or a list of messages")
        return given

    def generate(self, prompt: Prompt, **options: Any) -> Result:
        """``stream`` to its end."""
        with self.stream(prompt, **options) as stream:
            for _ in stream:
                pass
        return stream.result

    def stream(self, prompt: Prompt, **options: Any) -> "Stream":
        """Generate, a ``Piece`` a round; everything is checked before this returns.

        Args:
            prompt: text, token ids or messages; what the caches hold of its beginning is not computed again
            options: of ``Options``, such as temperature=0.7, max_new_tokens=200, stop=["\\n\\n"]

        Raises:
            ValueError: a prompt or an option that the artifact does not take
            FileNotFoundError: text for an artifact without a tokenizer
            BusyError: (when it is iterated) another generation of this model has not ended
        """
        return Stream(self, self.encode(prompt), Options.of(**options))

    def replay(self, result: Result) -> Replay:
        """Hold a result against the same generation without speculation. Raises BusyError during another one."""
        with self.reserved():
            self.cached.clear()
            make_choice = partial(choose, result.options, self.metadata, result.prompt_token_ids)
            chain = self.chain if result.options.chain_len == AUTO else result.options.chain_len
            return replay(self.session, result.prompt_token_ids, result.token_ids, make_choice, chain)

    def forget(self) -> None:
        """Compute the next prompt from its beginning."""
        self.cached.clear()

    def close(self) -> None:
        """Give the memory back; the model cannot be used after that. A stream that waits to be asked for more is left;
        BusyError where another thread is within one."""
        if self.current is not None:
            with suppress(ValueError):  # "generator already executing"
                self.current.close()
        with self.reserved():
            self.cached.clear()
            if "session" in self.__dict__:
                self.session.close()

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """The caches are the caller's. Raises BusyError where they are another's."""
        if not self._running.acquire(blocking=False):
            raise BusyError(
                "a generation of this model is under way and it has one KV cache: end or close that one first, or load "
                "the artifact a second time"
            )
        try:
            yield
        finally:
            self._running.release()

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Stream(Iterator[Piece]):
    """A generation under way. Leaving it early, by ``close``, ``with`` or an interruption, keeps what there is."""

    def __init__(self, model: Model, prompt: list[int], options: Options):
        metadata = model.metadata
        chain_len = options.chain_len if isinstance(options.chain_len, int) else None
        check_request(metadata, prompt, options.max_new_tokens, chain_len)
        options.check(metadata)
        if not options.plain and options.seed is None:
            options = replace(options, seed=secrets.randbits(63))
        self._model, self._prompt, self._options = model, prompt, options
        self._decoder = TextStream(model.text, options.stop) if model.has_text else None
        if options.stop and self._decoder is None:
            raise ValueError("stop strings need a tokenizer, and the artifact has none: give stop_token_ids")
        self._logprobs: Logprobs | None = None
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._finish_reason, self._stop_reason = ABORT, None
        self._stats, self._ended = GenerationStats(), False
        self._pieces = self._run()

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        self._pieces.close()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def result(self) -> Result:
        """What was generated so far."""
        logprobs = None if self._logprobs is None else self._logprobs.tokens[: len(self._tokens)]
        text = None if self._decoder is None else "".join(self._texts)
        return Result(
            self._prompt,
            list(self._tokens),
            text,
            self._finish_reason,
            self._stop_reason,
            self._options,
            self._stats,
            logprobs,
        )

    def _run(self) -> Iterator[Piece]:
        with self._model.reserved(), closing(self._steps()) as steps:
            self._model.current = self
            try:
                while self._finish_reason == ABORT:
                    try:
                        yield self._take(next(steps))
                    except StopIteration as end:
                        self._finish_reason = end.value.finish_reason
                        if self._finish_reason == STOP:
                            self._stop_reason = self._tokens[-1]
                if rest := self._rest():
                    yield Piece(rest, [])
            finally:
                self._model.current = None
                self._rest()
                self._stats.generation_tokens = len(self._tokens)

    def _steps(self) -> Generator[list[int], None, Generation]:
        model, options = self._model, self._options
        return generate(
            model.session,
            self._prompt,
            options.max_new_tokens,
            model.chain if options.chain_len == AUTO else options.chain_len,
            options.stop_ids(model.metadata),
            self._choice(),
            model.cached,
            self._stats,
        )

    def _take(self, fresh: list[int]) -> Piece:
        """Keep what a round accepted, up to a stop string."""
        text = ""
        if self._decoder is not None:
            text = self._decoder.push(fresh)
            self._texts.append(text)
            if self._decoder.stopped is not None:
                self._finish_reason, self._stop_reason = STOP, self._decoder.stopped
                fresh = fresh[: self._decoder.kept - len(self._tokens)]
        self._tokens += fresh
        return Piece(text, fresh)

    def _rest(self) -> str:
        """The text that was held back, once."""
        if self._decoder is None or self._ended:
            return ""
        self._ended = True
        self._texts.append(self._decoder.finish())
        return self._texts[-1]

    def _choice(self) -> Choice:
        choice = choose(self._options, self._model.metadata, self._prompt)
        if self._options.logprobs is not None:
            choice = self._logprobs = Logprobs(choice, self._options.logprobs)
        return choice


def choose(options: Options, metadata: Metadata, tokens: Sequence[int]) -> Choice:
    """How what follows ``tokens`` is chosen."""
    return Greedy() if options.plain else Sampler(options, metadata, tokens)
