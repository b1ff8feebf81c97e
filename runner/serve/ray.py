"""Runs the server on Ray Serve: replicas of the same application, each with a model of its own.

    serve run eagle3.runner.serve.ray:app artifact=/models/out replicas=4 gpus=1

A front end receives requests and asks a replica for each answer. Ray chooses the replica whose earlier prompts share
the longest beginning with the request, unless other replicas have less to do. Ray starts the replicas and distributes
the requests.
"""

from collections.abc import AsyncGenerator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eagle3.runner.serve.cli import read_key
from eagle3.runner.serve.gate import Gate
from eagle3.runner.serve.tunnel import Sent, answered
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
    """A model and the application over it."""

    def __init__(self, settings: Settings):
        leave_threads_to_xnnpack()  # before torch is imported

        from eagle3.runner.serve.app import build_app
        from eagle3.runner.serve.server import opened
        from eagle3.runner.system.command import tell

        self._stack, given = ExitStack(), settings
        opening = opened(
            Path(given.artifact), given.model_id, given.parallel, given.max_queue, given.defaults, given.tool_parser,
            given.chain_len, given.ngram,
        )  # fmt: skip
        service = self._stack.enter_context(opening)
        self._stack.callback(service.engine.close)  # closes the engine before the models
        self._engine, self._app = service.engine, build_app(service, None, tell)

    async def answer(self, sent: Sent) -> AsyncGenerator[Message, None]:
        async for message in answered(self._app, sent):
            yield message

    def check_health(self) -> None:
        """Raise an error if the engine has ended, so that Ray restarts the replica."""
        if not self._engine.alive:
            raise RuntimeError("generation has ended")

    def __del__(self) -> None:
        self._stack.close()


@serve.ingress()
class Front:
    """Receives requests that have the key, and asks a replica for each answer."""

    def __init__(self, replicas: DeploymentHandle, key: str | None):
        self._replicas, self._key = replicas.options(stream=True), key

    def __serve_build_asgi_app__(self) -> ASGIApp:  # the name that Ray calls
        return Gate(Starlette(routes=[Mount("/", app=self.pass_on)]), self._key, lambda _line: None)

    async def pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = Sent.of(scope, await Request(scope, receive).body())
        # Ray's router reads the prompt from the first argument, and fails if that is empty.
        asked = self._replicas.answer.remote(sent) if sent.prompt else self._replicas.answer.remote(sent=sent)
        async for message in asked:
            await send(message)


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
    return front.bind(replicas.bind(settings), key)
