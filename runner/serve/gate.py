"""Checks every request: the host that it names, the key, the type and size of its body. Logs one line per request."""

import hmac
import ipaddress
import time
from collections.abc import Callable, Collection
from typing import Any
from urllib.parse import quote, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eagle3.runner.loop.statistics import GenerationStats
from eagle3.runner.serve.errors import APIError, Refused, as_response
from eagle3.runner.serve.limits import MOST_BODY
from eagle3.runner.serve.page import FILES
from eagle3.runner.text.checks import shown

MOST_PATH = 200
"""The most characters of a path that are logged."""
MOST_DISCARDED = 1 << 28
"""The bytes of a too large body that are read and discarded, so that the client reads the response."""

QUIET = frozenset(("/health", "/metrics"))
"""Paths that are polled; their requests are not logged."""
OPEN = QUIET | FILES.keys()
"""Paths that need no key; every other path needs one, even if it does not exist."""


def route(scope: Scope) -> str:
    """Return the path without the prefix at which a proxy mounts the application."""
    return scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))


class Gate:
    """Checks requests before they reach the application. ``hosts`` are the names that the header Host may have, "*" for
    any; None skips the check. IP addresses are always accepted, since a DNS rebinding attack sends a host name."""

    def __init__(self, app: ASGIApp, key: str | None, log: Callable[[str], None], hosts: Collection[str] | None = None):
        self._app, self._key, self._log = app, key, log
        self._hosts = None if hosts is None or "*" in hosts else frozenset(map(str.lower, hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), 499  # nginx's status for a client that disconnected

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
            if self._hosts is not None:
                self._check_host(headers.get("host", ""))
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
        """Raise ``Refused`` for a wrong key, in a time that does not depend on the key."""
        scheme, _, key = given.partition(" ")
        known = hmac.compare_digest(key.strip().encode(), str(self._key).encode())
        if not known or scheme.lower() != "bearer":
            raise Refused("the API key is missing or wrong", code="invalid_api_key", status=401)

    def _check_host(self, given: str) -> None:
        """Raise ``Refused`` for a host name that is not allowed. Names are compared in lower case, without the port."""
        try:
            host = urlsplit(f"//{given}").hostname or ""
            if host in (self._hosts or ()) or ipaddress.ip_address(host):
                return
        except ValueError:
            pass
        raise Refused(
            f"the host {shown(given)} is not an allowed name of this server: name it with --allowed-hosts",
            status=403,
        )


def check_type(given: str) -> None:
    """Raise ``Refused`` for a content type other than JSON, since a web page may send other types without permission
    (CORS)."""
    kind = given.partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(f"the content type is {shown(kind)}, but must be application/json", status=415)


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
    """Limit the size of a body without a Content-Length header."""
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
    """Return the line to log, which contains no text of the request or the answer."""
    path = quote(scope["path"], safe="/:@!$&'()*+,;=~")[:MOST_PATH]
    told = [f"{scope['method']} {path} {status} {seconds:.3f} s"]
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
