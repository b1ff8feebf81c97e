"""Generates in a process of its own, which does nothing else.

Jobs wait in a queue; each has the caches of one model to itself, and the rounds of several models alternate. Only the
thread of ``run`` calls the models' methods. Grammars are compiled on another thread, without the interpreter's lock.
"""

import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from eagle3.runner.kept import KeptDialogues
from eagle3.runner.loop.cached_tokens import common_prefix
from eagle3.runner.loop.results import LENGTH, TokenLogprobs
from eagle3.runner.loop.statistics import GenerationStats
from eagle3.runner.model import Model, Stream
from eagle3.runner.options import Options
from eagle3.runner.sampling.constrained import GrammarFailed
from eagle3.runner.sampling.logprobs import token_logprobs
from eagle3.runner.serve.protocol import (
    FAILED,
    GRAMMAR,
    REFUSED,
    Delta,
    Echoed,
    Ended,
    Event,
    Outcome,
    Request,
    Started,
)

GRAMMAR_SECONDS = (0.25, 0.0005)
"""``Constraint.seconds``: the computing of masks may not keep the model from others."""


@dataclass(eq=False)
class Task:
    """A job in this process. ``stream`` is made when the job arrives, and begins when it leaves the queue. ``turn`` is
    the place in the queue, which jobs of several groups may share."""

    number: int
    request: Request
    stream: Stream
    turn: int = 0


@dataclass(eq=False)
class Place:
    """A model, and the task that currently uses its caches."""

    model: Model
    task: Task | None = None
    scores: Generator[list[TokenLogprobs], None, None] | None = None
    """The log-probabilities of the task's prompt, window by window; None if none are left to compute."""
    used: float = 0.0
    prepared: Task | None = None
    """The task for which the kept dialogues have prepared the model."""


class Engine:
    """Runs jobs until ``close``. ``tell`` is called, on any thread, with a job's number and an event."""

    def __init__(
        self,
        models: Sequence[Model],
        tell: Callable[[int, Event], None],
        common: dict[str, Any],
        kept: KeptDialogues | None = None,
    ):
        """``common`` are the options of every generation, ``kept`` the states of earlier dialogues."""
        self._kept = kept
        self._places = [Place(model) for model in models]
        self._model, self._tell, self._common = models[0], tell, common
        self._left: dict[int, bool] = {}  # for each job: True if nobody waits for it any more
        self._waiting, self._turn = list[Task](), 0
        self._changed, self._closing = threading.Condition(), False
        self._compiling = ThreadPoolExecutor(1, "grammars")
        for model in models[1:]:  # all models share one tokenizer and one set of compiled grammars
            model.__dict__["text"] = models[0].text

    def take(self, number: int, request: Request | None) -> None:
        """Queue a job, or cancel it, which ends it within a round or a chunk of its prompt. Any thread may call
        this."""
        with self._changed:
            if request is not None or number in self._left:
                self._left[number] = request is None
        if request is None:
            return
        if "structured_outputs" in request.options:
            self._compiling.submit(self._queue, number, request)
        else:
            self._queue(number, request)

    def _queue(self, number: int, request: Request) -> None:
        try:
            options = Options.of(**(self._common | request.options))
            task = Task(number, request, self._stream(self._model, request, options))
        except Exception as error:  # an error ends only its own request
            self._over(number, Ended(None, _told(error)))
            return
        with self._changed:  # the jobs of one group have a turn each, so that others come between them
            turns = [each.turn + 1 for each in self._waiting if each.request.group == request.group]
            task.turn = max(turns, default=self._turn)
            self._waiting.append(task)
            self._changed.notify()

    def _stream(self, model: Model, request: Request, options: Options) -> Stream:
        if (constraint := self._model.constraint(options)) is not None:
            constraint = replace(constraint, seconds=GRAMMAR_SECONDS)
        return Stream(model, request.tokens, options, constraint)

    def _over(self, number: int, event: Ended) -> None:
        with self._changed:
            del self._left[number]
        self._tell(number, event)

    def close(self) -> None:
        """End ``run`` within a round."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def run(self) -> None:
        """Generate until ``close``."""
        try:
            while True:
                with self._changed:
                    while not (self._waiting or self._closing or any(place.task for place in self._places)):
                        self._changed.wait()
                    if self._closing:
                        return
                    self._assign()
                for place in self._places:
                    if place.task is not None:
                        self._round(place, place.task)
        finally:
            self._compiling.shutdown(wait=False, cancel_futures=True)
            for place in self._places:
                if place.task is not None:
                    self._end(place, place.task, None)
            if self._kept is not None:
                self._kept.close([place.model for place in self._places])

    def _assign(self) -> None:
        """Assign free models to the waiting jobs, by turn, then in order. A job gets the free model whose caches hold
        most of its prompt, and of equal ones the model that has been idle longest."""
        while self._waiting and (free := [place for place in self._places if place.task is None]):
            task = min(self._waiting, key=lambda each: each.turn)
            self._waiting.remove(task)
            self._turn = task.turn
            if self._left[task.number]:
                self._over(task.number, Ended(None))
                continue
            tokens = task.request.tokens
            place = max(free, key=lambda each: (common_prefix(tokens, each.model.cached.tokens), -each.used))
            self._begin(place, task)

    def _begin(self, place: Place, task: Task) -> None:
        """Give a job the caches of a model. The beginning of its prompt that they hold is not computed again."""
        place.task, place.used = task, time.perf_counter()
        if place.model is not self._model:
            task.stream = self._stream(place.model, task.request, task.stream.result.options)
        if task.request.echo.logprobs is not None:
            place.scores = prompt_logprobs(place.model, task.request.tokens, task.request.echo.logprobs)
        self._tell(task.number, Started())

    def _round(self, place: Place, task: Task) -> None:
        """Compute one window of a job's prompt, generate one piece of its text, or end the job."""
        try:
            if self._left[task.number]:
                self._end(place, task, None)
                return
            if self._kept is not None and place.prepared is not task:
                place.prepared = task
                prompt = task.request.tokens if place.scores is None else []  # log-probabilities are computed anew
                drafts = (self._common | task.request.options).get("chain_len") != 0
                self._kept.prepare(place.model, prompt, drafts)
            if place.scores is not None:
                if (fresh := next(place.scores, None)) is None:
                    place.scores = None
                else:
                    self._tell(task.number, Echoed(fresh))
                return
            piece = None if task.request.echo.alone else task.stream.advance()
            if piece is None:
                self._end(place, task, None)
            elif piece.token_ids or piece.text:  # neither after a chunk of the prompt
                asked = task.request.options.get("logprobs") is not None
                known = (task.stream.result.logprobs if asked else None) or []
                logprobs = known[len(known) - len(piece.token_ids) :]
                told = Delta(piece.text, piece.token_ids, logprobs, piece.proposed, piece.accepted)
                self._tell(task.number, told)
        except Exception as error:  # an error ends only its own request
            self._end(place, task, error)

    def _end(self, place: Place, task: Task, error: Exception | None) -> None:
        if place.scores is not None:
            place.scores.close()
        task.stream.close()
        place.task = place.scores = None
        result = task.stream.result
        outcome = Outcome(result.token_ids, result.finish_reason, result.stats)
        if task.request.echo.alone and not self._left[task.number] and error is None:
            outcome = Outcome([], LENGTH, GenerationStats(prompt_tokens=len(task.request.tokens)))
        self._over(task.number, Ended(outcome, None if error is None else _told(error)))


def _told(error: Exception) -> tuple[str, str]:
    kind = GRAMMAR if isinstance(error, GrammarFailed) else FAILED
    if isinstance(error, ValueError | FileNotFoundError):
        kind = REFUSED
    return kind, " ".join(str(error).split()) or type(error).__name__


def prompt_logprobs(model: Model, prompt: Sequence[int], count: int) -> Generator[list[TokenLogprobs], None, None]:
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
