"""The model's process: its main program, and the front's hold on it, which starts it again when it has ended."""

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eagle3.runner import load
from eagle3.runner.contract import Metadata
from eagle3.runner.serve.protocol import Event, Request
from eagle3.runner.system.command import calm_libraries, one_line, tell
from eagle3.runner.system.machine import leave_threads_to_xnnpack

if TYPE_CHECKING:
    from eagle3.runner.serve.engine import Engine

RESTART_SECONDS = (0.5, 30.0)
"""The seconds before the first start after the process has ended, and the most before a later one; they double."""
END_SECONDS, WRITE_SECONDS = 10.0, 60.0
"""The seconds in which the process ends after its connection was closed, without and with sessions to write."""


@dataclass(frozen=True)
class Settings:
    """The artifact to load. ``common``: options of every generation; ``loading``: arguments of ``load``."""

    artifact: Path
    parallel: int = 1
    common: dict[str, Any] = field(default_factory=dict)
    loading: dict[str, Any] = field(default_factory=dict)
    verbose: bool = False
    sessions: Path | None = None
    sessions_size: int = 0
    """The arguments of ``KeptDialogues``; 0 bytes keep nothing."""


class ModelProcess:
    """A running model's process. Its socket closes if the front ends, and it then ends itself."""

    def __init__(self, settings: Settings):
        self._settings, self._closing, self._loaded = settings, threading.Event(), False
        self._sending = threading.Lock()
        self._start()

    def metadata(self) -> Metadata:
        """Wait until the artifact is loaded, and return its metadata without tensors. Raises the errors of ``load``,
        RuntimeError if the process ends first."""
        try:
            answer = self._connection.recv()
        except (EOFError, OSError):
            code = self._process.wait()
            raise RuntimeError(f"the model's process ended with {code} while it loaded the artifact") from None
        if isinstance(answer, Exception):
            raise answer
        self._loaded = True
        return answer

    def run(self, hear: Callable[[int, Event], None], lost: Callable[[str], None], found: Callable[[], None]) -> None:
        """Hear what the process says, on a thread. ``lost`` is called when the process has ended, with a line for
        clients, and ``found`` when it has loaded the artifact again."""
        threading.Thread(target=self._hear, args=(hear, lost, found), name="events", daemon=True).start()

    def send(self, number: int, request: Request | None) -> None:
        """Raises OSError if the process has ended."""
        with self._sending:
            self._connection.send((number, request))

    def close(self) -> None:
        """End the process, at once if it is still loading."""
        self._closing.set()
        self._hang_up()
        if not self._loaded:
            self._process.kill()
        try:
            self._process.wait(END_SECONDS if self._settings.sessions is None else WRITE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "eagle3.runner.serve.process", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        self._connection = Connection(ours.detach())
        with suppress(OSError):  # ``metadata`` reports a process that has ended
            self._connection.send(self._settings)

    def _hang_up(self) -> None:
        with self._sending, suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)  # a thread that reads the connection sees its end

    def _hear(self, hear: Callable[[int, Event], None], lost: Callable[[str], None], found: Callable[[], None]) -> None:
        seconds, most = RESTART_SECONDS
        while True:
            with suppress(EOFError, OSError):
                while True:
                    number, event = self._connection.recv()
                    hear(number, event)
                    seconds = RESTART_SECONDS[0]
            if self._closing.is_set():
                return
            lost("the model's process has ended and is being started again: try again")
            self._process.wait()
            tell(f"the model's process ended with {self._process.returncode}: it is started again")
            while not self._closing.wait(seconds):
                seconds = min(2 * seconds, most)
                self._connection.close()
                self._start()
                try:
                    self.metadata()
                except Exception as error:
                    tell(f"the model's process does not start: {one_line(error)}")
                    continue
                found()
                break


def main() -> None:
    """Load the artifact, and generate until the connection closes."""
    for each in (signal.SIGINT, signal.SIGTERM):  # a terminal sends them to the front too, which closes the connection
        signal.signal(each, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    settings: Settings = connection.recv()
    leave_threads_to_xnnpack()

    from eagle3.runner.kept import KeptDialogues
    from eagle3.runner.loop.generation import check_request
    from eagle3.runner.serve.engine import Engine

    command = click.Context(click.Command("eagle3-serve"))
    command.meta["verbose"] = settings.verbose
    with ExitStack() as stack:
        stack.enter_context(command)
        stack.enter_context(calm_libraries())
        engines: list[Engine] = []
        threading.Thread(target=_read, args=(connection, engines), daemon=True).start()
        try:
            loads = (load(settings.artifact, **settings.loading) for _ in range(settings.parallel))
            models = [stack.enter_context(model) for model in loads]
            chain_len = settings.common.get("chain_len")
            check_request(models[0].metadata, [0], 1, chain_len if isinstance(chain_len, int) else None)
            kept = None
            if settings.sessions_size and (settings.sessions is not None or models[0].metadata.state_groups):
                kept = KeptDialogues(settings.sessions_size, tell, settings.sessions)
                kept.open(models[0])
        except Exception as error:
            if settings.verbose:
                traceback.print_exc()
            connection.send(ValueError(one_line(error)))
            return

        sending = threading.Lock()

        def send(number: int, event: Event) -> None:
            with sending, suppress(OSError):  # the front has ended
                connection.send((number, event))

        engines.append(Engine(models, send, settings.common, kept))
        gc.collect()
        gc.freeze()  # what the libraries made is not searched for garbage again
        connection.send(replace(models[0].metadata, draft_ids=None))
        engines[0].run()


def _read(connection: Connection, engines: "list[Engine]") -> None:
    """Pass requests on until the connection closes. The engine is there before the first request."""
    with suppress(EOFError, OSError):
        while True:
            message = connection.recv()
            engines[0].take(*message)
    if not engines:  # still loading
        os._exit(1)
    engines[0].close()


if __name__ == "__main__":
    main()
