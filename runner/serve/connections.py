"""Adds to uvicorn's server a time limit for headers, and a shutdown that tells clients of running requests."""

import asyncio
import socket
from collections.abc import Callable

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

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
