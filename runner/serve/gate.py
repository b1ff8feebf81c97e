"""The checks that every request passes: the key, the limit on its body; and the line that is logged of it."""

import hmac
import time
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eagle3.runner.serve.errors import APIError, Refused, as_response
from eagle3.runner.serve.page import FILES
from eagle3.runner.statistics import GenerationStats

MOST_BODY = 16 << 20
MOST_DISCARDED = 1 << 28
"""The bytes of a too large body that are read and thrown away, so that its sender gets to read the response."""

QUIET = frozenset(("/health", "/metrics"))
"""Places that are asked again and again: no line is logged of them."""
OPEN = QUIET | FILES.keys()
"""Places that need no key; every other does, whether there is such a place or not."""


def route(scope: Scope) -> str:
    """Return the path without what a proxy mounts the application at."""
    return scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))


class Gate:
    def __init__(self, app: ASGIApp, key: str | None, log: Callable[[str], None]):
        self._app, self._key, self._log = app, key, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), 499  # as nginx says of a client that hung up

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._pass(scope, receive, sent)
        finally:
            if route(scope) not in QUIET:
                self._log(line(scope, status, time.perf_counter() - start))

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            if self._key is not None and route(scope) not in OPEN:
                self._check_key(headers.get("authorization", ""))
            size = headers.get("content-length", "")
            if size.isdigit() and int(size) > MOST_BODY:
                await _discard(receive)
                raise _too_large()
        except APIError as error:
            await as_response(error)(scope, receive, send)
            return
        await self._app(scope, _limited(receive), send)

    def _check_key(self, given: str) -> None:
        """Raises ``Refused`` for another key; in a time that does not depend on it."""
        if not hmac.compare_digest(given.encode(), f"Bearer {self._key}".encode()):
            raise Refused("the API key is missing or wrong", code="invalid_api_key", status=401)


def _too_large() -> APIError:
    return Refused(f"the body has more than {MOST_BODY >> 20} MiB, which is the most that is read", status=413)


async def _discard(receive: Receive) -> None:
    read = 0
    while read < MOST_DISCARDED:
        message = await receive()
        read += len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body"):
            return


def _limited(receive: Receive) -> Receive:
    """Limit the size of a body that does not tell it beforehand."""
    read = 0

    async def counted() -> Message:
        nonlocal read
        message = await receive()
        read += len(message.get("body", b""))
        if read > MOST_BODY:
            raise _too_large()
        return message

    return counted


def line(scope: Scope, status: int, seconds: float) -> str:
    """Return the line to log, which has nothing of the request's text, nor of the answer's."""
    told = [f"{scope['method']} {scope['path']} {status} {seconds:.3f} s"]
    results = [job.result for job in scope.get("jobs", ()) if job.result is not None]
    if results:
        stats = GenerationStats()
        for result in results:
            stats.add(result.stats)
        told.append(f"prompt {stats.prompt_tokens} (cached {stats.reused_prompt_tokens})")
        told.append(f"generated {stats.generation_tokens}")
        if stats.num_drafts:
            told.append(f"acceptance length {stats.mean_acceptance_length:.2f}")
        told.append("/".join(result.finish_reason for result in results))
        times: Any = scope["jobs"][0].times
        if times.first_token:
            told.append(f"first token {times.first_token - times.submitted:.3f} s")
    return ", ".join(told)
