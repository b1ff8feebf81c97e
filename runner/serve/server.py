"""Runs the front until SIGTERM or SIGINT: uvicorn's server with limits of connections, a time limit for headers, and a
shutdown that tells clients of running requests."""

import asyncio
import gc
import resource
import signal
import socket
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from eagle3.runner.contract import MODEL_FILE
from eagle3.runner.serve.app import build_app
from eagle3.runner.serve.errors import Refused
from eagle3.runner.serve.process import ModelProcess
from eagle3.runner.serve.requests import Asked, ChatBody, CompletionBody, ResponseBody, parse
from eagle3.runner.serve.service import make_service
from eagle3.runner.system.command import tell

HEADER_SECONDS = 20.0
"""The seconds for the headers of a request, from the connection or the previous response."""
MOST_HEADERS = 1 << 16
"""The bytes of the headers of a request, beyond which the connection closes."""
READ_BYTES = 1 << 14
"""The bytes that are read from a connection at a time: asyncio's 256 kB, from hundreds of connections in turn, keep the
event loop from answers for tenths of a second."""
UNREAD_MILLISECONDS = 60_000
"""The time after which a connection closes whose client reads nothing that was sent."""
MOST_CONNECTIONS, SPARE_DESCRIPTORS = 4096, 64
TELLING_SECONDS = 5
"""The seconds after the grace period in which the clients of running requests are told that the server ends."""
QUIET_SECONDS = 60.0
"""The seconds between two lines on failures of the event loop, such as too many open files."""


class Protocol(HttpToolsProtocol):
    """Closes a connection whose headers take longer than HEADER_SECONDS, or have more than MOST_HEADERS bytes. If there
    are more connections than uvicorn's ``limit_concurrency``, the one that has waited longest for headers closes."""

    _patience: asyncio.TimerHandle | None = None
    _headers = 0
    """The bytes since the beginning of the headers."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        if hasattr(socket, "TCP_USER_TIMEOUT") and transport.get_extra_info("socket").family != socket.AF_UNIX:
            transport.get_extra_info("socket").setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MILLISECONDS
            )
        self._wait()
        if len(self.connections) >= (self.limit_concurrency or MOST_CONNECTIONS):
            idle = [each for each in self.connections if isinstance(each, Protocol) and each._patience is not None]
            min(idle, key=lambda each: each._patience.when() if each._patience else 0.0)._end()

    def data_received(self, data: bytes) -> None:
        if self._patience is not None:
            self._headers += len(data)
        super().data_received(data)
        if self._patience is not None and self._headers > MOST_HEADERS:
            self._end()

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.pipeline:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._stop_waiting()
        self._headers = 0
        self._patience = self.loop.call_later(HEADER_SECONDS, self._end)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _end(self) -> None:
        self._stop_waiting()
        if not self.transport.is_closing():
            self.transport.close()


class Server(uvicorn.Server):
    """uvicorn's server with a grace period. ``end`` is called on a thread if requests still run ``grace`` seconds after
    the server was told to end."""

    def __init__(self, config: uvicorn.Config, grace: float, end: Callable[[], None]):
        super().__init__(config)
        self._grace, self._end = grace, end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(Failures())
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_later())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_later(self) -> None:
        await asyncio.sleep(self._grace)
        await asyncio.to_thread(self._end)


class Failures:
    """Reports failures of the event loop in a line without values, and the same one only once in QUIET_SECONDS."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}

    def __call__(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error, now = context.get("exception"), time.monotonic()
        said = f"{context.get('message')}: {error.strerror if isinstance(error, OSError) else type(error).__name__}"
        if now - self._told.get(said, -QUIET_SECONDS) >= QUIET_SECONDS:
            self._told[said] = now
            tell(said)


def serve(
    process: ModelProcess,
    artifact: Path,
    listening: socket.socket,
    model_id: str | None,
    key: str | None,
    parallel: int,
    max_queue: int,
    grace: int,
    defaults: dict[str, Any],
    tool_parser: str,
    hosts: Collection[str] = ("localhost",),
    origins: Collection[str] = (),
) -> None:
    """Serve until SIGTERM or SIGINT; running requests then have ``grace`` seconds. Raises ValueError for invalid
    defaults, and the errors of ``ModelProcess.metadata`` and ``make_service``."""
    check_defaults(defaults)
    metadata = process.metadata()
    folder = artifact.parent if artifact.name == MODEL_FILE else artifact
    service = make_service(metadata, folder, process.send, model_id, parallel, max_queue, defaults, tool_parser)
    process.run(service.jobs.hear, service.jobs.lost, service.jobs.found)
    host, port = listening.getsockname()[:2]
    tell(f"{service.model_id} at http://{f'[{host}]' if ':' in host else host}:{port}/v1")
    server = server_of(build_app(service, key, tell, hosts, origins), grace, service.jobs.close)
    gc.collect()
    gc.freeze()  # what the libraries made is not searched for garbage again
    handled = {each: signal.signal(each, _ignore) for each in (signal.SIGTERM, signal.SIGINT)}
    try:  # uvicorn has its own handlers while it runs, and raises the signal again at its end
        asyncio.run(server.serve([listening]))
    finally:
        for each, handler in handled.items():
            signal.signal(each, handler)


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


def server_of(app: ASGIApp, grace: float, end: Callable[[], None]) -> Server:
    """Return a server of ``app``. ``end`` is called if requests still run ``grace`` seconds after the signal to end; if
    even then a thread does not end, the process does."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    config = uvicorn.Config(
        app, http=Protocol, log_config=None, access_log=False, server_header=False, proxy_headers=False, ws="none",
        limit_concurrency=min(MOST_CONNECTIONS, hard - SPARE_DESCRIPTORS), timeout_keep_alive=int(HEADER_SECONDS),
        timeout_graceful_shutdown=int(grace) + TELLING_SECONDS, lifespan="on",
    )  # fmt: skip
    return Server(config, grace, end)


def _ignore(*_: object) -> None:
    pass
