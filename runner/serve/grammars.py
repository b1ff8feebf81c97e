"""Tries the grammars of requests before a job is sent: each once, in a process of its own with limits of time and
memory. The model's process compiles only grammars that were accepted."""

import asyncio
import hashlib
import json
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from eagle3.runner.contract import Metadata
from eagle3.runner.sampling.constraint import Grammars
from eagle3.runner.serve import grammar_trial
from eagle3.runner.serve.errors import Busy

AT_ONCE, MOST_WAITING = 2, 8
"""The number of grammars that are tried at a time, and of those that may wait."""
REMEMBERED = 4096
"""The number of grammars whose trials are remembered, by the hash of their text."""


class GrammarRefused(ValueError):
    """Raised for a grammar that is invalid or beyond a limit."""


class GrammarTrials:
    """Tries grammars for one tokenizer, on any number of event loops."""

    def __init__(self, tokenizer_file: Path, metadata: Metadata):
        self._command = [sys.executable, "-I", grammar_trial.__file__, str(tokenizer_file)]
        self._command += [str(metadata.vocab_size), json.dumps(list(metadata.eos_ids))]
        self._threads = ThreadPoolExecutor(AT_ONCE, "grammars")
        self._under_way: dict[bytes, Future[str]] = {}
        self._known: OrderedDict[bytes, str] = OrderedDict()  # why a grammar is refused; "" if it is accepted
        self._lock, self._own = threading.Lock(), threading.local()
        self._processes: list[subprocess.Popen] = []

    async def check(self, asked: Mapping[str, Any]) -> None:
        """Raise GrammarRefused for a grammar that is refused, and ``Busy`` if too many grammars wait."""
        key = hashlib.sha256(json.dumps(asked, default=dict).encode()).digest()
        with self._lock:
            reason, future = self._known.get(key), self._under_way.get(key)
            if reason is not None:
                self._known.move_to_end(key)
            elif future is None:
                if len(self._under_way) >= AT_ONCE + MOST_WAITING:
                    raise Busy(len(self._under_way) - AT_ONCE, MOST_WAITING / AT_ONCE * grammar_trial.SECONDS)
                future = self._under_way[key] = self._threads.submit(self._judged, key, asked)
        if reason is None:
            assert future is not None
            reason = await asyncio.shield(asyncio.wrap_future(future))
        if reason:
            raise GrammarRefused(reason)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()
            process.wait()

    def _judged(self, key: bytes, asked: Mapping[str, Any]) -> str:
        try:
            try:
                reason = self._tried(Grammars.source(asked))
                if reason == grammar_trial.BUSY:
                    raise Busy(len(self._under_way), grammar_trial.WALL_SECONDS)
                reason = Grammars.refusal(asked, reason) if reason else ""
            except ValueError as error:
                reason = str(error)
            with self._lock:
                self._known[key] = reason
                while len(self._known) > REMEMBERED:
                    self._known.popitem(last=False)
            return reason
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
            process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
            self._own.process = process
            self._processes.append(process)
        return process
