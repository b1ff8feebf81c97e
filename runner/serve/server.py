"""Starts a server for an artifact, which runs until SIGTERM or SIGINT.

It adds to uvicorn's server a time limit for headers, and a shutdown that tells clients of running requests.
"""

import asyncio
import signal
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from eagle3.runner import load
from eagle3.runner.contract import MODEL_FILE
from eagle3.runner.kept import KeptDialogues
from eagle3.runner.loop.generation import check_request
from eagle3.runner.serve.app import build_app
from eagle3.runner.serve.dialogue import Dialogue
from eagle3.runner.serve.engine import Engine
from eagle3.runner.serve.errors import Refused
from eagle3.runner.serve.metrics import Metrics
from eagle3.runner.serve.requests import Asked, ChatBody, CompletionBody, ResponseBody, parse
from eagle3.runner.serve.service import Service
from eagle3.runner.system.command import tell

HEADER_SECONDS = 20.0
"""The seconds for the headers of a request, from the connection or the previous response."""


TELLING_SECONDS = 5
"""The seconds after the grace period in which the clients of running requests are told that the server ends."""


class Protocol(H11Protocol):
    """Closes a connection whose headers take longer than HEADER_SECONDS."""

    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._patience is not None:
            self._patience.cancel()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
        self._patience = self.loop.call_later(HEADER_SECONDS, self._end)

    def _end(self) -> None:
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.transport.close()


class Server(uvicorn.Server):
    """uvicorn's server with a grace period. ``end`` is called on a thread if requests still run ``grace`` seconds after
    the server was told to end."""

    def __init__(self, config: uvicorn.Config, grace: float, end: Callable[[], None]):
        super().__init__(config)
        self._grace, self._end = grace, end

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_later())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_later(self) -> None:
        await asyncio.sleep(self._grace)
        await asyncio.to_thread(self._end)


def serve(
    artifact: Path,
    listening: socket.socket,
    model_id: str | None,
    key: str | None,
    parallel: int,
    max_queue: int,
    grace: int,
    defaults: dict[str, Any],
    tool_parser: str,
    chain_len: int | str | None,
    ngram: bool | None = None,
    hosts: Collection[str] = ("localhost",),
    sessions: Path | None = None,
    sessions_size: int = 0,
    **loading: Any,
) -> None:
    """Load and serve until SIGTERM or SIGINT; running requests then have ``grace`` seconds. Raises the errors of
    ``opened``."""
    opening = opened(
        artifact,
        model_id,
        parallel,
        max_queue,
        defaults,
        tool_parser,
        chain_len,
        ngram,
        sessions,
        sessions_size,
        **loading,
    )
    with opening as service:
        host, port = listening.getsockname()[:2]
        tell(f"{service.model_id} at http://{f'[{host}]' if ':' in host else host}:{port}/v1")
        run(service, key, listening, grace, hosts)


@contextmanager
def opened(
    artifact: Path,
    model_id: str | None,
    parallel: int,
    max_queue: int,
    defaults: dict[str, Any],
    tool_parser: str,
    chain_len: int | str | None,
    ngram: bool | None = None,
    sessions: Path | None = None,
    sessions_size: int = 0,
    **loading: Any,
) -> Iterator[Service]:
    """Load an artifact ``parallel`` times for serving. ``sessions_size`` and ``sessions`` are those of
    ``KeptDialogues``; 0 bytes keep nothing.

    The engine must have ended before this context ends. Raises the errors of ``load``, FileNotFoundError for an
    artifact without a tokenizer, and ValueError for invalid defaults.
    """
    check_defaults(defaults)
    with ExitStack() as stack:
        models = [stack.enter_context(load(artifact, **loading)) for _ in range(parallel)]
        folder = artifact.parent if artifact.name == MODEL_FILE else artifact
        check_request(models[0].metadata, [0], 1, chain_len if isinstance(chain_len, int) else None)
        if not models[0].has_text:
            raise FileNotFoundError(f"{folder} has no tokenizer.json, which a server needs: copy or export it again")
        name = model_id or str(models[0].metadata.manifest.get("target") or folder.name)
        metrics = Metrics(name)
        given = {"chain_len": chain_len, "ngram": ngram}
        kept = None
        if sessions_size and (sessions is not None or models[0].metadata.state_groups):
            kept = KeptDialogues(sessions_size, tell, sessions)
            kept.open(models[0])
        common = {name: each for name, each in given.items() if each is not None}
        engine = Engine(models, max_queue, metrics.add, common, kept)
        metrics.watch(lambda: engine.running, lambda: engine.waiting)
        dialogue = Dialogue(models[0], folder, tool_parser)
        if dialogue.unread:
            tell(
                f"the {' and the '.join(dialogue.unread)} of this model's chat template are in a markup that this "
                "server does not read: they are answered as text, with their marks"
            )
        yield Service(engine, dialogue, name, metrics, defaults)


def check_defaults(given: dict[str, Any]) -> None:
    """Raise ValueError for a field that no request has, or an invalid value."""
    needed: dict[type[Asked], dict[str, Any]] = {
        ChatBody: {"messages": []},
        CompletionBody: {"prompt": ""},
        ResponseBody: {"input": ""},
    }
    for name, value in given.items():
        kinds = [kind for kind in needed if name in kind.model_fields and name not in needed[kind]]
        if not kinds:
            raise ValueError(f"--default {name}: no request has such a field")
        try:
            for kind in kinds:
                parse(kind, needed[kind], {name: value})
        except Refused as error:
            raise ValueError(f"--default {error}") from None


def run(
    service: Service, key: str | None, listening: socket.socket, grace: int, hosts: Collection[str] | None = None
) -> None:
    """Run uvicorn's loop to its end."""
    app = build_app(service, key, tell, hosts)
    server = server_of(app, grace, service.engine.close)
    handled = {each: signal.signal(each, _ignore) for each in (signal.SIGTERM, signal.SIGINT)}
    try:  # uvicorn has its own handlers while it runs, and raises the signal again at its end
        asyncio.run(server.serve([listening]))
    finally:
        for each, handler in handled.items():
            signal.signal(each, handler)


def server_of(app: ASGIApp, grace: int, end: Callable[[], None]) -> Server:
    """Return a server of ``app``. ``end`` is called if requests still run ``grace`` seconds after the signal to end."""
    config = uvicorn.Config(
        app, http=Protocol, log_config=None, access_log=False, server_header=False,
        timeout_graceful_shutdown=grace + TELLING_SECONDS, lifespan="on",
    )  # fmt: skip
    return Server(config, grace, end)


def _ignore(*_: object) -> None:
    pass
