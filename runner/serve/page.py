"""The page at ``/``: a dialogue with the model, which shows who wrote each token. Static files, served as they are."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import Response

FOLDER = Path(__file__).parent / "static"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".txt": "text/plain"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; frame-ancestors 'none'"
)
"""A browser that heeds it loads nothing from elsewhere, and runs nothing that a model wrote."""
HEADERS = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
FILES = {"/" if file.name == "index.html" else f"/{file.name}": file for file in sorted(FOLDER.iterdir())}
"""The files by the path that each is served at. They bear no secret, so that no key is asked for them."""


def add_page(app: FastAPI) -> None:
    for path, file in FILES.items():
        app.add_api_route(path, _sender(file), methods=["GET", "HEAD"])


def _sender(file: Path) -> Callable[[], Awaitable[Response]]:
    text = file.read_bytes()

    async def send() -> Response:
        return Response(text, media_type=f"{TYPES[file.suffix]}; charset=utf-8", headers=HEADERS)

    return send
