"""Compiles the grammars of requests: each once, on threads of its own, within limits of time and memory.

The thread that generates receives the compiled grammars and takes no lock for them.
"""

import asyncio
import json
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from eagle3.runner.model import Model
from eagle3.runner.sampling.constraint import Constraint
from eagle3.runner.serve import grammar_trial
from eagle3.runner.serve.errors import Busy
from eagle3.runner.text.text import TOKENIZER_FILE

AT_ONCE, MOST_WAITING = 2, 8
"""The number of grammars that are compiled at a time, and of those that may wait."""
REMEMBERED = 1024
"""The number of refusals that are remembered."""


class GrammarRefused(ValueError):
    """Raised for a grammar that is invalid or beyond a limit."""


class GrammarCompiler:
    """Compiles the grammars of one model, for any number of event loops."""

    def __init__(self, model: Model):
        self._model, self._threads = model, ThreadPoolExecutor(AT_ONCE, "grammars")
        self._under_way: dict[str, Future[Constraint]] = {}
        self._refused: OrderedDict[str, str] = OrderedDict()
        self._lock, self._own = threading.Lock(), threading.local()
        self._processes: list[subprocess.Popen] = []

    async def compile(self, asked: Mapping[str, Any]) -> Constraint:
        """Return the compiled grammar. Raises GrammarRefused, and ``Busy`` if too many grammars wait."""
        grammars = self._model.__dict__.get("grammars")
        try:
            if grammars is not None and (kept := grammars.kept(asked)) is not None:
                return kept
        except ValueError as error:
            raise GrammarRefused(str(error)) from None
        key = json.dumps(asked, default=dict)
        with self._lock:
            if key in self._refused:
                raise GrammarRefused(self._refused[key])
            future = self._under_way.get(key)
            if future is None:
                if len(self._under_way) >= AT_ONCE + MOST_WAITING:
                    raise Busy(len(self._under_way) - AT_ONCE, MOST_WAITING / AT_ONCE * grammar_trial.SECONDS)
                future = self._under_way[key] = self._threads.submit(self._compiled, key, asked)
        return await asyncio.shield(asyncio.wrap_future(future))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()
            process.wait()

    def _compiled(self, key: str, asked: Mapping[str, Any]) -> Constraint:
        try:
            grammars = self._model.grammars
            reason = self._tried(grammars.source(asked))
            if reason == grammar_trial.BUSY:
                raise Busy(len(self._under_way), grammar_trial.WALL_SECONDS)
            if reason:
                raise GrammarRefused(grammars.refusal(asked, reason))
            return grammars.compile(asked)
        except ValueError as error:
            with self._lock:
                self._refused[key] = str(error)
                while len(self._refused) > REMEMBERED:
                    self._refused.popitem(last=False)
            raise GrammarRefused(str(error)) from None
        finally:
            with self._lock:
                del self._under_way[key]

    def _tried(self, grammar: str) -> str:
        """Compile in this thread's trial process. Returns the reason why the grammar is refused, "" if it is
        accepted."""
        process = self._process()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(grammar) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            self._own.process = None
            raise RuntimeError("the process that compiles grammars has ended")
        return json.loads(line)

    def _process(self) -> subprocess.Popen:
        process = getattr(self._own, "process", None)
        if process is None:
            metadata, file = self._model.metadata, self._model.text.folder / TOKENIZER_FILE
            command = [sys.executable, "-I", grammar_trial.__file__, str(file), str(metadata.vocab_size)]
            process = subprocess.Popen(
                [*command, json.dumps(list(metadata.eos_ids))],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            )  # fmt: skip
            self._own.process = process
            self._processes.append(process)
        return process
