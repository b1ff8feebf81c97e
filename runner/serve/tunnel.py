"""A request as data: what one process received, answered by an ASGI application in another."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Scope

from eagle3.runner.serve.gate import route


@dataclass(frozen=True)
class Sent:
    """A whole request. ``prompt``: what of its text a KV cache may hold, "" where it has none."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    prompt: str

    @classmethod
    def of(cls, scope: Scope, body: bytes) -> "Sent":
        return cls(
            scope["method"], route(scope), scope["query_string"], list(scope["headers"]), body, prompt_text(body)
        )

    @property
    def scope(self) -> Scope:
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query,
            "root_path": "",
            "headers": self.headers,
            "client": None,
            "server": None,
        }


def prompt_text(body: bytes) -> str:
    """Return the text of a request's messages, prompt or input, as far as it has some. Whether it is a request at all,
    who answers it will say."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(given, dict):
        return ""
    return _text([given.get("instructions"), given.get("messages"), given.get("prompt"), given.get("input")])


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return _text(value.get("content") or value.get("text"))
    return "".join(map(_text, value)) if isinstance(value, list) else ""


async def answered(app: ASGIApp, sent: Sent) -> AsyncGenerator[Message, None]:
    """Yield what ``app`` sends, as it comes. A caller that leaves early is to ``app`` a client that hangs up."""
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    gone, received = asyncio.Event(), False

    async def receive() -> Message:
        nonlocal received
        if not received:
            received = True
            return {"type": "http.request", "body": sent.body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(sent.scope, receive, messages.put)
        finally:
            messages.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        while (message := await messages.get()) is not None:
            yield message
    finally:
        gone.set()
        with suppress(asyncio.CancelledError, Exception):
            await task
