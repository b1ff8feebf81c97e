"""The report of eagle3-bench on the shipped artifact is correct."""

import copy
import json
from dataclasses import replace

import pytest
from commands import fail_command, run_command

from eagle3.runner.commands.bench import main
from eagle3.runner.commands.bench_figures import against, divergence, make_report
from eagle3.runner.commands.bench_measure import (
    Completion,
    Configuration,
    Outcome,
    check_same_tokens,
    configurations_of,
    make_workload,
    measure,
)
from eagle3.runner.commands.bench_report import as_markdown, as_text, identity_text
from eagle3.runner.loop.statistics import GenerationStats
from eagle3.runner.model import Model, Result
from eagle3.runner.options import Options
from eagle3.runner.text.prompts import Prompt

LINES = """\
{"prompt": "def main(argv=None):\\n    ", "category": "code"}

{"prompt_tokens": [2, 318, 1664, 11], "category": "ids"}
{"turns": ["import os", "and sys"], "category": "talk"}
"""
GENERATIONS = 4


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text(LINES)
    return file


@pytest.fixture(scope="module")
def report(artifact, prompts):
    args = "--max-new-tokens", 12, "--chain-len", "1,3,auto", "--repeats", 2
    return json.loads(run_command(main, artifact, "--prompts", prompts, *args, "--json").stdout)


def bare(session, **changes) -> Model:
    """Return a model without a tokenizer that uses the session of all tests."""
    return Model(replace(session.metadata, **changes), lambda: session)


def test_every_configuration_is_measured_and_gives_the_same_tokens(report):
    assert [figures["chain_len"] for figures in report["ways"]] == [0, 1, 3, "auto"]
    alone, *others = report["ways"]
    assert alone["categories"]["code"]["stats"]["generation_tokens"] == 2 * 12
    assert alone["stats"]["methods"]["decode"]["calls"] >= alone["stats"]["generation_tokens"] - 2 * GENERATIONS
    assert alone["stats"]["num_drafts"] == 0
    for figures in others:
        assert figures["divergence_from_no_speculation"] is None
        assert figures["stats"]["generation_tokens"] == alone["stats"]["generation_tokens"]
        reused = {name: part["stats"]["reused_prompt_tokens"] > 0 for name, part in figures["categories"].items()}
        assert reused == {"code": False, "ids": False, "talk": True}
    one, three, _ = others
    assert one["stats"]["num_draft_tokens"] == one["stats"]["num_drafts"] > three["stats"]["num_drafts"] > 0
    assert len(three["stats"]["acceptance_rate_per_position"]) == 3
    assert {"target_verify / decode"} == set(report["step_ratios"])
    for figures in report["ways"]:
        parts = [part["stats"] for part in figures["categories"].values()]
        for count in ("generation_tokens", "num_drafts", "num_accepted_tokens"):
            assert sum(part[count] for part in parts) == figures["stats"][count]


def test_the_text_report_ends_with_what_is_identical(report):
    text = as_text(report).splitlines()
    assert text[-1] == "identical to greedy decoding without speculation"
    table = [line for line in as_markdown(report).splitlines() if line.startswith("|")]
    head, _, *rows = (line.strip("|").split("|") for line in table[:6])
    names = "chain length, tokens/s, ratio, acceptance length, by position, first token"
    assert ", ".join(cell.strip() for cell in head).startswith(names)
    assert [row[0].strip() for row in rows] == ["0", "1", "3", "auto"]
    assert f"{report['ways'][2]['stats']['mean_acceptance_length']:.2f}" in table[4]
    for fact in ("target gemma4-tiny", "backend xnnpack", "cores", "torch "):
        assert fact in as_markdown(report)


def test_a_configuration_with_different_tokens_is_reported(report):
    parting = copy.deepcopy(report)
    where = {"line": 3, "turn": 0, "position": 7, "token": 5, "other_token": None, "differing": 1, "answers": 4}
    parting["ways"][2]["divergence_from_no_speculation"] = where
    last = as_text(parting).splitlines()[-1]
    assert last.startswith(
        "chain length 3: differs from greedy decoding without speculation (line 3, turn 0, position 7"
    )
    assert last.endswith("token 5, there None); 1 of 4 completions differ")


def test_a_difference_that_rounding_does_not_explain_is_reported(session):
    model = bare(session)
    result = model.generate([2, 318, 1664, 11], max_new_tokens=8)
    wrong = replace(result, token_ids=[*result.token_ids[:5], 7, *result.token_ids[6:]])
    configuration = Configuration("out", model, 3)
    ours, theirs = (Outcome(configuration, [[Completion(Prompt(1, tokens=[2]), 0, each)]]) for each in (wrong, result))
    found = against(ours, theirs, "other")["divergence_from_other"]
    assert (found["position"], found["near_tie"]) == (5, False) and found["top2_margin"] > 0
    assert "not a near-tie: please report it" in identity_text(found, "other")


def test_without_decode_the_baseline_runs_by_verify_windows(session, prompts):
    lacking = copy.copy(session)
    lacking.has_decode = False
    (prompts.parent / "ids.jsonl").write_text('{"prompt_tokens": [2, 318, 1664, 11]}')
    workload = make_workload(prompts.parent / "ids.jsonl", {"max_new_tokens": 8}, False)
    outcomes, step_ms = measure(configurations_of("out", bare(lacking), None), workload, 1, lambda: None)
    found = make_report(outcomes, step_ms, workload)
    assert set(found["ways"][0]["stats"]["methods"]) == {"target_verify"}
    assert found["ways"][1]["divergence_from_no_speculation"] is None
    assert found["step_ratios"] == {} and list(found["step_ms"]) == ["target_verify"]


def test_all_configurations_sample_with_the_same_seed(artifact, prompts):
    args = "--prompts", prompts, "--max-new-tokens", 12, "--temperature", 1, "--repeats", 1
    report = json.loads(run_command(main, artifact, *args, "--json").stdout)
    assert report["ways"][1]["divergence_from_no_speculation"] is None
    assert as_text(report).splitlines()[-1] == "identical to sampling without speculation"
    assert f"seed {report['options']['seed']}" in as_text(report)


def test_a_compared_artifact_is_measured_in_turn_with_the_first(artifact, prompts):
    args = "--prompts", prompts, "--max-new-tokens", 8, "--repeats", 1, "--compare", artifact, "--json"
    report = json.loads(run_command(main, artifact, *args).stdout)
    assert [figures["artifact"] for figures in report["ways"]] == [str(artifact)] * 2 + [f"{artifact} again"] * 2
    divergences = [figures.get("divergence_from_first_artifact", "none") for figures in report["ways"]]
    assert divergences == ["none"] * 2 + [None] * 2
    assert all(figures["ratio_to_first_artifact"]["median"] > 0 for figures in report["ways"][2:])
    assert f"{artifact} again: identical to {artifact}" in as_text(report)


def test_artifacts_with_different_tokens_are_not_compared(session, artifact, tmp_path):
    one = Configuration("one", bare(session), 0)
    with pytest.raises(ValueError, match="one has a vocabulary of 2048 tokens, other one of 2047"):
        check_same_tokens(one, Configuration("other", bare(session, vocab_size=2047), 0))
    tokenizer = json.loads((artifact / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    first, second, *_ = words
    words[first], words[second] = words[second], words[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    models = (Model(session.metadata, lambda: session, folder) for folder in (artifact, tmp_path))
    with pytest.raises(ValueError, match="the tokenizers of one and other differ"):
        check_same_tokens(*map(Configuration, ("one", "other"), models, (0, 0)))


def generated(tokens: list[int], seconds: float = 1.0) -> Completion:
    stats = GenerationStats(generations=1, generation_tokens=len(tokens), decode_seconds=seconds)
    return Completion(Prompt(3, tokens=[1]), 0, Result([1], tokens, None, "length", None, Options(), stats))


def test_a_ratio_of_speeds_is_computed_within_a_pass():
    configuration = Configuration("out", None, 3)
    ours = Outcome(configuration, [[generated([1, 2], seconds)] for seconds in (1, 2, 8)])
    theirs = Outcome(configuration, [[generated([1, 2], seconds)] for seconds in (1, 8, 2)])
    assert against(ours, theirs, "other")["ratio_to_other"] == {"median": 1, "min": 0.25, "max": 4}


@pytest.mark.parametrize(
    ("ours", "theirs", "where"),
    [
        ([[1, 2]], [[1, 2]], None),
        ([[1, 2], [3, 4]], [[1, 2], [3, 5]], (1, 4, 5, 1)),
        ([[1, 2], [6]], [[1, 2, 3], [7]], (2, None, 3, 2)),
    ],
)
def test_the_first_divergence_is_found(ours, theirs, where):
    found = divergence(map(generated, ours), theirs)
    assert where == (found and tuple(found[name] for name in ("position", "token", "other_token", "differing")))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--chain-len", "1,x"), "'x' is neither a number of draft tokens nor auto"),
        (("--chain-len", "3,4"), "line 1: chain length 4, but the artifact verifies at most 3"),
        (("--temperature", "-1"), "temperature"),
        (("--markdown", "--json"), "give one of --markdown and --json"),
    ],
)
def test_invalid_requests_are_refused_before_anything_is_measured(args, message, artifact, prompts, monkeypatch):
    monkeypatch.setattr("eagle3.runner.commands.bench_figures.measure", None)
    assert message in fail_command(main, artifact, "--prompts", prompts, *args)[1]


def scaled(report, length, by):
    """Return the report with the median speed of one configuration changed by a factor."""
    changed = copy.deepcopy(report)
    for figures in changed["ways"]:
        alone = report["ways"][0]["tokens_per_second"]["median"]
        if "ratio_to_no_speculation" in figures:
            figures["ratio_to_no_speculation"]["median"] = figures["tokens_per_second"]["median"] / alone
        if figures["chain_len"] == length:
            figures["tokens_per_second"]["median"] *= by
    return changed


@pytest.mark.parametrize(("length", "by", "noisy"), [(3, 1, False), (3, 1.03, True), (0, 1.1, True)])
def test_a_ratio_that_differs_from_that_of_the_medians_is_reported_as_noise(report, length, by, noisy):
    changed = scaled(report, length, by)
    told = as_text(changed), as_markdown(changed)
    assert all(("the machine was noisy" in text) is noisy for text in told)


def test_bench_names_a_line_that_is_no_prompt(artifact, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"text": "a"}\n')
    assert f"{file} line 2: " in fail_command(main, artifact, "--prompts", file)[1]
