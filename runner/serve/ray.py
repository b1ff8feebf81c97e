"""Runs the server on Ray Serve: one front, and replicas that have a model each.

    serve run eagle3.runner.serve.ray:app artifact=/models/out replicas=4 gpus=1

The front asks a replica for each generation, by the messages that ``eagle3-serve`` sends to the model's process. Ray
chooses the replica whose earlier prompts share the longest beginning with the request, unless other replicas have less
to do. Ray starts the replicas and distributes the requests.
"""

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from eagle3.runner.artifact.opening import open_artifact
from eagle3.runner.serve.app import build_app
from eagle3.runner.serve.cli import read_key
from eagle3.runner.serve.protocol import FAILED, Ended, Event
from eagle3.runner.serve.protocol import Request as Asked
from eagle3.runner.serve.service import make_service
from eagle3.runner.system.machine import leave_threads_to_xnnpack

PREFIX_ROUTER = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter"
"""Ray's own router class. Its public name, ``ray.serve.llm.request_router``, needs vLLM or SGLang."""
ROUTING = {"imbalanced_threshold": 1, "do_eviction": True}
"""If a replica has two requests more than another, the other one is chosen whatever the prompt, since a model answers
one at a time."""

MOST_AT_ONCE = 10_000
"""The number of requests that the front end passes on at a time. The replicas have the actual bound and answer 429
beyond it."""


class Settings(BaseModel):
    """The settings of ``app``. They have the meaning of the flags of ``eagle3-serve`` unless stated otherwise."""

    model_config = ConfigDict(extra="forbid")
    artifact: str
    """The artifact, a folder that every node has."""
    replicas: int = 1
    gpus: float = 0
    """GPUs per replica: 1 for an artifact for CUDA."""
    cpus: float = 1
    model_id: str | None = None
    api_key_file: str | None = None
    """The file with the key, on the node that answers HTTP."""
    parallel: int = 1
    max_queue: int = 64
    """Requests that may wait at each replica."""
    defaults: dict[str, Any] = {}
    tool_parser: str = "auto"
    chain_len: int | str | None = None
    ngram: bool | None = None
    router: str | None = PREFIX_ROUTER
    """A class of Ray's request routers; None is Ray's default, which ignores prompts."""


class Replica:
    """A model, which answers the messages of ``protocol.py``."""

    def __init__(self, settings: Settings):
        leave_threads_to_xnnpack()  # before torch is imported

        from eagle3.runner import load
        from eagle3.runner.serve.engine import Engine

        self._models = [load(settings.artifact) for _ in range(settings.parallel)]
        given = {"chain_len": settings.chain_len, "ngram": settings.ngram}
        common = {name: each for name, each in given.items() if each is not None}
        self._engine, self._numbers = Engine(self._models, self._tell, common), itertools.count()
        self._events: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Queue[Event]]] = {}
        self._thread = threading.Thread(target=self._engine.run, daemon=True)
        self._thread.start()

    async def generate(self, request: Asked) -> AsyncGenerator[Event, None]:
        """Yield the events of a job. It is cancelled if the caller stops early."""
        number, events = next(self._numbers), asyncio.Queue[Event]()
        self._events[number] = asyncio.get_running_loop(), events
        self._engine.take(number, request)
        try:
            while True:
                yield (event := await events.get())
                if isinstance(event, Ended):
                    return
        finally:
            self._engine.take(number, None)
            del self._events[number]

    def _tell(self, number: int, event: Event) -> None:
        if (found := self._events.get(number)) is not None:
            loop, events = found
            loop.call_soon_threadsafe(events.put_nowait, event)

    def check_health(self) -> None:
        """Raise an error if the engine has ended, so that Ray restarts the replica."""
        if not self._thread.is_alive():
            raise RuntimeError("generation has ended")

    def __del__(self) -> None:
        self._engine.close()
        self._thread.join()
        for model in self._models:
            model.close()


@serve.ingress()
class Front:
    """The application, which asks a replica for each generation."""

    def __init__(self, replicas: DeploymentHandle, settings: Settings, key: str | None):
        self._replicas, self._tasks = replicas.options(stream=True), dict[int, asyncio.Task[None]]()
        artifact = open_artifact(Path(settings.artifact))
        count = settings.replicas
        self._service = make_service(
            artifact.metadata, artifact.folder, self._send, settings.model_id, count * settings.parallel,
            count * settings.max_queue, settings.defaults, settings.tool_parser,
        )  # fmt: skip
        self._key = key

    def __serve_build_asgi_app__(self) -> ASGIApp:  # the name that Ray calls
        return build_app(self._service, self._key)

    def _send(self, number: int, request: Asked | None) -> None:
        if request is not None:
            task = asyncio.get_running_loop().create_task(self._pass_on(number, request))
            self._tasks[number] = task
            task.add_done_callback(lambda _: self._tasks.pop(number))
        elif number in self._tasks:
            self._tasks[number].cancel()

    async def _pass_on(self, number: int, request: Asked) -> None:
        """Ray's router reads the prompt from the first argument, and fails if that is empty."""
        hear, asked = self._service.jobs.hear, replace(request, prompt=self._service.text.decode(request.tokens))
        generate, end = self._replicas.generate, Ended(None)
        try:
            async for event in generate.remote(asked) if asked.prompt else generate.remote(request=asked):
                hear(number, event)
        except Exception as error:
            end = Ended(None, (FAILED, f"the replica failed: {type(error).__name__}"))
        finally:
            hear(number, end)  # no job is left if the replica ended it


def app(settings: Settings) -> Application:
    """Return the application, for ``serve run`` and ``serve.run``. Raises ValueError for a key file without a key."""
    key = None if settings.api_key_file is None else read_key(Path(settings.api_key_file))
    routing: dict[str, Any] = {} if settings.router is None else {"request_router_class": settings.router}
    if settings.router == PREFIX_ROUTER:
        routing["request_router_kwargs"] = ROUTING
    replicas = serve.deployment(Replica).options(
        name="eagle3-model",
        num_replicas=settings.replicas,
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        max_ongoing_requests=settings.parallel + settings.max_queue + 8,  # a replica's own queue is the bound
        request_router_config=RequestRouterConfig(**routing),
    )
    front = serve.deployment(Front).options(name="eagle3-front", max_ongoing_requests=MOST_AT_ONCE)
    return front.bind(replicas.bind(settings), settings, key)
