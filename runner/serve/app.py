"""The HTTP application: routes, errors and streams. Each endpoint has a file of its own."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from executorch.examples.llm_server.python.protocol import ModelCard, ModelList
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from eagle3.runner.serve import chat, completions, messages, responses
from eagle3.runner.serve.errors import APIError, Busy, Refused, as_response, body, on_api_error
from eagle3.runner.serve.gate import Gate, check_type, failure
from eagle3.runner.serve.limits import read_body
from eagle3.runner.serve.page import pages
from eagle3.runner.serve.requests import (
    Asked,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    MessagesBody,
    ResponseBody,
    TokenizeBody,
    parse,
)
from eagle3.runner.serve.service import Service
from eagle3.runner.system.machine import version_of

DONE = "data: [DONE]\n\n"
BODY_SECONDS = 60.0
"""The seconds that a client has to send a body."""
MOST_PARSED = 48
"""The requests whose bodies may be parsed or wait for that, or more if the queue holds more; others are refused."""

T = TypeVar("T")
Endpoint = Callable[[Service, Any, Request], Any]


def build_app(
    service: Service,
    key: str | None = None,
    log: Callable[[str], None] | None = None,
    hosts: Collection[str] | None = None,
    origins: Collection[str] = (),
) -> Starlette:
    """Return the application over a loaded model. ``key``: the API key that requests must send; ``log`` is called with
    one line per request; ``hosts``: the allowed names of the server (``Gate``); ``origins``: those whose pages may send
    requests (CORS)."""

    started = int(time.time())

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        service.jobs.close()

    def card() -> dict[str, Any]:
        made = ModelCard(id=service.model_id, created=started, owned_by="eagle3-export")
        return made.model_dump() | {"max_model_len": service.metadata.max_seq_len}

    async def health(_request: Request) -> Response:
        return JSONResponse({"status": "ok"}) if service.jobs.alive else JSONResponse({"status": "unavailable"}, 503)

    async def metrics(_request: Request) -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(_request: Request) -> Response:
        return JSONResponse({"version": version_of("eagle3-export")})

    async def models(_request: Request) -> Response:
        return JSONResponse(ModelList(data=[]).model_dump() | {"data": [card()]})

    async def model(request: Request) -> Response:
        service.check_model(request.path_params["name"])
        return JSONResponse(card())

    async def tokenize(request: Request) -> Response:
        given = await _body(request, service, TokenizeBody)
        return JSONResponse(await asyncio.to_thread(_tokenized, service, given))

    async def count_tokens(request: Request) -> Response:
        given = await _body(request, service, MessagesBody, max_tokens=1)
        turn = await asyncio.to_thread(messages.asked, service, given)
        return JSONResponse({"input_tokens": len(turn.prompt)})

    async def detokenize(request: Request) -> Response:
        given = await _body(request, service, DetokenizeBody)
        try:
            return JSONResponse({"prompt": service.text.decode(service.encode(given.tokens), False)})
        except ValueError as error:
            raise Refused(str(error), "tokens") from None

    reads = {"/health": health, "/ping": health, "/metrics": metrics, "/version": version, "/v1/models": models}
    posts = {
        "/v1/chat/completions": _endpoint(service, ChatBody, chat.complete, chat.stream, DONE, _data),
        "/v1/completions": _endpoint(service, CompletionBody, completions.complete, completions.stream, DONE, _data),
        "/v1/messages": _endpoint(service, MessagesBody, messages.complete, messages.events, "", _event),
        "/v1/messages/count_tokens": count_tokens,
        "/v1/responses": _endpoint(service, ResponseBody, responses.complete, responses.events, "", _event),
        "/tokenize": tokenize,
        "/detokenize": detokenize,
    }
    routes = [Route(path, each) for path, each in (reads | {"/v1/models/{name:path}": model} | pages()).items()]
    routes += [Route(path, each, methods=["POST"]) for path, each in posts.items()]
    gates = [Middleware(Gate, key=key, log=log or (lambda _line: None), hosts=hosts)]
    if origins:  # a browser asks for the permission without the key
        allowed = Middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])
        gates.insert(0, allowed)
    handlers: dict[Any, Any] = {
        APIError: on_api_error, ClientDisconnect: _on_hang_up, HTTPException: _on_http_error
    }  # fmt: skip
    app = Starlette(routes=routes, middleware=gates, exception_handlers=handlers, lifespan=lifespan)
    app.router.redirect_slashes = False  # a redirect would lead to the host that the client named
    return app


def _json(made: object) -> str:
    def dumped(inner: Any) -> dict[str, Any]:  # noqa: ANN401 (openai's types)
        return inner.model_dump(mode="json", exclude_unset=True, warnings=False)

    return json.dumps(made, default=dumped, separators=(",", ":"))


def _data(made: object) -> str:
    return f"data: {_json(made)}\n\n"


def _event(made: dict[str, Any]) -> str:
    return f"event: {made['type']}\n{_data(made)}"


def _endpoint(
    service: Service, kind: type[Asked], complete: Endpoint, stream: Endpoint, done: str, written: Callable[[Any], str]
) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        service.jobs.check_room(1)  # before the body is read
        asked = await _body(request, service, kind)
        service.jobs.check_room(asked.generations)  # before the prompt is rendered or tokenized
        if not asked.stream:
            made = await _while_connected(request, complete(service, asked, request))
            return Response(_json(made), media_type="application/json")
        events = stream(service, asked, request)
        first = await _while_connected(request, anext(events))  # an error before the first event has an HTTP status
        return StreamingResponse(_sent(request, first, events, done, written), media_type="text/event-stream")

    return answer


async def _sent(
    request: Request, first: object, events: AsyncGenerator[Any, None], done: str, written: Callable[[Any], str]
) -> AsyncIterator[str]:
    """Yield server-sent events. An error after the first one is sent as an event, since the HTTP status has already
    been sent."""
    try:
        yield written(first)
        async for event in events:
            yield written(event)
    except Exception as error:
        if not isinstance(error, APIError):
            request.scope["failed"] = error  # for the log
        told = body(failure(error), request.scope)
        yield (_event if "type" in told else _data)(told)
    finally:
        await events.aclose()
    if done:
        yield done


async def _body(request: Request, service: Service, kind: type[Body], **given_else: object) -> Body:
    """Return the checked body of a request, with ``given_else`` for fields that it lacks. Raises ``Refused``."""
    check_type(request.headers.get("content-type", ""))
    try:
        given = await asyncio.wait_for(request.body(), BODY_SECONDS)
    except TimeoutError:
        raise Refused(f"the body took more than {BODY_SECONDS:g} s to arrive", status=408) from None

    def parsed() -> Body:
        return parse(kind, read_body(given, service.metadata.max_seq_len), service.defaults | given_else)

    if await request.is_disconnected():
        raise ClientDisconnect
    if service.parsing >= max(MOST_PARSED, service.jobs.most):
        raise Busy(service.parsing, 1)
    service.parsing += 1
    try:
        return await asyncio.to_thread(parsed)
    finally:
        service.parsing -= 1


def _tokenized(service: Service, given: TokenizeBody) -> dict[str, Any]:
    service.check_model(given.model)
    if given.messages is not None:
        ids = service.dialogue.turn(given.messages, {}, given.tools, template_kwargs=given.chat_template_kwargs).prompt
    else:
        service.dialogue.check_length(given.prompt or "")
        ids = service.text.encode(given.prompt or "")
    written = [service.text.tokenizer.id_to_token(token) for token in ids] if given.return_token_strs else None
    return {"count": len(ids), "max_model_len": service.metadata.max_seq_len, "tokens": ids, "token_strs": written}


async def _while_connected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of ``work``, which is cancelled if the client disconnects."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        if not task.done():
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer = as_response(Refused(str(error.detail), status=error.status_code), request.scope)
    answer.headers.update(error.headers or {})
    return answer


async def _on_hang_up(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)  # the client has gone and reads no response
