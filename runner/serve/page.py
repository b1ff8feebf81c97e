"""Serves the page at ``/``, a dialogue that shows whether draft or target wrote each token. Its files are static."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parent / "static"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".txt": "text/plain"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; frame-ancestors 'none'"
)
"""A content security policy by which browsers load nothing from other hosts, and run no code that a model wrote."""
HEADERS = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
FILES = {"/" if file.name == "index.html" else f"/{file.name}": file for file in sorted(FOLDER.iterdir())}
"""Maps each path to its file. The files contain no secret, so they need no key."""


def pages() -> dict[str, Callable[[Request], Awaitable[Response]]]:
    """Return the endpoint of each path."""
    return {path: _sender(file) for path, file in FILES.items()}


def _sender(file: Path) -> Callable[[Request], Awaitable[Response]]:
    text = file.read_bytes()

    async def send(_request: Request) -> Response:
        return Response(text, media_type=f"{TYPES[file.suffix]}; charset=utf-8", headers=HEADERS)

    return send
