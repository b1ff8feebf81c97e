"""The application answers a request that another process received, as eagle3.runner.serve.ray needs."""

import asyncio
import json

import pytest
from served import serviced

from eagle3.runner.model import Model
from eagle3.runner.serve.app import build_app
from eagle3.runner.serve.tunnel import Sent, answered, prompt_text

HEADERS = [(b"content-type", b"application/json")]


@pytest.fixture
def service(session, artifact):
    with serviced([Model(session.metadata, lambda: session, artifact)], artifact) as made:
        yield made


def sent(body: dict | None = None, path: str = "/v1/completions", method: str = "POST") -> Sent:
    scope = {"method": method, "path": "/tiny" + path, "root_path": "/tiny", "query_string": b"", "headers": HEADERS}
    return Sent.of(scope, b"" if body is None else json.dumps(body).encode())


async def whole(app, request: Sent) -> tuple[int, list[bytes]]:
    start, *rest = [message async for message in answered(app, request)]
    return start["status"], [message["body"] for message in rest if message.get("body")]


def test_a_tunneled_answer_is_streamed_as_it_is_generated(service):
    app = build_app(service)
    asked = {"prompt": "def main(", "max_tokens": 20}
    status, bodies = asyncio.run(whole(app, sent(asked)))
    text = json.loads(b"".join(bodies))["choices"][0]["text"]
    service.model.forget()
    assert status == 200 and text == service.model.generate("def main(", max_new_tokens=20).text
    status, bodies = asyncio.run(whole(app, sent(asked | {"stream": True})))
    chunks = [json.loads(body[6:]) for body in bodies if body.startswith(b"data: {")]
    assert status == 200 and len(chunks) > 5
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == text
    assert asyncio.run(whole(app, sent(path="/health", method="GET"))) == (200, [b'{"status":"ok"}'])
    assert asyncio.run(whole(app, sent({"prompt": 3})))[0] == 400


def test_abandoning_a_tunneled_answer_frees_the_model(service):
    async def left() -> None:
        app = build_app(service)
        long = {"prompt": "def main(", "max_tokens": 900, "ignore_eos": True, "stream": True}
        messages = answered(app, sent(long))
        assert (await anext(messages))["status"] == 200
        assert b"data: " in (await anext(messages))["body"]
        await messages.aclose()
        while service.engine.running:
            await asyncio.sleep(0.001)

    asyncio.run(left())
    assert service.engine.running == 0
    assert 'finished_reason="abort",model_name="tiny"} 1.0' in service.metrics.text().decode()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"prompt": "abc"}, "abc"),
        ({"prompt": ["a", "b"]}, "ab"),
        ({"prompt": [1, 2]}, ""),
        ({"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": [{"text": "b"}]}]}, "ab"),
        ({"instructions": "i", "input": "abc"}, "iabc"),
        ({"input": [{"role": "user", "content": "x"}, {"type": "function_call"}]}, "x"),
        ({"messages": 3}, ""),
        ([], ""),
        (None, ""),
    ],
)
def test_the_router_gets_the_text_of_a_request(body, text):
    assert prompt_text(json.dumps(body).encode()) == text and prompt_text(b"{") == ""
