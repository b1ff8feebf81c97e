"""Errors in OpenAI's format, ``{"error": {"message", "type", "param", "code"}}``, or in Anthropic's for its paths, with
the status that clients expect.

The classes come from ExecuTorch's server; this file adds those that it lacks.
"""

import json
import math

from executorch.examples.llm_server.python.errors import APIError, ContextLengthExceeded, GenerationError, ModelNotFound
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

__all__ = ["APIError", "Busy", "ContextLengthExceeded", "GenerationError", "ModelNotFound", "Refused", "Unavailable"]

INVALID = "invalid_request_error"
MESSAGES = ("/v1/messages", "/v1/messages/count_tokens")
"""The paths of Anthropic's API."""
ANTHROPIC = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
"""Anthropic's names of errors, by status."""
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


def body(error: APIError, scope: Scope) -> dict:
    if scope["path"].endswith(MESSAGES):
        kind = ANTHROPIC.get(error.status, INVALID if error.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(error)}}
    return {"error": error.body()["error"] | {"param": getattr(error, "param", None)}}


def as_response(error: APIError, scope: Scope) -> Response:
    headers = {}
    if isinstance(error, Busy):
        headers["Retry-After"] = str(error.seconds)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    text = json.dumps(body(error, scope))  # lone surrogates are escaped
    return Response(text, error.status, headers, "application/json")


async def on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    return as_response(error, request.scope)
