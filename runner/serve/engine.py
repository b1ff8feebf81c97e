"""Generates on a thread of its own.

Requests wait in a queue; each has the caches of one model to itself, and the rounds of several models alternate. Only
this thread runs the models' methods; threads that check requests read their metadata and their tokenizer. It reports
everything to the event loop of the request.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from eagle3.runner.kept import KeptDialogues
from eagle3.runner.loop.cached_tokens import common_prefix
from eagle3.runner.loop.generation import LENGTH
from eagle3.runner.loop.statistics import GenerationStats
from eagle3.runner.model import Model, Result, Stream
from eagle3.runner.options import Options
from eagle3.runner.sampling.constrained import GrammarFailed
from eagle3.runner.sampling.constraint import Constraint
from eagle3.runner.sampling.logprobs import TokenLogprobs, token_logprobs
from eagle3.runner.serve.errors import Busy, GenerationError, Refused, Unavailable, line
from eagle3.runner.serve.grammars import GrammarCompiler

if TYPE_CHECKING:
    from eagle3.runner.model import Model


@dataclass(frozen=True)
class Delta:
    """The tokens of one round of a request."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    """One entry per token of ``token_ids``; empty if the request does not ask for log-probabilities."""
    proposed: int = 0
    accepted: int = 0
    """The round's counts, as ``Piece`` has them."""


@dataclass
class Times:
    """The values of ``time.perf_counter`` at a request's steps, 0 for steps that were not reached."""

    submitted: float
    started: float = 0.0
    first_token: float = 0.0
    ended: float = 0.0


@dataclass(frozen=True)
class Echo:
    """The echo of a prompt at the beginning of an answer.

    ``logprobs``: the number of most likely tokens for each token of the prompt, None for no log-probabilities;
    ``alone``: nothing is generated.
    """

    logprobs: int | None = None
    alone: bool = False


@dataclass(eq=False)
class Job:
    """One requested generation. ``result`` is set when ``deltas`` has ended."""

    prompt: list[int]
    options: dict[str, Any]
    loop: asyncio.AbstractEventLoop
    times: Times
    constraint: Constraint | None = None
    """The grammar of its ``structured_outputs``, compiled."""
    echo: Echo = field(default_factory=Echo)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One entry per token of the prompt but the first, complete before the first delta; empty unless ``echo`` asks for
    them."""
    events: asyncio.Queue = field(default_factory=asyncio.Queue)
    result: Result | None = None
    left: bool = False
    """True if nobody waits for the job any more; it then ends within a round, or a chunk of its prompt."""

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Yield the delta of each round when it is computed. Raises GenerationError if the generation fails,
        ``Refused`` if its grammar fails, ``Unavailable`` if the engine ends."""
        while isinstance(event := await self.events.get(), Delta):
            yield event
        if isinstance(event, Unavailable):
            raise event
        if isinstance(event, GrammarFailed):
            raise Refused(str(event), "structured_outputs") from event
        if isinstance(event, Exception):
            raise GenerationError(line(event) or type(event).__name__) from event

    def tell(self, event: Delta | Exception | None) -> None:
        """Pass an event from the engine's thread to the request's event loop; None is the end."""
        with suppress(RuntimeError):  # the loop is closed, so nobody waits
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)


@dataclass(eq=False)
class Place:
    """A model, and the job that currently uses its caches."""

    model: Model
    job: Job | None = None
    stream: Stream | None = None
    scores: Generator[list[TokenLogprobs], None, None] | None = None
    """The log-probabilities of the job's prompt, window by window; None if none are left to compute."""
    used: float = 0.0
    prepared: Job | None = None
    """The job for which the kept dialogues have prepared the model."""
    given: int = 0
    """The number of the prompt's tokens whose log-probabilities the job has."""


class Engine:
    """Runs jobs on a thread of its own. ``ended`` is called in that thread with every job that ended or was
    abandoned."""

    def __init__(
        self,
        models: Sequence[Model],
        most_waiting: int,
        ended: Callable[[Job], None],
        common: dict[str, Any],
        kept: KeptDialogues | None = None,
    ):
        """``common`` are the options of every generation, ``kept`` the states of earlier dialogues."""
        self._kept = kept
        self.model = models[0]
        self._places = [Place(model) for model in models]
        self._most_waiting, self._ended, self._common = most_waiting, ended, common
        self._waiting: deque[Job] = deque()
        self._changed, self._closing = threading.Condition(), False
        self._seconds = 1.0  # the recent duration of a request
        self._grammars = GrammarCompiler(self.model)
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)
        for model in models[1:]:  # all models share one tokenizer and one set of compiled grammars
            model.__dict__["text"] = self.model.text
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return sum(place.job is not None for place in self._places)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closing

    async def submit(self, prompt: list[int], each: Sequence[dict[str, Any]], echo: Echo | None = None) -> list[Job]:
        """Append a generation of ``prompt`` for each of these options to the queue.

        Raises ValueError if the model does not accept a request, ``Busy`` if too many jobs wait, and ``Unavailable`` if
        the engine has ended; nothing is then queued.
        """
        self.check_room(len(each))
        loop, now = asyncio.get_running_loop(), time.perf_counter()
        checked = await asyncio.to_thread(Options.of, **(self._common | each[0]))
        asked = checked.structured_outputs
        constraint = None if asked is None else await self._grammars.compile(asked)
        await asyncio.to_thread(Stream, self.model, prompt, checked, constraint)
        echo = echo or Echo()
        jobs = [Job(prompt, self._common | options, loop, Times(now), constraint, echo) for options in each]
        with self._changed:
            self.check_room(len(each))
            self._waiting += jobs
            self._changed.notify()
        return jobs

    def check_room(self, count: int) -> None:
        """Raise ``Refused`` if so many generations never fit into the queue, ``Busy`` if they do not fit now, and
        ``Unavailable`` if the engine has ended."""
        if not self.alive:
            raise Unavailable
        most = self._most_waiting + len(self._places)
        if count > most:
            raise Refused(
                f"{count} choices are asked for, but at most {most} can run and wait here: ask for fewer", "n"
            )
        if count > most - len(self._waiting) - self.running:
            raise Busy(len(self._waiting), self._seconds * (1 + len(self._waiting)) / len(self._places))

    def close(self) -> None:
        """End the engine; running and waiting jobs are abandoned."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self._grammars.close()
        if self._kept is not None:
            self._kept.close([place.model for place in self._places])
            self._kept = None

    def _run(self) -> None:
        try:
            self._generate()
        finally:  # after ``close`` or an error of this class, so that nobody waits for ever
            for place in self._places:
                if place.job is not None:
                    self._end(place, place.job, Unavailable())
            with self._changed:
                self._closing = True
                for job in self._waiting:
                    job.tell(Unavailable())

    def _generate(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self.running or self._closing):
                    self._changed.wait()
                if self._closing:
                    return
                self._assign()
            for place in self._places:
                if place.job is not None:
                    self._round(place, place.job)

    def _assign(self) -> None:
        """Assign free models to the waiting jobs, in order. A job gets the free model whose caches hold most of its
        prompt, and of equal ones the model that has been idle longest."""
        while self._waiting and (free := [place for place in self._places if place.job is None]):
            job = self._waiting.popleft()
            if job.left:
                self._ended(job)
                continue
            place = max(free, key=lambda each: (common_prefix(job.prompt, each.model.cached.tokens), -each.used))
            place.job, place.given, place.used = job, 0, time.perf_counter()
            job.times.started = place.used
            if job.echo.logprobs is not None:
                place.scores = prompt_logprobs(place.model, job.prompt, job.echo.logprobs)

    def _round(self, place: Place, job: Job) -> None:
        """Compute one window of a job's prompt, generate one piece of its text, or end the job."""
        try:
            if job.left:
                self._end(place, job, None)
                return
            if self._kept is not None and place.prepared is not job:
                place.prepared = job
                prompt = job.prompt if place.scores is None else []  # log-probabilities are computed anew
                self._kept.prepare(place.model, prompt, job.options.get("chain_len") != 0)
            if place.scores is not None:
                if (fresh := next(place.scores, None)) is None:
                    place.scores = None
                else:
                    job.prompt_logprobs += fresh
                return
            if job.echo.alone:
                options, stats = Options.of(**job.options), GenerationStats(prompt_tokens=len(job.prompt))
                job.result = Result(job.prompt, [], "", LENGTH, None, options, stats)
                self._end(place, job, None)
                return
            if place.stream is None:
                place.stream = Stream(place.model, job.prompt, Options.of(**job.options), job.constraint)
            piece = place.stream.advance()
            if piece is None:
                self._end(place, job, None)
                return
            if not piece.token_ids and not piece.text:  # after a chunk of the prompt
                return
            if not job.times.first_token:
                job.times.first_token = time.perf_counter()
            logprobs: list[TokenLogprobs] = []
            if job.options.get("logprobs") is not None:
                place.given += len(piece.token_ids)
                known = place.stream.result.logprobs or []
                logprobs = known[place.given - len(piece.token_ids) : place.given]
            job.tell(Delta(piece.text, piece.token_ids, logprobs, piece.proposed, piece.accepted))
        except Exception as error:  # an error ends only its own request
            self._end(place, job, error)

    def _end(self, place: Place, job: Job, error: Exception | None) -> None:
        stream, scores = place.stream, place.scores
        place.job = place.stream = place.scores = None
        if scores is not None:
            scores.close()
        if stream is not None:
            stream.close()
            job.result = stream.result
        job.times.ended = time.perf_counter()
        self._seconds += (job.times.ended - job.times.started - self._seconds) / 8
        try:
            self._ended(job)
        finally:
            job.tell(error)


def prompt_logprobs(model: "Model", prompt: Sequence[int], count: int) -> Generator[list[TokenLogprobs], None, None]:
    """Yield, for one verify window at a time, the log-probability of each token of ``prompt`` but the first, given the
    tokens before it, and the ``count`` most likely tokens. ``prefill`` cannot be used, since it returns the logits of
    its last row only.

    The generator reserves the model's KV caches from its first window to its end, and leaves them empty. The caller
    checks the prompt and the options first, with ``check_request`` and ``Options.check``.
    """
    session, cached = model.session, model.cached
    window, rollback = session.metadata.window, session.metadata.rollback_rows
    tokens = torch.tensor([prompt])
    with model.reserved():
        cached.clear()
        try:
            for start in range(0, len(prompt) - 1, window):
                end = min(start + window, len(prompt))  # a verify window has at least two rows
                cached.run(start, end - start, rollback)
                step = session.target_verify(tokens[:, start:end], session.positions[start:end])
                assert step.logits is not None, "Options.check asks for logits"
                following = list(prompt[start + 1 : end + 1])
                yield token_logprobs(step.logits[0, : len(following)], following, count)
        finally:
            cached.clear()  # no draft slot was written
