"""eagle3-serve keeps order and bounds under load, and survives clients that disconnect, failing generations and
signals."""

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import click
import httpx
import pytest
from commands import fail_command
from served import JSON, LONG, begun, served, until

from eagle3.runner import load
from eagle3.runner.model import Model
from eagle3.runner.serve import app
from eagle3.runner.serve.cli import bind, main
from eagle3.runner.serve.errors import Unavailable
from eagle3.runner.serve.gate import Gate
from eagle3.runner.serve.limits import MOST_BODY

SHORT = {"prompt": "class A", "max_tokens": 8}


@pytest.fixture
def server(server):
    server.renew()
    return server


@pytest.fixture
def ended(server, monkeypatch):
    """The jobs of the server in the order in which they end. The order in which their clients notice is another."""
    jobs, report = [], server.jobs._ended
    monkeypatch.setattr(server.jobs, "_ended", lambda job: (jobs.append(job), report(job)))
    return jobs


def test_clients_at_once_get_their_own_answers_in_the_order_of_arrival(server, session, artifact, held, ended):
    prompts = [f"def f{number}(x{number}" for number in range(6)]
    alone = Model(session.metadata, lambda: session, artifact)
    expected = [alone.generate(prompt, max_new_tokens=40 - place).text for place, prompt in enumerate(prompts)]
    client, _lines = begun(server, LONG)
    held.clear()
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = []
        for place, prompt in enumerate(prompts):
            asked.append(pool.submit(server.post, "/completions", {"prompt": prompt, "max_tokens": 40 - place}))
            until(lambda: server.jobs.waiting == len(asked))
        assert server.metric("vllm:num_requests_waiting") == 6 and server.metric("vllm:num_requests_running") == 1
        client.close()
        held.set()
        assert [each.result().json()["choices"][0]["text"] for each in asked] == expected
    assert [job.request.options["max_new_tokens"] for job in ended[1:]] == [40, 39, 38, 37, 36, 35]


def test_another_client_is_served_between_the_choices_of_a_request(server, held, ended):
    client, _lines = begun(server, LONG)
    held.clear()
    with ThreadPoolExecutor(2) as pool:
        for given, waiting in (({"prompt": ["class A", "def b"], "n": 3}, 6), ({}, 7)):
            pool.submit(server.post, "/completions", SHORT | given)
            until(lambda waiting=waiting: server.jobs.waiting == waiting)
        client.close()
        held.set()
    groups = [job.request.group for job in ended[1:]]
    assert len(groups) == 7 and len(set(groups)) == 2 and groups.index(max(groups)) <= 1


def test_as_many_requests_as_the_queue_holds_may_arrive_at_once(server, monkeypatch):
    arrived, read_body = threading.Event(), app.read_body
    monkeypatch.setattr(app, "read_body", lambda *given: arrived.wait(30) and read_body(*given))
    with httpx.Client(timeout=60, limits=httpx.Limits(max_connections=None)) as client, ThreadPoolExecutor(60) as pool:
        url, given = f"{server.url}/completions", SHORT | {"max_tokens": 1}
        asked = [pool.submit(client.post, url, json=given) for _ in range(60)]
        try:
            until(lambda: server.service.parsing + sum(each.done() for each in asked) == 60)
        finally:
            arrived.set()
        assert [each.result().status_code for each in asked] == [200] * 60


def test_a_full_queue_answers_429(model, artifact, held):
    with served([model], artifact, max_queue=1) as server:
        client, _lines = begun(server, LONG)
        held.clear()
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(server.post, "/completions", SHORT)
            until(lambda: server.jobs.waiting == 1)
            answer = server.post("/completions", SHORT)
            assert answer.status_code == 429 and int(answer.headers["Retry-After"]) >= 1
            assert answer.json()["error"]["code"] == "queue_full"
            client.close()
            held.set()
            assert waits.result().status_code == 200
        refused = server.post("/completions", SHORT | {"n": 3})  # never possible, so no 429
        assert refused.status_code == 400 and "at most 2 can run and wait here" in refused.json()["error"]["message"]
        assert server.post("/completions", SHORT | {"n": 2}).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_frees_the_model_within_a_round_and_logs_one_line(server, stream, caplog):
    body = json.dumps(LONG | {"stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with caplog.at_level(logging.ERROR), socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"{head}\r\n\r\n".encode() + body)
        until(lambda: server.jobs.running == 1)
        time.sleep(0.05)
    until(lambda: server.jobs.running == 0, 1.0)
    until(lambda: server.metric('vllm:request_success_total{finished_reason="abort"') == 1)
    status = " 200 " if stream else " 499 "
    until(lambda: any(status in line for line in server.lines))
    assert server.metric("vllm:generation_tokens_total") < 900 and not caplog.records
    assert server.post("/completions", SHORT).status_code == 200


def test_a_client_that_disconnects_leaves_the_queue(server, held):
    client, _lines = begun(server, LONG)
    held.clear()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/completions", json=SHORT, timeout=0.3)
    client.close()
    held.set()
    until(lambda: server.jobs.running == server.jobs.waiting == 0)
    assert server.metric("vllm:generation_tokens_total") < 900
    assert server.metric("vllm:request_success_total") == 2  # nothing was generated for it
    assert server.metric('vllm:request_success_total{finished_reason="length"') == 0
    assert server.post("/completions", SHORT).status_code == 200


def test_a_failing_generation_affects_only_its_own_request(server, session, monkeypatch):
    expected = server.post("/completions", SHORT).json()["choices"][0]["text"]
    verify, calls = session.target_verify, []

    def fails(*given):
        calls.append(given)
        if len(calls) == 3:
            raise RuntimeError("the third\ncall")
        return verify(*given)

    monkeypatch.setattr(session, "target_verify", fails)
    answer = server.post("/completions", LONG)
    assert answer.status_code == 500
    assert answer.json()["error"] == {
        "message": "Generation failed: the third call", "type": "server_error", "param": None, "code": None
    }  # fmt: skip
    calls.clear()
    lines = [line for line in server.post("/completions", LONG | {"stream": True}).text.split("\n\n") if line]
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["message"] == "Generation failed: the third call"
    assert lines[-1] == "data: [DONE]" and len(lines) > 2
    assert server.post("/completions", SHORT).json()["choices"][0]["text"] == expected
    assert httpx.get(server.url.removesuffix("/v1") + "/health").status_code == 200


def test_a_body_that_is_too_large_is_refused(server):
    answer = httpx.post(f"{server.url}/completions", content=b" " * (MOST_BODY + 1), timeout=60, headers=JSON)
    assert answer.status_code == 413 and f"{MOST_BODY >> 20} MiB" in answer.json()["error"]["message"]
    chunks = (b" " * (1 << 20) for _ in range(20))  # a body without Content-Length
    answer = httpx.post(f"{server.url}/completions", content=chunks, timeout=60, headers=JSON)
    assert answer.status_code == 413 and answer.json()["error"]["type"] == "invalid_request_error"
    assert server.post("/completions", SHORT).status_code == 200


def test_requests_without_the_right_key_are_refused(model, artifact):
    with served([model], artifact, key="secret") as server:
        for scheme in ("Bearer", "BEARER", "bearer "):
            given = {"Authorization": f"{scheme} secret"}
            assert server.post("/completions", SHORT, headers=given).status_code == 200
        for key in ("", "Bearer", "Bearer secre", "Bearer secrets", "Bearer é", "secret", "Basic secret"):
            given = {"Authorization": key.encode()} if key else {}
            answer = server.post("/completions", SHORT, headers=given)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key", given
        for path in ("models", "models/tiny", "responses", "nothing"):
            assert httpx.get(f"{server.url}/{path}").status_code == 401
        assert httpx.get(server.url.removesuffix("/v1") + "/health").status_code == 200


GATED = ["/v1/models", "/v1/health", "/tiny/v1/models", "//v1/models", "/V1/models", "/health/../v1/models"]
OPEN = [("/tiny/health", "/tiny"), ("/tiny/", "/tiny/"), ("/tiny/page.js", "/tiny"), ("/", "")]


def test_the_key_is_required_wherever_the_application_is_mounted():
    for path, root in [*((path, "") for path in GATED), ("/tiny/v1/models", "/tiny"), *OPEN]:
        passed = []

        async def app(scope, receive, send, passed=passed):
            passed.append(scope["path"])

        async def send(message):
            pass

        scope = {"type": "http", "method": "GET", "path": path, "root_path": root, "headers": []}
        asyncio.run(Gate(app, "secret", lambda line: None)(scope, None, send))
        assert bool(passed) == ((path, root) in OPEN), path


def test_the_log_has_one_line_per_request_without_its_text(server):
    server.post("/completions", {"prompt": "def secret_words(", "max_tokens": 12})
    server.post("/completions", {"prompt": "def secret_words(", "max_tokens": "x"})
    until(lambda: len(server.lines) == 2)
    told = r"POST /v1/completions 200 \d+\.\d{3} s, prompt \d+ \(cached 0\), generated 12, "
    told += r"acceptance length \d\.\d\d, length, first token \d+\.\d{3} s"
    assert re.fullmatch(told, server.lines[0]), server.lines
    assert re.fullmatch(r"POST /v1/completions 400 \d+\.\d{3} s", server.lines[1])


def test_metrics_have_vllms_names_and_the_right_counts(server, session, artifact):
    said = Model(session.metadata, lambda: session, artifact).generate("def main(", max_new_tokens=30)
    server.post("/completions", {"prompt": "def main(", "max_tokens": 30})
    server.post("/completions", {"prompt": "def main(", "max_tokens": 30})
    counted = {
        "spec_decode_num_drafts_total": 2 * said.stats.num_drafts,
        "spec_decode_num_draft_tokens_total": 2 * said.stats.num_draft_tokens,
        "spec_decode_num_accepted_tokens_total": 2 * said.stats.num_accepted_tokens,
        "spec_decode_num_accepted_tokens_per_pos_total": 2 * said.stats.num_accepted_tokens,
        "prompt_tokens_total": 2 * len(said.prompt_token_ids),
        "generation_tokens_total": 60,
        "prefix_cache_queries_total": 2 * len(said.prompt_token_ids),
        "prefix_cache_hits_total": len(said.prompt_token_ids) - 1,
        'request_success_total{finished_reason="length"': 2,
        "time_to_first_token_seconds_count": 2,
        "e2e_request_latency_seconds_count": 2,
        "request_generation_tokens_sum": 60,
    }
    for name, value in counted.items():
        assert server.metric(f"vllm:{name}") == value, name
    assert server.metric("vllm:e2e_request_latency_seconds_sum") > server.metric("vllm:time_to_first_token_seconds_sum")


def test_the_time_to_the_first_token_includes_waiting(server, held):
    client, _lines = begun(server, LONG)
    held.clear()
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(server.post, "/completions", SHORT)
        until(lambda: server.jobs.waiting == 1)
        time.sleep(0.2)
        client.close()
        held.set()
        waits.result()
    queued, first = (
        server.metric(f"vllm:{name}_seconds_sum") for name in ("request_queue_time", "time_to_first_token")
    )
    assert first > queued >= 0.2
    assert server.metric("vllm:request_prefill_time_seconds_sum") < first - 0.2


def test_an_artifact_without_logits_answers_greedily_and_one_without_a_template_continues_text(
    session, artifact, tmp_path
):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((artifact / name).read_bytes())
    model = Model(replace(session.metadata, has_logits=False), lambda: session, tmp_path)
    with served([model], tmp_path, temperature=None) as server:
        assert server.post("/completions", SHORT).status_code == 200
        for more in ({"temperature": 1}, {"structured_outputs": {"regex": "a"}}):
            answer = server.post("/completions", SHORT | more)
            assert answer.status_code == 400
            assert "needs logits, which this artifact lacks" in answer.json()["error"]["message"]
        answer = server.post("/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
        assert answer.status_code == 400 and "no chat template" in answer.json()["error"]["message"]


def test_two_models_serve_two_requests_at_once(model, artifact):
    """Each of two requests has caches of its own; a prompt goes to the model that has cached its beginning."""
    with load(artifact) as other, served([model, other], artifact) as server:
        model.forget()
        expected = model.generate("def main(", max_new_tokens=60).text
        model.forget()
        client, _lines = begun(server, LONG)
        until(lambda: server.jobs.running == 1)
        answer = server.post("/completions", {"prompt": "def main(", "max_tokens": 60}).json()
        assert answer["choices"][0]["text"] == expected
        assert server.metric("vllm:request_success_total") == 1  # the long request still runs
        client.close()
        until(lambda: server.jobs.running == 0)
        first, second = "import os\nimport sys\n", "class Reader:\n    def "
        server.post("/completions", {"prompt": first, "max_tokens": 4})
        server.post("/completions", {"prompt": second, "max_tokens": 4})
        for prompt in (first, second, first):
            usage = server.post("/completions", {"prompt": prompt + "x", "max_tokens": 4}).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 3


def command(artifact, *more) -> subprocess.Popen:
    code = "import sys; from eagle3.runner.serve.cli import main; sys.exit(main())"
    line = [sys.executable, "-c", code, str(artifact), "--port", "0", "--default", "temperature=0", *more]
    return subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def children(pid: int) -> list[int]:
    return [int(each) for file in Path(f"/proc/{pid}/task").glob("*/children") for each in file.read_text().split()]


def test_the_front_survives_the_models_process_and_sigterm_lets_running_requests_end(artifact):
    """Clients of a killed process get an error event, and the next ones 503 until it is back. The front has no torch in
    its memory, and the process ends with the front."""
    running = command(artifact, "--model-id", "own")
    try:
        url = re.search(r"^own at (\S+)$", running.stderr.readline())[1]
        health = url.removesuffix("/v1") + "/health"
        [model] = children(running.pid)
        with httpx.stream("POST", f"{url}/completions", json=LONG | {"stream": True}, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(model, signal.SIGKILL)
            *_, told, done = (line for line in lines if line)
        assert "has ended and is being started again" in json.loads(told[6:])["error"]["message"], told
        assert done == "data: [DONE]"
        refused = httpx.post(f"{url}/completions", json=SHORT)
        assert refused.status_code == 503 == httpx.get(health).status_code
        until(lambda: httpx.get(health).status_code == 200, 60)
        assert httpx.post(f"{url}/completions", json=SHORT, timeout=60).status_code == 200
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in (running.pid, *children(running.pid))]
        assert ["libtorch" in each for each in maps] == [False, True]
        answers: list[httpx.Response] = []
        given = {"model": "own", **LONG}
        thread = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{url}/completions", json=given, timeout=60))
        )
        thread.start()
        text = url.removesuffix("/v1") + "/metrics"
        until(lambda: 'num_requests_running{model_name="own"} 1.0' in httpx.get(text).text)
        running.send_signal(signal.SIGTERM)
        thread.join()
        assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] == 900
        assert running.wait(20) == 0 and not Path(f"/proc/{model}").exists()
        with pytest.raises(httpx.ConnectError):
            httpx.get(text)
    finally:
        running.kill()
        lines = running.stderr.read()
        running.stderr.close()
    told = [line for line in lines.splitlines() if not line.startswith("POST /v1/completions ")]
    assert told == ["the model's process ended with -9: it is started again"] and lines.count("\n") == 5, lines


def test_a_port_in_use_is_refused(artifact):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, line = fail_command(main, artifact, "--port", port)
    assert code == 1 and f"port {port} of 127.0.0.1 cannot be used" in line and "--port" in line


def test_the_error_for_a_foreign_address_does_not_suggest_another_port(artifact):
    code, line = fail_command(main, artifact, "--host", "203.0.113.9")
    assert code == 1 and "203.0.113.9 is no address of this machine" in line
    assert "--host 0.0.0.0" in line and "--port" not in line


def test_an_invalid_address_is_refused():
    with pytest.raises(click.ClickException, match="no address of this machine|cannot be used"):
        bind("no.such.host.invalid", 0)


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--default", "temperature"), 2, "expected NAME=VALUE"),
        (("--default", "temprature=1"), 1, "no request has such a field"),
        (("--default", "temperature=hot"), 1, "temperature: Input should be a valid number, found 'hot'"),
        (("--api-key-file", "EMPTY"), 2, "has no key"),
        (("--chain-len", "x"), 2, "neither a number of draft tokens nor auto"),
        (("--chain-len", "44"), 1, "verifies at most 3 draft tokens a round"),
    ],
)
def test_invalid_flags_of_eagle3_serve_are_refused(artifact, tmp_path, flags, code, words):
    (tmp_path / "empty").write_text("\n")
    flags = [str(tmp_path / "empty") if flag == "EMPTY" else flag for flag in flags]
    found, line = fail_command(main, artifact, "--port", "0", *flags)
    assert found == code and words in line


def test_an_artifact_without_a_tokenizer_is_not_served(artifact, tmp_path):
    (tmp_path / "model.pte").write_bytes((artifact / "model.pte").read_bytes())
    code, line = fail_command(main, tmp_path, "--port", "0")
    assert code == 1 and "no tokenizer.json" in line


def test_a_server_without_its_packages_says_what_to_install(artifact, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "starlette" else object())
    code, line = fail_command(main, artifact)
    assert code == 1 and line == "Error: starlette is not installed: type pip install 'eagle3-export[serve]'"


def test_no_request_is_taken_after_the_end(session, artifact):
    model = Model(session.metadata, lambda: session, artifact)
    with served([model], artifact) as server:
        pass
    assert not server.jobs.alive
    with pytest.raises(httpx.ConnectError):
        server.post("/completions", SHORT)
    with pytest.raises(Unavailable, match="the server is shutting down"):
        asyncio.run(server.jobs.submit([1, 2], [{}]))
