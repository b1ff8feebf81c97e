"""Requests of clients of OpenAI, vLLM and llama-server are answered, or refused by name; none is a failure."""

import json
import random
import socket
import time

import httpx
import pytest
from served import ASKED, JSON, LONG, begun, dialogue_in, served, until

from eagle3.runner.serve import dialogue as dialogue_module
from eagle3.runner.serve.answer import _forced_calls
from eagle3.runner.serve.calls import read_calls
from eagle3.runner.serve.errors import Refused
from eagle3.runner.serve.template import Message

FUNCTION = {"name": "seek", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
CHAT = {"messages": ASKED, "max_tokens": 2}
COMPLETION = {"prompt": "x", "max_tokens": 2}
RESPONSE = {"input": "x", "max_output_tokens": 2}
DEEP = json.loads("[" * 99 + "]" * 99)
WRONG = [
    ("completions", {"stop": True}, "stop"),
    ("completions", {"metadata": {"a": [int("9" * 300)] * 20, "b": 0.5}}, "metadata.a"),
    ("completions", {"structured_outputs": {"json": '{"x": ' + "9" * 500 + "}"}}, None),
    ("chat/completions", {"stop": 5}, "stop.str"),
    ("chat/completions", {"chat_template_kwargs": {"\ud800": "\ud800"}}, "chat_template_kwargs"),
    ("chat/completions", {"metadata": {"a": {"\ud800": "x"}}}, "metadata.a"),
    (
        "chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"default": DEEP}}}},
        None,
    ),
    ("chat/completions", {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice"),
    ("responses", {"text": {"format": "text"}}, "text.format"),
    ("responses", {"text": "text"}, "text"),
    ("responses", {"tools": [FUNCTION | {"type": "function", "parameters": []}]}, None),
    ("responses", {"tools": [FUNCTION | {"type": "function", "description": 5}]}, None),
    ("responses", {"tools": [FUNCTION | {"type": "function", "strict": "often"}]}, None),
    ("responses", {"tools": [FUNCTION | {"type": "function"}], "tool_choice": {"name": "seek"}}, None),
    ("responses", {"input": [{"type": 5, "role": "user", "content": "x"}]}, None),
    ("responses", {"include": ["message.output_text.logprobs"]}, "include"),
    ("responses", {"background": True}, "background"),
    ("completions", {"return_token_ids": True}, "return_token_ids"),
    ("completions", {"repeat_penalty": 1.2}, "repeat_penalty"),
]


@pytest.mark.parametrize(("path", "given", "param"), WRONG)
def test_a_value_of_a_wrong_type_is_refused(server, path, given, param):
    asked = {"chat/completions": CHAT, "completions": COMPLETION, "responses": RESPONSE}[path]
    answer = httpx.post(f"{server.url}/{path}", content=json.dumps(asked | given).encode(), headers=JSON)
    error = answer.json()["error"]
    assert answer.status_code in (400, 413), answer.text
    assert param is None or error["param"].startswith(param), error


NAMES = ("$defs", "patternProperties", "definitions", "properties", "anyOf")


@pytest.mark.parametrize("place", NAMES)
@pytest.mark.parametrize("name", ["title", "default", "x"])
def test_the_size_of_a_schema_counts_whatever_its_parts_are_called(server, place, name):
    large = {name: {"enum": [str(number) for number in range(3000)]}}
    schema = {place: [large] if place == "anyOf" else large}
    given = CHAT | {"structured_outputs": {"json": schema}}
    error = server.post("/chat/completions", given).json()["error"]
    assert error["param"] == "structured_outputs" and "at most" in error["message"]


VALUES = [None, True, -1, 1e308, 10**30, "", "x", "\ud800", [], {}, [1], ["x"], [{}], {"a": 1}, {"type": "text"}]
VALUES += [{"type": 5}, {"type": "function"}, {"\ud800": 1}, DEEP[0], "x" * 2000, {"json": "{"}, {"regex": "("}]


def test_no_body_is_a_failure_of_the_server(server):
    """Random values of each request are replaced by others."""
    chance = random.Random(61)
    history = [*ASKED, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}, *ASKED]
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean"}}}
    whole = {
        "completions": COMPLETION | {"echo": True, "logprobs": 1, "logit_bias": {"5": 1}, "stop": ["x"], "n": 1},
        "chat/completions": CHAT | {"messages": history, "tools": [TOOL], "response_format": format_},
        "responses": RESPONSE | {"tools": [FUNCTION | {"type": "function"}], "text": {"format": {"type": "text"}}},
        "messages": CHAT | {"messages": history, "tools": [{"name": "f", "input_schema": {}}], "system": "x"},
    }
    with httpx.Client(headers=JSON, timeout=60) as client:
        for number in range(70):
            path = chance.choice(list(whole))
            body = json.loads(json.dumps(whole[path]))
            at, places = body, []
            while isinstance(at, dict | list) and at and (not places or chance.random() < 0.7):
                places.append((at, key := chance.choice(list(at) if isinstance(at, dict) else range(len(at)))))
                at = at[key]
            places[-1][0][places[-1][1]] = chance.choice(VALUES)
            answer = client.post(f"{server.url}/{path}", content=json.dumps(body).encode())
            assert answer.status_code in (200, 400), (number, path, body, answer.text)


def test_answers_that_are_nested_deeply_are_no_calls(server):
    nested = '[{"name": "seek", "parameters": ' + "[" * 20_000
    assert _forced_calls("required", nested, {"seek"}) == []
    assert read_calls("llama", '{"name": "seek", "parameters": ' + '{"a":' * 20_000, {"seek": {}})[0] == []
    text = '<tool_call>{"name": "seek", "arguments": {"a": "\\ud800"}}</tool_call>'
    [(_, arguments)], _ = read_calls("hermes", text, {"seek": {}})
    assert arguments.isascii() and json.loads(arguments) == {"a": "\ud800"}


def test_fields_that_ask_for_nothing_are_ignored(server):
    plain = server.post("/completions", COMPLETION).json()["choices"]
    given = {"cache_prompt": True, "return_token_ids": False, "add_special_tokens": True, "repeat_penalty": 1.0}
    given |= {"id_slot": -1, "priority": 0, "skip_special_tokens": True, "bad_words": [], "guided_json": None}
    assert server.post("/completions", COMPLETION | given).json()["choices"] == plain
    given = {"include": ["reasoning.encrypted_content"], "metadata": {"a": "b"}, "store": True, "background": False}
    given |= {"client_metadata": {"a": "b"}}  # Codex's
    made = server.post("/responses", RESPONSE | given).json()
    assert (made["metadata"], made["store"], made["background"]) == ({"a": "b"}, False, False)


@pytest.mark.parametrize("name", ["schema", "value"])
def test_an_object_may_have_a_schema(server, name):
    """llama-server has ``schema``; huggingface_hub's client sends ``value``, and ``dummy`` if it knows no model."""
    format_ = {"type": "json_object", name: {"enum": [{"on": True}]}}
    given = CHAT | {"model": "dummy", "response_format": format_, "max_tokens": 40}
    assert server.post("/chat/completions", given).json()["choices"][0]["message"]["content"] == '{"on": true}'


def test_a_forced_call_has_no_text_that_a_format_could_describe(server):
    """instructor gives both in responses."""
    format_ = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "boolean"}}}
    given = RESPONSE | {"tools": [FUNCTION | {"type": "function"}], "text": format_, "max_output_tokens": 100}
    made = server.post("/responses", given | {"tool_choice": {"type": "function", "name": "seek"}}).json()
    assert [item["type"] for item in made["output"]] == ["function_call"]


@pytest.mark.parametrize("nested", [True, False])
def test_allowed_tools_limit_the_calls(server, nested):
    tools = [TOOL, {"type": "function", "function": FUNCTION | {"name": "stop"}}]
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "stop"}} if nested else
                                             {"type": "function", "name": "stop"}]}  # fmt: skip
    choice = {"type": "allowed_tools", "allowed_tools": allowed} if nested else {"type": "allowed_tools", **allowed}
    given = CHAT | {"tools": tools, "tool_choice": choice, "max_tokens": 200, "parallel_tool_calls": False}
    [call] = server.post("/chat/completions", given).json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "stop"


def test_small_endpoints(server):
    root = server.url.removesuffix("/v1")
    assert httpx.get(f"{root}/ping").status_code == 200 and httpx.get(f"{root}/version").json()["version"]
    text = "def main(path):"
    found = httpx.post(f"{root}/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert found["tokens"] == server.model.encode(text) and len(found["token_strs"]) == found["count"]
    back = httpx.post(f"{root}/detokenize", json={"tokens": found["tokens"][1:]}).json()
    assert back == {"prompt": text}
    rendered = httpx.post(f"{root}/tokenize", json={"messages": ASKED}).json()["tokens"]
    assert rendered == server.model.encode(ASKED)
    assert httpx.post(f"{root}/detokenize", json={"tokens": [10**9]}).status_code == 400


def test_every_chunk_of_a_stream_with_usage_has_the_field(server):
    for path, given in (("completions", COMPLETION), ("chat/completions", CHAT)):
        given = given | {"stream": True, "stream_options": {"include_usage": True}}
        lines = server.post(f"/{path}", given).text.splitlines()
        *chunks, last = (json.loads(line[6:]) for line in lines if line.startswith("data: {"))
        assert all(chunk["usage"] is None for chunk in chunks) and last["usage"]["completion_tokens"] == 2


def test_requests_have_ids_and_a_wrong_method_says_which_are_right(server):
    answer = httpx.get(f"{server.url}/models", headers={"X-Request-Id": "a-1"})
    assert answer.headers["x-request-id"] == "a-1"
    answer = httpx.get(f"{server.url}/models", headers={"X-Request-Id": "a b"})
    assert answer.headers["x-request-id"].startswith("req_")
    answer = httpx.put(f"{server.url}/completions")
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"


def test_pages_of_allowed_origins_may_send_requests(model, artifact):
    with served([model], artifact, key="secret", origins=["https://chat.example"]) as server:
        for origin, allowed in (("https://chat.example", "https://chat.example"), ("https://evil.example", None)):
            headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            answer = httpx.options(f"{server.url}/completions", headers=headers)
            assert answer.headers.get("access-control-allow-origin") == allowed


def test_a_failure_is_logged_as_what_it_is_without_values(server, monkeypatch):
    server.renew()

    def fails(*given):
        raise RuntimeError(f"a fault with {given}")

    monkeypatch.setattr(server.service, "check_model", fails)
    answer = server.post("/completions", {"prompt": "secret words"})
    assert answer.status_code == 500 and answer.json()["error"]["message"] == "the server failed: RuntimeError"
    until(lambda: len(server.lines) == 2)
    assert server.lines[0].startswith("POST /v1/completions 500 ")
    assert server.lines[1].startswith("RuntimeError in ") and "test_serve_clients.py" in server.lines[1]
    assert "secret" not in "".join(server.lines)


def test_a_waiting_request_leaves_the_queue_when_its_client_does(server, held):
    client, _lines = begun(server, LONG)
    held.clear()
    gone = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(4)]
    body = json.dumps(LONG).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    for each in gone:
        each.sendall(f"{head}\r\n\r\n".encode() + body)
    until(lambda: server.jobs.waiting == 4)
    for each in gone:
        each.close()
    until(lambda: server.jobs.waiting == 0)  # while the first request still runs
    assert server.jobs.running == 1
    client.close()
    held.set()


def test_after_an_early_answer_to_a_body_that_does_not_arrive_the_connection_closes(server, monkeypatch):
    monkeypatch.setattr("eagle3.runner.serve.gate.DISCARD_SECONDS", 0.1)
    for head in ("GET /health", "POST /v1/nothing", "POST /v1/completions"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as slow:
            slow.sendall(f"{head} HTTP/1.1\r\nHost: a\r\nContent-Length: 9000000\r\n\r\n{{".encode())
            heard = b""
            while more := slow.recv(1000):  # ends when the server closes the connection
                heard += more
            assert b"connection: close" in heard.lower(), heard


QUADRATIC = "{% for a in range(30000) %}{% for b in range(30000) %}{% endfor %}{% endfor %}x"


def test_a_template_has_a_limited_time(session, tmp_path, monkeypatch):
    monkeypatch.setattr(dialogue_module, "TEMPLATE_SECONDS", 0.2)
    made, start = dialogue_in(QUADRATIC, session, tmp_path), time.monotonic()
    with pytest.raises(Refused, match="the chat template takes more than 0.2 s"):
        made.turn([Message(role="user", content="x")], {})
    assert time.monotonic() - start < 5
