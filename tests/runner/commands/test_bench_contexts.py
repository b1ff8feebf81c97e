"""eagle3-bench --context makes prompts of the given lengths whose end repeats their beginning, and reports figures for
each length."""

import json

import pytest
from commands import fail_command, run_command

from eagle3.runner.commands.bench import main
from eagle3.runner.commands.bench_measure import make_workload, with_contexts
from eagle3.runner.commands.bench_report import as_markdown
from eagle3.runner.model import Model

BOS = 2
LINES = [[BOS, 10, 11, 12, 13, 14], [BOS, 20, 21, 22], [BOS, 30, 31, 32, 33]]
ASKED = "--max-new-tokens", 8, "--chain-len", 3, "--repeats", 1


def write(file, prompts, **keys):
    file.write_text("".join(json.dumps({"prompt_tokens": tokens} | keys) + "\n" for tokens in prompts))
    return file


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return write(tmp_path_factory.mktemp("prompts") / "ids.jsonl", LINES, category="ids")


@pytest.fixture
def model(session):
    return Model(session.metadata, lambda: session)


def test_a_prompt_begins_with_its_text_and_ends_with_half_of_it(prompts, model):
    made = with_contexts(make_workload(prompts, {}, False), [12, 20], [model]).prompts
    assert [(prompt.line, prompt.category, len(prompt.tokens)) for prompt in made] == [
        (line, str(length), length) for length in (12, 20) for line in (1, 2, 3)
    ]
    assert made[0].tokens == [BOS, 10, 11, 12, 13, 14, 20, 21, 22, 10, 11, 12]
    assert made[1].tokens == [BOS, 20, 21, 22, 30, 31, 32, 33, 10, 11, 20, 21]
    assert made[5].tokens == [BOS, 30, 31, 32, 33, *[10, 11, 12, 13, 14, 20, 21, 22] * 2][:18] + [30, 31]


@pytest.fixture(scope="module")
def report(artifact, prompts):
    return json.loads(run_command(main, artifact, "--prompts", prompts, "--context", "80,24", *ASKED, "--json").stdout)


def test_each_context_has_its_figures(report):
    assert report["contexts"] == [24, 80] and "| context |" in as_markdown(report)
    for figures in report["ways"]:
        assert list(figures["categories"]) == ["24", "80"]
        for length, found in figures["categories"].items():
            assert found["stats"]["prompt_tokens"] == len(LINES) * int(length)
            assert found["stats"]["generation_tokens"] == len(LINES) * 8
            assert found["time_to_first_token_ms"]["median"] > 0
        assert figures.get("divergence_from_no_speculation") is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--context", "2k"], "a context of 2048 and 8 new tokens pass the artifact's 1024 slots"),
        (["--context", "6"], "line 1 has 5 tokens, too many for a context of 6"),
        (["--context", "4k,many"], "'many' is no number of tokens"),
        (["--context", "64", "--chat"], "leave --chat and dialogues out"),
    ],
)
def test_a_context_that_cannot_be_made_is_refused_in_one_line(artifact, prompts, given, said):
    assert said in fail_command(main, artifact, "--prompts", prompts, *ASKED, *given)[1]
