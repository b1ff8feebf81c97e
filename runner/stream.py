"""Streams a running generation, and holds its result."""

import inspect
import secrets
import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from typing import Any, Protocol

from eagle3.runner.contract import Metadata
from eagle3.runner.hosts.session import Session
from eagle3.runner.loop.adaptive_chain import ChainLength
from eagle3.runner.loop.cached_tokens import CachedTokens
from eagle3.runner.loop.choice import Choice, Greedy, MinTokens
from eagle3.runner.loop.generation import Generation, check_request, generate
from eagle3.runner.loop.lookup_choice import LookupChoice
from eagle3.runner.loop.results import ABORT, STOP, TokenLogprobs
from eagle3.runner.loop.statistics import GenerationStats
from eagle3.runner.options import AUTO, Options
from eagle3.runner.sampling.constrained import Constrained, Guide
from eagle3.runner.sampling.constraint import Constraint
from eagle3.runner.sampling.logprobs import Logprobs
from eagle3.runner.sampling.sampler import Sampler
from eagle3.runner.text.text import Text, TextStream


@dataclass(frozen=True)
class Piece:
    """The outcome of a round. ``text`` is final; it lags behind ``token_ids`` while a stop string may be beginning."""

    text: str
    token_ids: list[int]
    proposed: int = 0
    """Tokens that the draft or the lookup proposed in this round; 0 for a step of the target, such as the first
    token."""
    accepted: int = 0
    """The number of proposals that the target accepted. ``token_ids`` begins with them and ends with one token of the
    target. A generation that ends within a round emits fewer tokens than it accepted."""


@dataclass(frozen=True)
class Result:
    """The result of a generation. ``text`` is None if the artifact has no tokenizer."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    """The new tokens, including a stop token or the token that completed a stop string."""
    text: str | None
    finish_reason: str
    """"stop" (an end token or a stop string), "length" (the budget or the context), "abort"."""
    stop_reason: int | str | None
    """The end token or the stop string."""
    options: Options
    """The options, with the seed that was used."""
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


class StreamedModel(Protocol):
    """The parts of a ``Model`` that a stream uses."""

    metadata: Metadata
    cached: CachedTokens

    @property
    def session(self) -> Session: ...

    @property
    def chain(self) -> ChainLength: ...

    @property
    def text(self) -> Text: ...

    @property
    def has_text(self) -> bool: ...

    def constraint(self, options: Options) -> Constraint | None: ...

    def lookup_for(self, options: Options) -> LookupChoice | None: ...

    def reserved(self, stream: "weakref.ref[Stream]") -> AbstractContextManager[None]: ...


class Stream(Iterator[Piece]):
    """A running generation.

    It reserves the model's KV caches from its first piece to its end. It ends early by ``close``, at the end of a
    ``with``, and as soon as nothing refers to it: CPython then closes it at once. ``result`` keeps the tokens so far.
    """

    def __init__(self, model: StreamedModel, prompt: list[int], options: Options, constraint: Constraint | None = None):
        """``constraint``: the compiled ``options.structured_outputs``; None compiles them here."""
        metadata = model.metadata
        chain_len = options.chain_len if isinstance(options.chain_len, int) else None
        check_request(metadata, prompt, options.max_new_tokens, chain_len)
        options.check(metadata)
        if not options.plain and options.seed is None:
            options = replace(options, seed=secrets.randbits(63))
        decoder = None
        if model.has_text:
            ends = options.stop_ids(metadata)
            decoder = TextStream(
                model.text, options.stop, options.skip_special_tokens, ends, options.min_tokens, options.reasoning
            )
        if options.stop and decoder is None:
            raise ValueError("stop strings need a tokenizer, and the artifact has none: give stop_token_ids")
        self._answer = Answer(prompt, options, decoder, constraint or model.constraint(options))
        self._pieces = _pieces(model, self._answer, weakref.ref(self))

    def __next__(self) -> Piece:
        while not (piece := next(self._pieces)).token_ids and not piece.text:
            pass
        return piece

    def advance(self) -> Piece | None:
        """Compute one round, or one chunk of the prompt, and return its piece, which is empty for a chunk; None at the
        end."""
        return next(self._pieces, None)

    def close(self) -> None:
        """End the generation at its current token."""
        self._pieces.close()

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the prompt."""
        return len(self._answer.prompt)

    @property
    def running(self) -> bool:
        """True if a thread is computing the next piece."""
        return inspect.getgeneratorstate(self._pieces) == inspect.GEN_RUNNING

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def result(self) -> Result:
        """The result so far."""
        return self._answer.result()


class Answer:
    """The result of a generation so far.

    The generator of pieces refers to this object and not to its ``Stream``. A reference cycle would keep an abandoned
    stream, and the model with it, until a garbage collection.
    """

    def __init__(self, prompt: list[int], options: Options, decoder: TextStream | None, constraint: Constraint | None):
        self._constraint = constraint
        self.prompt, self.options, self.stats = prompt, options, GenerationStats()
        self.logprobs: Logprobs | None = None
        self._decoder, self._rest_is_out = decoder, False
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._counted = 0, 0  # draft tokens and accepted tokens of earlier rounds
        self.finish_reason: str = ABORT
        self._stop_reason: int | str | None = None

    def result(self) -> Result:
        logprobs = None if self.logprobs is None else self.logprobs.tokens[: len(self._tokens)]
        text = None if self._decoder is None else "".join(self._texts)
        return Result(
            self.prompt,
            list(self._tokens),
            text,
            self.finish_reason,
            self._stop_reason,
            self.options,
            self.stats,
            logprobs,
        )

    def take(self, fresh: list[int]) -> Piece:
        """Keep the tokens that a round accepted, up to a stop string."""
        before, self._counted = self._counted, (self.stats.num_draft_tokens, self.stats.num_accepted_tokens)
        proposed, accepted = (now - then for now, then in zip(self._counted, before, strict=True))
        text = ""
        if self._decoder is not None:
            text = self._decoder.push(fresh)
            self._texts.append(text)
            if self._decoder.stopped is not None:
                self.finish_reason, self._stop_reason = STOP, self._decoder.stopped
                fresh = fresh[: self._decoder.kept - len(self._tokens)]
        self._tokens += fresh
        return Piece(text, fresh, proposed, accepted)

    def end(self, generation: Generation) -> None:
        """Record that there are no more rounds."""
        self.finish_reason = generation.finish_reason
        if self.finish_reason == STOP:
            self._stop_reason = self._tokens[-1]

    def rest(self) -> str:
        """Return the text that was held back; a second call returns an empty text."""
        if self._decoder is None or self._rest_is_out:
            return ""
        self._rest_is_out = True
        self._texts.append(self._decoder.finish())
        return self._texts[-1]

    def close(self) -> None:
        self.rest()
        self.stats.generation_tokens = len(self._tokens)

    def choice(self, metadata: Metadata) -> Choice:
        choice = choose(self.options, metadata, self._constraint, self.prompt)
        if self.options.logprobs is not None:
            choice = self.logprobs = Logprobs(choice, self.options.logprobs)
        return choice


def _pieces(model: StreamedModel, answer: Answer, stream: "weakref.ref[Stream]") -> Generator[Piece, None, None]:
    with model.reserved(stream), closing(answer), closing(_rounds(model, answer)) as rounds:
        while answer.finish_reason == ABORT:
            try:
                yield answer.take(next(rounds))
            except StopIteration as end:
                answer.end(end.value)
        if rest := answer.rest():
            yield Piece(rest, [])


def _rounds(model: StreamedModel, answer: Answer) -> Generator[list[int], None, Generation]:
    options = answer.options
    return generate(
        model.session,
        answer.prompt,
        options.max_new_tokens,
        model.chain if options.chain_len == AUTO else options.chain_len,
        options.stop_ids(model.metadata),
        answer.choice(model.metadata),
        model.cached,
        answer.stats,
        model.lookup_for(options),
        by_chunk=True,
    )


def choose(options: Options, metadata: Metadata, constraint: Constraint | None, tokens: Sequence[int]) -> Choice:
    """Return the choice of tokens after ``tokens``; ``constraint`` is compiled from ``options.structured_outputs``."""
    choice: Choice = Greedy() if options.plain else Sampler(options, metadata, tokens)
    if options.min_tokens and (ends := options.stop_ids(metadata)):
        choice = MinTokens(choice, options.min_tokens, ends)
    return choice if constraint is None else Constrained(choice, Guide(constraint), metadata)
