"""Passes a request as data from the process that received it to an ASGI application in another process."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Scope

from eagle3.runner.serve.gate import route


@dataclass(frozen=True)
class Sent:
    """A whole request. ``prompt`` is the text that a KV cache may hold, "" if there is none."""

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
    """Return the text of a request's messages, prompt or input, "" if it has none. The request is not checked here."""
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
    """Yield the messages that ``app`` sends. If the caller stops early, ``app`` sees a client that disconnects."""
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
