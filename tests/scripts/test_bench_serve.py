"""scripts/bench/bench_serve.py: its figures from given answers, and a run with a real server."""

from bench_serve import LIBRARY, SERVER, Heard, lines_of, main
from commands import run_command


def test_the_cost_of_http_is_computed_within_a_pass():
    heard = {
        LIBRARY: [[Heard(0.1, 1.0), Heard(0.3, 2.0)], [Heard(0.2, 2.0), Heard(0.2, 4.0)]],
        SERVER: [[Heard(0.2, 1.1), Heard(0.6, 2.2)], [Heard(0.2, 2.2), Heard(0.2, 4.4)]],
    }
    library, server, rounds = lines_of(heard, new_tokens=16, rounds=10)
    assert library == "library: first token 200.0 ms, 7.5 (5.0..10.0) tokens/s"
    assert server.startswith("eagle3-serve: first token 300.0 (200.0..400.0) ms, 6.8 (")
    assert rounds == "a round takes 450.00 (300.00..600.00) ms, the server adds 45.000 (30.000..60.000) ms: 10.0%"


def test_an_artifact_without_a_tokenizer_is_measured_by_bench_serve(artifact, tmp_path):
    (tmp_path / "model.pte").symlink_to(artifact / "model.pte")
    lines = run_command(main, tmp_path, "--repeats", 1, "--new-tokens", 4).stdout.splitlines()
    assert [line.partition(": ")[0] for line in lines[1:3]] == [LIBRARY, SERVER]
    assert lines[0].startswith("8 prompts, 4 new tokens each") and "a round takes" in lines[3]
