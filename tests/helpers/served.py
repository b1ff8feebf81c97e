"""Runs a server for a loaded model in this process, with uvicorn on the loopback, in a thread."""

import asyncio
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import uvicorn

from eagle3.runner.model import Model
from eagle3.runner.serve.answer import Answer
from eagle3.runner.serve.app import build_app
from eagle3.runner.serve.dialogue import Dialogue
from eagle3.runner.serve.engine import Engine
from eagle3.runner.serve.jobs import Job, Times
from eagle3.runner.serve.protocol import Delta, Outcome, Request
from eagle3.runner.serve.server import server_of
from eagle3.runner.serve.service import Service, make_service
from eagle3.runner.text.text import Text
from eagle3.targets import TARGETS

JSON = {"Content-Type": "application/json"}
LONG = {"prompt": "def main(", "max_tokens": 900, "ignore_eos": True}
ASKED = [{"role": "user", "content": "Open a file and read its lines."}]


class Served:
    def __init__(self, model: Model, service: Service, server: uvicorn.Server, url: str, lines: list[str]):
        self.model, self.service, self.jobs, self.url, self.lines = model, service, service.jobs, url, lines
        self.port, self._server, self._before = httpx.URL(url).port, server, dict[str, float]()

    def stop(self) -> None:
        """Stop the server as SIGTERM would."""
        self._server.should_exit = True

    def post(self, path: str, given: dict, **more) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=given, timeout=60, **more)

    def renew(self) -> None:
        """Forget what the model has cached, the lines of the log and the counts so far."""
        until(lambda: not self.jobs.running and not self.jobs.waiting)
        self.model.forget()
        self.lines.clear()
        self._before = self._metrics()

    def _metrics(self) -> dict[str, float]:
        lines = httpx.get(self.url.removesuffix("/v1") + "/metrics").text.splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    def metric(self, name: str) -> float:
        """Return the sum of the metrics whose names begin so, counted from the last ``renew``."""
        now = self._metrics()
        return sum(value - self._before.get(each, 0.0) for each, value in now.items() if each.startswith(name))


def until(condition, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition was not met in time"
        time.sleep(0.005)


def begun(server: Served, given: dict) -> tuple[httpx.Client, Iterator[str]]:
    """Return a client and a streamed completion whose first chunk has arrived."""
    client = httpx.Client(timeout=60)
    request = client.build_request("POST", f"{server.url}/completions", json=given | {"stream": True})
    lines = client.send(request, stream=True).iter_lines()  # the connection closes once nothing refers to these
    next(lines)
    return client, lines


def dialogue_in(template: str, session, folder) -> Dialogue:
    """Return a dialogue with another chat template and the shipped tokenizer, whose files are copied into an empty
    ``folder``."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGETS["gemma4-tiny"].checkpoint / name, folder / name)
    (folder / "chat_template.jinja").write_text(template)
    return Dialogue(Text(folder), session.metadata, folder)


def read(dialogue: Dialogue, turn, texts: list[str]) -> Answer:
    """Return the answer of a job whose rounds returned these texts."""

    async def whole() -> Answer:
        job = Job(Request(turn.prompt, {}), asyncio.get_running_loop(), Times(0.0))
        for text in texts:
            job.events.put_nowait(Delta(text, [5], []))
        job.outcome = Outcome([5], "length")
        job.events.put_nowait(None)
        answer = Answer(turn)
        async for _ in answer.read(job, dialogue):
            pass
        return answer

    return asyncio.run(whole())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@contextmanager
def serviced(models: list[Model], folder, max_queue: int = 64, kept=None, **defaults):
    """Yield a service whose engine runs on a thread of this process. Requests are greedy by default."""
    engines: list[Engine] = []
    service = make_service(
        models[0].metadata, folder, lambda *given: engines[0].take(*given), "tiny", len(models), max_queue,
        {"temperature": 0, **defaults},
    )  # fmt: skip
    engines.append(Engine(models, service.jobs.hear, {}, kept))
    thread = threading.Thread(target=engines[0].run)
    thread.start()
    try:
        yield service
    finally:
        service.jobs.close()
        engines[0].close()
        thread.join()


@contextmanager
def served(
    models: list[Model],
    folder,
    max_queue: int = 64,
    key: str | None = None,
    hosts=None,
    grace: float = 30,
    origins=(),
    **defaults,
):
    lines: list[str] = []
    listening = socket.create_server(("127.0.0.1", 0))
    with serviced(models, folder, max_queue, **defaults) as service:
        server = server_of(build_app(service, key, lines.append, hosts, origins), grace, service.jobs.close)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
        thread.start()
        try:
            yield Served(models[0], service, server, f"http://127.0.0.1:{listening.getsockname()[1]}/v1", lines)
        finally:
            server.should_exit = True
            thread.join()
