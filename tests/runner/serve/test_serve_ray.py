"""Two replicas run on this machine under Ray Serve, and a file of prompts with Ray Data. The tests are skipped without
Ray, which is too large to be installed only for them: pip install 'eagle3-export[ray]'."""

import json
import time

import httpx
import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'eagle3-export[ray]'")
serve = pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'eagle3-export[ray]'")

from commands import run_command  # noqa: E402
from served import free_port  # noqa: E402

from eagle3.runner.commands.run import main  # noqa: E402
from eagle3.runner.model import Model  # noqa: E402

FIRST, SECOND = "import os\nimport sys\n\n\ndef first(", "class Reader:\n    def second("


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
        # The replicas of Ray Serve take one of the four CPUs, and those of a file of prompts two.
        yield
        serve.shutdown()
        ray.shutdown()


@pytest.fixture(scope="module")
def url(cluster, artifact, tmp_path_factory):
    from eagle3.runner.serve.ray import Settings, app

    key, port = tmp_path_factory.mktemp("key") / "key", free_port()
    key.write_text("secret\n")
    asked = Settings(artifact=str(artifact), replicas=2, cpus=0.5, model_id="tiny", api_key_file=str(key))
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(app(asked.model_copy(update={"defaults": {"temperature": 0}})), route_prefix="/tiny")
    return f"http://127.0.0.1:{port}/tiny"


@pytest.fixture
def client(url):
    with httpx.Client(base_url=url, headers={"Authorization": "Bearer secret"}, timeout=60) as made:
        yield made


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level("WARNING")


def completion(client, prompt, **more) -> dict:
    answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 8, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_ray_answers_equal_the_librarys_and_prompts_go_to_the_replica_with_their_prefix(client, session, artifact):
    alone = Model(session.metadata, lambda: session, artifact)
    for number in range(4):
        for begun in (FIRST, SECOND):
            prompt = begun + f"x{number}"
            answer = completion(client, prompt)
            assert answer["choices"][0]["text"] == alone.generate(prompt, max_new_tokens=8).text
            details = answer["usage"]["prompt_tokens_details"]
            if number:  # a single cache would hold the other prompt
                assert details["cached_tokens"] >= len(alone.encode(begun)) - 2


def test_a_client_that_disconnects_frees_its_replica(client):
    long = {"prompt": FIRST, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=long) as answer:
        next(answer.iter_lines())
    end = time.monotonic() + 20
    while 'finished_reason="abort"' not in client.get("/metrics").text:  # one replica or the other answers
        assert time.monotonic() < end
        time.sleep(0.05)


PROMPTS = [{"prompt": f"def f{number}(", "max_new_tokens": 12} for number in range(40)]
PROMPTS += [
    {"turns": ["Open a file.", "Close it."], "max_new_tokens": 8},
    {"prompt": "x", "seed": 3, "temperature": 0.9},
]


def lines_of(file) -> dict:
    """Return the results by line and turn, without values that depend on time and on cached tokens."""
    records = [json.loads(line) for line in file.read_text().splitlines()]
    return {(each["line"], each["turn"]): (each["token_ids"], each["request"]) for each in records}


def test_ray_data_gives_the_results_of_one_model_and_continues_an_interrupted_batch(cluster, artifact, tmp_path):
    file, alone, spread = tmp_path / "prompts.jsonl", tmp_path / "alone.jsonl", tmp_path / "spread.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in PROMPTS))
    run_command(main, artifact, "--prompts", file, "--output", alone, "--seed", 5)
    run_command(main, artifact, "--prompts", file, "--output", spread, "--seed", 5, "--ray", 2)
    assert lines_of(spread) == lines_of(alone) and len(lines_of(alone)) == len(PROMPTS) + 1
    whole = spread.read_text().splitlines(keepends=True)
    spread.write_text("".join(whole[:10]) + whole[10][:30])  # interrupted in the middle of a line
    told = run_command(main, artifact, "--prompts", file, "--output", spread, "--seed", 5, "--ray", 2).stderr
    assert spread.read_text().startswith("".join(whole[:10])) and lines_of(spread) == lines_of(alone)
    assert "10 of them in" in told


def test_too_many_ray_replicas_are_refused_and_waiting_ones_are_reported(capsys):
    from eagle3.runner.commands.batch_ray import _check_room

    _check_room({"CPU": 4.0}, {"CPU": 2.0}, 2, "CPU")
    assert not capsys.readouterr().err
    _check_room({"CPU": 4.0}, {"CPU": 1.5}, 2, "CPU")
    assert "Ray has 1.5 of 4 CPUs free" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--ray 8 takes 8 GPUs.*but the Ray cluster has 0: type --ray 1"):
        _check_room({"CPU": 4.0}, {"CPU": 4.0}, 8, "GPU")
