"""A server over a loaded model in this process: uvicorn on the loopback, in a thread."""

import asyncio
import socket
import threading
from contextlib import contextmanager

import httpx
import uvicorn

from eagle3.runner.model import Model
from eagle3.runner.serve.app import build_app
from eagle3.runner.serve.dialogue import Dialogue
from eagle3.runner.serve.engine import Engine
from eagle3.runner.serve.metrics import Metrics
from eagle3.runner.serve.service import Service


class Served:
    def __init__(self, service: Service, url: str, lines: list[str]):
        self.service, self.engine, self.url, self.lines = service, service.engine, url, lines

    def post(self, path: str, given: dict, **more) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=given, timeout=60, **more)

    def metric(self, name: str) -> float:
        text = httpx.get(self.url.removesuffix("/v1") + "/metrics").text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


@contextmanager
def served(models: list[Model], folder, max_queue: int = 64, key: str | None = None, **defaults):
    """Requests are greedy unless they say otherwise."""
    metrics, lines = Metrics("tiny"), []
    engine = Engine(models, max_queue, metrics.add, {})
    metrics.watch(lambda: engine.running, lambda: engine.waiting)
    service = Service(engine, Dialogue(models[0], folder), "tiny", metrics, {"temperature": 0, **defaults})
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(build_app(service, key, lines.append), log_config=None, lifespan="on")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
    thread.start()
    try:
        yield Served(service, f"http://127.0.0.1:{listening.getsockname()[1]}/v1", lines)
    finally:
        server.should_exit = True
        thread.join()
