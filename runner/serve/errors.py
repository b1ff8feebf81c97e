"""Errors in OpenAI's shape, ``{"error": {"message", "type", "param", "code"}}``, with the status that clients expect.

The classes are those of ExecuTorch's server; here are those that it has none for.
"""

import math

from executorch.examples.llm_server.python.errors import APIError, ContextLengthExceeded, GenerationError, ModelNotFound
from starlette.requests import Request
from starlette.responses import JSONResponse

__all__ = ["APIError", "Busy", "ContextLengthExceeded", "GenerationError", "ModelNotFound", "Refused", "Unavailable"]

INVALID = "invalid_request_error"
LONGEST = 1000
"""Characters of a message: a library's may have all of what it was given in it."""


class Refused(APIError):
    """A request that cannot be answered: 400 unless said. ``param``: the field that it is about."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(status, line(message), INVALID, code)
        self.param = param


class Busy(APIError):
    """The queue is full: 429, with the seconds after which a place may be free."""

    def __init__(self, waiting: int, seconds: float):
        super().__init__(
            429, f"{waiting} requests are waiting already: try again", "rate_limit_error", "queue_full",
        )  # fmt: skip
        self.seconds = max(1, math.ceil(seconds))


class Unavailable(APIError):
    """Nothing is generated any more: 503."""

    def __init__(self) -> None:
        super().__init__(503, "the server is shutting down", "server_error")


def line(message: object) -> str:
    """Return a message as one line, cut where it is long."""
    text = " ".join(str(message).split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def body(error: APIError) -> dict:
    return {"error": error.body()["error"] | {"param": getattr(error, "param", None)}}


def as_response(error: APIError) -> JSONResponse:
    headers = {}
    if isinstance(error, Busy):
        headers["Retry-After"] = str(error.seconds)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(body(error), error.status, headers)


async def on_api_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, APIError)
    return as_response(error)
