"""Requests that could stop a server for others are refused or bounded, while the event loop and other generations
continue."""

import http.client
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
from served import ASKED, JSON, LONG, begun, served, until

from eagle3.runner.model import Model
from eagle3.runner.sampling import constraint
from eagle3.runner.serve import app, limits
from eagle3.runner.serve import server as server_module
from eagle3.runner.serve.errors import LONGEST

PLAIN = {"messages": ASKED, "max_tokens": 4}
LOOPS = "{% for i in range(15000) %}{% for j in range(15000) %}{% endfor %}{% endfor %}x"
SLOW = {"allOf": [{"type": "string", "pattern": f"a{{{i},{i + 5000}}}"} for i in range(60)]}
"""A schema that llguidance compiles for minutes."""
REQUIRED = {"tool_choice": "required"}
PATTERNS = {f"^[a-z]{{{i % 9 + 1},{i % 50 + 9}}}x{i}$": {"type": "string"} for i in range(399)}


@contextmanager
def others(server, answers: bool = True):
    """Request /health and, with ``answers``, an answer of the model repeatedly within this context. Yields the longest
    wait in seconds, which is set at its end."""
    over, waits = threading.Event(), {"health": 0.0, "answer": 0.0}

    def ask(name: str, path: str, given: dict | None) -> None:
        with httpx.Client(timeout=60) as client:
            while not over.is_set():
                start = time.perf_counter()
                answer = client.get(path) if given is None else client.post(path, json=given)
                assert answer.status_code == 200, answer.text
                waits[name] = max(waits[name], time.perf_counter() - start)
                over.wait(0.02)

    health = server.url.removesuffix("/v1") + "/health"
    asked = [("health", health, None), ("answer", f"{server.url}/completions", {"prompt": "a", "max_tokens": 2})]
    threads = [threading.Thread(target=ask, args=args) for args in asked[: 1 + answers]]
    for thread in threads:
        thread.start()
    try:
        yield waits
    finally:
        over.set()
        for thread in threads:
            thread.join()


def formatted(schema: object) -> dict:
    return PLAIN | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


ATTACKS = {
    "a template of its own": (PLAIN | {"chat_template_kwargs": {"chat_template": LOOPS}}, "chat_template_kwargs"),
    "tokenize": (PLAIN | {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    "choices": (
        PLAIN | {"structured_outputs": {"choice": [f"choice {i}" for i in range(40_000)]}},
        "structured_outputs",
    ),
    "patterns": (formatted({"type": "object", "patternProperties": PATTERNS}), "response_format"),
    "a slow schema": (formatted(SLOW), "response_format"),
    "a schema of a tool": (
        PLAIN | {"tools": [{"type": "function", "function": {"name": "f", "parameters": SLOW}}]} | REQUIRED,
        "tools",
    ),
    "a long const": (formatted({"const": "x " * 250_000}), "response_format"),
    "a schema that allows no text": (formatted({"$ref": "#"}), "response_format"),
    "stop strings": (PLAIN | {"stop": [f"{i:0500}" for i in range(999)]}, "stop"),
    "a long stop string": (PLAIN | {"stop": "x" * 5000}, "stop"),
    "biases": (PLAIN | {"logit_bias": {str(i): 1 for i in range(60_000)}}, "logit_bias"),
    "messages": (PLAIN | {"messages": ASKED * 5000}, "messages"),
    "a deep schema": (formatted(json.loads('{"items":' * 300 + "{}" + "}" * 300)), "response_format"),
    "a surrogate in a role": (PLAIN | {"messages": [{"role": "us\ud800er", "content": "x"}]}, "messages.0.role"),
    "a name that is none": (
        PLAIN
        | {"tools": [{"type": "function", "function": {"name": "f"}}]}
        | {"tool_choice": {"type": "function", "function": {"name": {}}}},
        "tool_choice",
    ),
}


def test_attacks_are_refused_in_one_line_within_seconds_and_others_are_served(server):
    with others(server) as waits:
        for name, (given, param) in ATTACKS.items():
            start, body = time.perf_counter(), json.dumps(given).encode()
            answer = httpx.post(f"{server.url}/chat/completions", content=body, headers=JSON, timeout=60)
            seconds, error = time.perf_counter() - start, answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), (name, error)
            assert len(error["message"]) <= LONGEST + 3 and "\n" not in error["message"], name
            assert seconds < 10, name  # half a second of processor time, but the machine may be busy
    assert max(waits.values()) < 5, waits  # a fraction of a second on an idle machine


@pytest.mark.parametrize("given", [b"[]," * 1_300_000 + b"[]", b'"x":1,' * 150_000 + b'"x":1', b"{}," * 80_000 + b"{}"])
def test_a_body_with_too_many_values_is_refused_before_parsing(server, given, monkeypatch):
    loads = limits.json.loads

    def read(text, **more):
        assert len(text) < 200_000, "parsed"
        return loads(text, **more)

    monkeypatch.setattr(limits.json, "loads", read)
    answer = httpx.post(f"{server.url}/completions", content=b'{"prompt": [' + given + b"]}", headers=JSON, timeout=60)
    assert answer.status_code == 413 and "commas and brackets" in answer.json()["error"]["message"]


def test_a_million_prompts_are_refused_before_tokenizing(server, monkeypatch):
    monkeypatch.setattr(server.service.text, "encode", None)
    given = {"prompt": ["x"] * 1_000_000, "max_tokens": 1}
    with others(server, answers=False) as waits:
        answer = httpx.post(f"{server.url}/completions", json=given, timeout=60)
    assert answer.status_code in (400, 413) and waits["health"] < 1
    answer = server.post("/completions", {"prompt": ["x"] * 100, "max_tokens": 1})
    assert answer.status_code == 400 and "at most 65" in answer.json()["error"]["message"]
    answer = server.post("/completions", {"prompt": [5] * 50_000, "max_tokens": 1})
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_refused_schema_is_not_compiled_again(server):
    given = formatted({"allOf": SLOW["allOf"][::-1]})
    first = server.post("/chat/completions", given)
    start = time.perf_counter()
    again = server.post("/chat/completions", given)
    assert again.json() == first.json() and first.status_code == 400 and time.perf_counter() - start < 0.5
    assert "more than 0.5 s to compile, which is the limit" in first.json()["error"]["message"]


def test_a_schema_is_compiled_once_while_other_requests_generate(server, monkeypatch):
    compiled = []
    matcher = constraint.Grammars._matcher
    monkeypatch.setattr(constraint.Grammars, "_matcher", lambda *given: compiled.append(1) or matcher(*given))
    given = formatted({"enum": [f"value {i}" for i in range(900)]})
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: server.post("/chat/completions", given), range(8)))
    assert [answer.status_code for answer in answers] == [200] * 8 and len(compiled) == 1


def test_the_schemas_true_and_object_are_accepted(server):
    assert server.post("/chat/completions", formatted(True)).status_code == 200
    assert server.post("/chat/completions", formatted({"type": "boolean"})).status_code == 200


def test_compiled_grammars_are_kept_up_to_a_number_of_bytes(session, artifact, monkeypatch):
    grammars = Model(session.metadata, lambda: session, artifact).grammars
    monkeypatch.setattr(constraint, "KEPT_BYTES", 4 * constraint.BYTES_OF_GRAMMAR)
    asked = [{"choice": [f"{number}", "b"]} for number in range(9)]
    for each in asked:
        grammars.compile(each)
    kept = [each for each in asked if grammars.kept(each) is not None]
    assert kept == asked[-3:]
    grammars.compile({"choice": [f"a long choice {number}" for number in range(900)]})
    assert not any(grammars.kept(each) for each in asked)


def get(server, path: str = "/health", method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request(method, path, headers=headers)
    return connection.getresponse()


def test_a_host_that_is_not_allowed_is_refused(session, artifact):
    model = Model(session.metadata, lambda: session, artifact)
    with served([model], artifact, hosts=["localhost", "gpu.lan"]) as server:
        for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:80", "10.0.0.7", "gpu.lan:8000"):
            assert get(server, Host=host).status == 200, host
        for host in ("evil.example", "localhost.evil.example", "evil.example:8000", "", "127.0.0.1.evil.example"):
            answer = get(server, Host=host)
            assert answer.status == 403 and b"--allowed-hosts" in answer.read(), host
    with served([model], artifact, hosts=["*"]) as server:
        assert get(server, Host="evil.example").status == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "text/plain;application/json"])
def test_content_types_that_a_web_page_may_send_without_cors_are_refused(server, kind):
    body = json.dumps(PLAIN).encode()
    answer = httpx.post(f"{server.url}/chat/completions", content=body, headers={"Content-Type": kind})
    assert answer.status_code == 415 and "application/json" in answer.json()["error"]["message"]
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert httpx.post(f"{server.url}/chat/completions", content=body, headers=headers, timeout=60).status_code == 200


def test_a_path_cannot_forge_a_line_of_the_log(server):
    get(server, "/v1/x%0aPOST%20/v1/completions%20200%1b[31m" + "y" * 5000).read()
    get(server).read()
    [line] = [line for line in server.lines if "/v1/x" in line]
    assert line.isprintable() and len(line) < 300 and "%0A" in line


def test_the_server_never_redirects_to_a_host_named_by_the_client(server):
    answer = get(server, "/v1/models/", Host="evil.example")
    assert answer.status == 404 and answer.getheader("location") is None


def test_a_head_request_equals_get_without_a_body(server):
    for path in ("/health", "/metrics", "/v1/models", "/v1/models/tiny", "/"):
        answer = get(server, path, "HEAD")
        assert answer.status == 200 and answer.read() == b"", path


def test_a_connection_with_slow_headers_is_closed(server, monkeypatch):
    monkeypatch.setattr(server_module, "HEADER_SECONDS", 0.2)
    address = "127.0.0.1", server.port
    for sent in (b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: 1\r\n"):
        with socket.create_connection(address, timeout=10) as slow:
            slow.sendall(sent)
            start = time.monotonic()
            assert slow.recv(100) == b"" and 0.1 < time.monotonic() - start < 5
    with socket.create_connection(address, timeout=10) as again:  # also after a response
        again.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert again.recv(1000).startswith(b"HTTP/1.1 200")
        again.sendall(b"GET /hea")
        while again.recv(1000):
            pass


def test_a_request_whose_body_does_not_arrive_is_ended(server, monkeypatch):
    monkeypatch.setattr(app, "BODY_SECONDS", 0.1)
    address = "127.0.0.1", server.port
    with socket.create_connection(address, timeout=10) as slow:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 99"
        slow.sendall(head + b'\r\n\r\n{"pro')
        assert slow.recv(1000).startswith(b"HTTP/1.1 408")


def test_after_the_grace_period_waiting_and_streaming_clients_get_an_error(session, artifact, held):
    model = Model(session.metadata, lambda: session, artifact)
    with served([model], artifact, grace=0.2) as server, ThreadPoolExecutor(1) as pool:
        _client, lines = begun(server, LONG)
        held.clear()
        waiting = pool.submit(server.post, "/completions", LONG)
        until(lambda: server.jobs.waiting)
        server.stop()
        time.sleep(0.5)
        held.set()
        rest, answer = list(lines), waiting.result()
    assert answer.status_code == 503 and answer.json()["error"]["type"] == "server_error"
    assert "shutting down" in answer.text
    told = [json.loads(line[6:]) for line in rest if line.startswith("data: {")]
    assert told[-1]["error"]["message"] == "the server is shutting down" and rest[-2] == "data: [DONE]"
