"""The front's side of the model's process: the jobs of requests, their bounds, and what the process says on them.

``Jobs`` sends requests by a function and hears the events by ``hear``, whatever carries them (``process.py``,
``ray.py``). It reports each event to the event loop of the request.
"""

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from eagle3.runner.contract import Metadata
from eagle3.runner.loop.results import TokenLogprobs
from eagle3.runner.options import Options
from eagle3.runner.serve.errors import Busy, GenerationError, Refused, Unavailable, line
from eagle3.runner.serve.grammars import GrammarTrials
from eagle3.runner.serve.protocol import (
    GRAMMAR,
    REFUSED,
    Delta,
    Echo,
    Echoed,
    Ended,
    Event,
    Outcome,
    Request,
    Started,
)


@dataclass
class Times:
    """The values of ``time.perf_counter`` at a request's steps, 0 for steps that were not reached."""

    submitted: float
    started: float = 0.0
    first_token: float = 0.0
    ended: float = 0.0


@dataclass(eq=False)
class Job:
    """One requested generation. ``outcome`` is set when ``deltas`` has ended."""

    request: Request
    loop: asyncio.AbstractEventLoop
    times: Times
    number: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One entry per token of the prompt but the first, complete before the first delta; empty unless ``echo`` asks for
    them."""
    events: asyncio.Queue = field(default_factory=asyncio.Queue)
    outcome: Outcome | None = None

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Yield the delta of each round when it is computed. Raises GenerationError if the generation fails,
        ``Refused`` if the model does not accept it or its grammar fails, ``Unavailable`` if the model's process
        ends."""
        while isinstance(event := await self.events.get(), Delta):
            yield event
        if isinstance(event, Unavailable):
            raise event
        if event is not None:
            kind, text = event
            if kind in (REFUSED, GRAMMAR):
                raise Refused(text, "structured_outputs" if kind == GRAMMAR else None)
            raise GenerationError(line(text))

    def tell(self, event: Delta | Unavailable | tuple[str, str] | None) -> None:
        """Pass an event to the request's event loop; None is the end, a pair an error."""
        with suppress(RuntimeError):  # the loop is closed, so nobody waits
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)


class Jobs:
    """The jobs of one model's process. ``ended`` is called with every job that ended or was abandoned."""

    def __init__(
        self,
        metadata: Metadata,
        trials: GrammarTrials | None,
        send: Callable[[int, Request | None], None],
        ended: Callable[[Job], None],
        parallel: int = 1,
        most_waiting: int = 64,
    ):
        """``trials``: None if the artifact takes no grammars; ``send`` raises OSError if the process has ended."""
        self.metadata, self._trials, self._send, self._ended = metadata, trials, send, ended
        self._parallel, self.most = parallel, parallel + most_waiting
        self._jobs: dict[int, Job] = {}
        self._numbers, self._lock = itertools.count(), threading.Lock()
        self._seconds = 1.0  # the recent duration of a request
        self._unavailable: str | None = None

    @property
    def running(self) -> int:
        with self._lock:
            return sum(job.times.started > 0 for job in self._jobs.values())

    @property
    def waiting(self) -> int:
        with self._lock:
            return sum(not job.times.started for job in self._jobs.values())

    @property
    def alive(self) -> bool:
        return self._unavailable is None

    async def submit(
        self, tokens: list[int], each: Sequence[dict[str, Any]], echo: Echo | None = None, earlier: Sequence[Job] = ()
    ) -> list[Job]:
        """Send a generation after ``tokens`` for each of these options. ``earlier``: jobs of the same HTTP request.

        Raises ValueError if the model does not accept a request, ``Busy`` if too many jobs wait, and ``Unavailable`` if
        there is no process; nothing is then queued.
        """
        self.check_room(len(each))
        loop, now = asyncio.get_running_loop(), time.perf_counter()
        checked = Options.of(**each[0])
        checked.check(self.metadata)
        if checked.structured_outputs is not None and self._trials is not None:
            await self._trials.check(checked.structured_outputs)
        numbers = [next(self._numbers) for _ in each]
        group = earlier[0].number if earlier else numbers[0]
        requests = [Request(tokens, options, echo or Echo(), group=group) for options in each]
        jobs = [Job(request, loop, Times(now), number) for request, number in zip(requests, numbers, strict=True)]
        self.check_room(len(each))
        with self._lock:
            self._jobs |= {job.number: job for job in jobs}
        try:
            for job in jobs:
                self._send(job.number, job.request)
        except OSError:
            self.lost()
        return jobs

    def check_room(self, count: int) -> None:
        """Raise ``Refused`` if so many generations never fit into the queue, ``Busy`` if they do not fit now, and
        ``Unavailable`` if there is no process."""
        if self._unavailable is not None:
            raise Unavailable(self._unavailable)
        if count > self.most:
            raise Refused(
                f"{count} choices are asked for, but at most {self.most} can run and wait here: ask for fewer", "n"
            )
        if count > self.most - len(self._jobs):
            waiting = self.waiting
            raise Busy(waiting, self._seconds * (1 + waiting) / self._parallel)

    def leave(self, job: Job) -> None:
        """End a job that nobody waits for: at once if it waits, otherwise within a round."""
        with self._lock:
            if job.number not in self._jobs:
                return
            waits = not job.times.started
            if waits:
                del self._jobs[job.number]
        with suppress(OSError):
            self._send(job.number, None)
        if waits:
            self._ended(job)

    def hear(self, number: int, event: Event) -> None:
        """Take an event on a job. Any thread may call this."""
        job, now = self._jobs.get(number), time.perf_counter()
        if job is None:
            return
        if isinstance(event, Started):
            job.times.started = now
        elif isinstance(event, Echoed):
            job.prompt_logprobs += event.logprobs
        elif isinstance(event, Delta):
            job.times.first_token = job.times.first_token or now
            job.tell(event)
        else:
            self._end(job, event)

    def _end(self, job: Job, event: Ended) -> None:
        with self._lock:
            if self._jobs.pop(job.number, None) is None:
                return
        job.outcome, job.times.ended = event.outcome, time.perf_counter()
        self._seconds += (job.times.ended - (job.times.started or job.times.ended) - self._seconds) / 8
        try:
            self._ended(job)
        finally:
            job.tell(event.error)

    def lost(self, reason: str = "the server is shutting down") -> None:
        """Refuse all jobs, for ``reason``, until ``found``."""
        with self._lock:
            self._unavailable = self._unavailable or reason
            jobs, self._jobs = list(self._jobs.values()), {}
        for job in jobs:
            job.tell(Unavailable(reason))
            self._ended(job)

    def close(self) -> None:
        """Refuse all jobs from now on."""
        self.lost()
        if self._trials is not None:
            self._trials.close()

    def found(self) -> None:
        """Take jobs again."""
        self._unavailable = None
