"""Errors in OpenAI's format, ``{"error": {"message", "type", "param", "code"}}``, with the status that clients expect.

The classes come from ExecuTorch's server; this file adds those that it lacks.
"""

import json
import math

from executorch.examples.llm_server.python.errors import APIError, ContextLengthExceeded, GenerationError, ModelNotFound
from starlette.requests import Request
from starlette.responses import Response

__all__ = ["APIError", "Busy", "ContextLengthExceeded", "GenerationError", "ModelNotFound", "Refused", "Unavailable"]

INVALID = "invalid_request_error"
LONGEST = 1000
"""The most characters of a message, since a library's message may contain its whole input."""


class Refused(APIError):
    """Raised for a request that cannot be answered; the default status is 400. ``param``: the field with the error."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(status, line(message), INVALID, code)
        self.param = param


class Busy(APIError):
    """Raised if the queue is full: status 429, with the seconds after which a place may be free."""

    def __init__(self, waiting: int, seconds: float):
        super().__init__(
            429, f"{waiting} requests are waiting already: try again", "rate_limit_error", "queue_full",
        )  # fmt: skip
        self.seconds = max(1, math.ceil(seconds))


class Unavailable(APIError):
    """Raised if there is no model's process: status 503."""

    def __init__(self, reason: str = "the server is shutting down"):
        super().__init__(503, reason, "server_error")


def line(message: object) -> str:
    """Return a message as one line, cut if it is long."""
    text = " ".join(str(message).split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def body(error: APIError) -> dict:
    return {"error": error.body()["error"] | {"param": getattr(error, "param", None)}}


def as_response(error: APIError) -> Response:
    headers = {}
    if isinstance(error, Busy):
        headers["Retry-After"] = str(error.seconds)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(json.dumps(body(error)), error.status, headers, "application/json")  # lone surrogates are escaped


async def on_api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    return as_response(error)
