"""eagle3-bench: what it reports is what happened, over the shipped artifact."""

import json

import pytest
from commands import fail_command, run_command

from eagle3.runner.artifact import open_artifact, open_session
from eagle3.runner.bench.cli import main, measure
from eagle3.runner.bench.measure import first_divergence
from eagle3.targets import TARGETS

CHECKPOINT = TARGETS["gemma4-tiny"].checkpoint


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "def main(argv=None):\\n    "}\n\n{"prompt_tokens": [2, 318, 1664, 11]}\n')
    return file


def test_every_way_is_measured_and_all_agree(artifact, prompts):
    args = (artifact, "--prompts", prompts, "--max-new-tokens", 24, "--checkpoint", CHECKPOINT)
    report = json.loads(run_command(main, *args, "--json").stdout)
    assert report["divergence_from_decode"] is None
    assert report["divergence_from_transformers"] is None
    assert report["speculation"]["tokens"] == report["no_speculation"]["tokens"] <= 48
    stats, methods = report["stats"], report["speculation"]["methods"]
    assert methods["target_verify"]["calls"] >= stats["num_drafts"] > 0
    assert report["no_speculation"]["methods"]["decode"]["calls"] == report["no_speculation"]["tokens"] - 2
    assert 0 < report["speculation"]["loop_share"] < 0.5
    assert len(report["ratios"]) == 5
    text = run_command(main, *args).stdout
    assert "identical to greedy decoding by transformers" in text
    assert "identical to greedy decoding without speculation" in text


def test_an_artifact_without_decode_is_measured_without_it(artifact):
    session = open_session(open_artifact(artifact))
    session.has_decode = False
    report = measure(session, [[2, 318, 1664, 11]], 8, None)
    assert "no_speculation" not in report
    assert report["ratios"] == {}
    assert list(report["step_ms"]) == ["target_verify"]


@pytest.mark.parametrize(
    ("ours", "theirs", "where"),
    [
        ([[1, 2]], [[1, 2]], None),
        ([[1, 2], [3, 4]], [[1, 2], [3, 5]], (1, 1)),
        ([[1, 2]], [[1, 2, 3]], (0, 2)),
        ([[]], [[1]], (0, 0)),
    ],
)
def test_the_first_divergence_is_found(ours, theirs, where):
    assert first_divergence(ours, theirs) == where


def test_a_line_that_is_no_prompt_is_named(artifact, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"text": "a"}\n')
    assert f"{file} line 2: " in fail_command(main, artifact, "--prompts", file)[1]
