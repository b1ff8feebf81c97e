"""scripts/bench/bench_serve.py: its figures from given answers, and a run with a real server."""

import json

import pytest
from bench_serve import LIBRARY, SERVER, Heard, as_text, main, report_of
from commands import run_command


def test_server_ratios_are_computed_within_a_pass():
    heard = {
        LIBRARY: [[Heard(11, 0.1, 1.0), Heard(21, 0.3, 2.0)], [Heard(11, 0.2, 2.0), Heard(21, 0.2, 4.0)]],
        SERVER: [[Heard(11, 0.2, 1.1), Heard(21, 0.6, 2.2)], [Heard(11, 0.2, 2.2), Heard(21, 0.2, 4.4)]],
    }
    report = report_of(heard, rounds=10)
    library, server = report["sides"]
    assert library["tokens_per_second"] == {"median": 7.5, "min": 5, "max": 10}
    assert server["tokens_per_second_to_library"]["min"] == server["tokens_per_second_to_library"]["max"] == 0.9091
    assert server["first_token_to_library"] == {"median": 1.5, "min": 1, "max": 2}
    assert report["round_ms"] == {"median": 450, "min": 300, "max": 600}
    assert report["server_adds_ms_a_round"] == {"median": 45, "min": 30, "max": 60}
    assert report["server_adds_share_of_a_round"]["max"] == pytest.approx(0.1)
    text = as_text(report | {"asked": {"passes": 2}, "machine": "m"})
    assert (
        "A round takes 450.00 (300.00..600.00) ms, and 45.000 (30.000..60.000) ms more with the server: 10.0%" in text
    )


def test_an_artifact_without_a_tokenizer_is_measured_by_bench_serve(artifact, tmp_path):
    (tmp_path / "model.pte").symlink_to(artifact / "model.pte")
    report = json.loads(run_command(main, tmp_path, "--repeats", 1, "--new-tokens", 4, "--json").stdout)
    assert [side["side"] for side in report["sides"]] == [LIBRARY, SERVER]
    assert all(side["tokens_per_second"]["min"] > 0 for side in report["sides"])
    assert report["asked"]["prompts"] == 8 and report["round_ms"]["min"] > 0
