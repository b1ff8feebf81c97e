"""Checks every request: the host that it names, the key, the type and size of its body. Logs one line per request."""

import asyncio
import hmac
import ipaddress
import re
import time
import traceback
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eagle3.runner.loop.statistics import GenerationStats
from eagle3.runner.serve.errors import APIError, Refused, Unavailable, as_response
from eagle3.runner.serve.limits import MOST_BODY
from eagle3.runner.serve.page import FILES
from eagle3.runner.text.checks import shown

MOST_PATH = 200
"""The most characters of a path that are logged."""
MOST_DISCARDED, DISCARD_SECONDS = 1 << 28, 5.0
"""The bytes of a body, and the seconds, that are read and discarded after a refusal, so that the client reads the
response. The connection then closes."""

MOST_FRAMES = 12
NAME = re.compile(r"[\w.:/+-]{1,128}", re.ASCII)
"""The values of the header X-Request-Id that are sent back; another one is replaced."""

QUIET = frozenset(("/health", "/metrics", "/ping", "/version"))
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
        headers, body = Headers(scope=scope), Body(receive)
        name = headers.get("x-request-id", "")
        own = [(b"x-request-id", (name if NAME.fullmatch(name) else f"req_{uuid.uuid4().hex}").encode())]

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if status == 408 or not await body.discarded(headers):
                    own.append((b"connection", b"close"))
                message["headers"] = [*message.get("headers", ()), *own]
            await send(message)

        failed: BaseException | None = None
        try:
            await self._pass(scope, headers, body.receive, sent)
        except (Exception, asyncio.CancelledError) as error:  # cancelled: uvicorn waits no longer
            failed, answer = error, as_response(failure(error), scope)
            if status == 499:
                await answer(scope, receive, sent)
            else:
                status = answer.status_code  # as it is logged; the response has another
        finally:
            if route(scope) not in QUIET:
                self._log(line(scope, status, time.perf_counter() - start))
            failed = failed or scope.get("failed")
            if failed is not None and not isinstance(failed, asyncio.CancelledError):
                self._log(places(failed))

    async def _pass(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        try:
            if self._hosts is not None:
                self._check_host(headers.get("host", ""))
            if self._key is not None and route(scope) not in OPEN:
                self._check_key(headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}")
            size = headers.get("content-length", "")
            if size.isdigit() and (len(size) > 19 or int(size) > MOST_BODY):
                raise _too_large()
        except APIError as error:
            await as_response(error, scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)

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


class Body:
    """The body of a request as it arrives."""

    def __init__(self, receive: Receive):
        self._receive, self._read, self._over = receive, 0, False

    async def receive(self) -> Message:
        """Return the next part. Raises ``Refused`` if the body, which may have no Content-Length, is too large."""
        message = await self._next()
        if self._read > MOST_BODY:
            raise _too_large()
        return message

    async def discarded(self, headers: Headers) -> bool:
        """Read the rest of the body, within limits. Returns False if it did not end."""
        if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
            return True
        if "expect" in headers and not self._read:  # the client waits for a permission to send the body
            return False
        with suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_SECONDS):
                while not self._over and self._read < MOST_DISCARDED:
                    await self._next()
        return self._over

    async def _next(self) -> Message:
        message = await self._receive()
        self._read += len(message.get("body", b""))
        self._over = self._over or not message.get("more_body")
        return message


def failure(error: BaseException) -> APIError:
    """Return the error that a client is told after any exception."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return Unavailable()
    return APIError(500, f"the server failed: {type(error).__name__}", "server_error")


def places(error: BaseException) -> str:
    """Return the type of an exception and the places that it passed, as a line without values of a request."""
    frames = traceback.extract_tb(error.__traceback__)
    told = (f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in frames[-MOST_FRAMES:][::-1])
    return f"{type(error).__name__} in {', '.join(told)}"


def line(scope: Scope, status: int, seconds: float) -> str:
    """Return the line to log, which contains no text of the request or the answer."""
    path = quote(scope["path"], safe="/:@!$&'()*+,;=~")[:MOST_PATH]
    told = [f"{scope['method']} {path} {status} {seconds:.3f} s"]
    outcomes = [job.outcome for job in scope.get("jobs", ()) if job.outcome is not None]
    if outcomes:
        stats = GenerationStats()
        for outcome in outcomes:
            stats.add(outcome.stats)
        told.append(f"prompt {stats.prompt_tokens} (cached {stats.reused_prompt_tokens})")
        told.append(f"generated {stats.generation_tokens}")
        if stats.num_drafts:
            told.append(f"acceptance length {stats.mean_acceptance_length:.2f}")
        told.append("/".join(outcome.finish_reason for outcome in outcomes))
        times: Any = scope["jobs"][0].times
        if times.first_token:
            told.append(f"first token {times.first_token - times.submitted:.3f} s")
    return ", ".join(told)
