"""``scripts/gpu/check_on_gpu.py``, run on an artifact that is compiled for the CPU, writes, compares and refuses
correctly."""

import json
import shutil
from dataclasses import replace
from unittest.mock import patch

import check_interpreted
import check_on_gpu
import pytest
from click.testing import CliRunner
from gpu_greedy import EagerGreedy
from proposed import proposed

from eagle3.export.configuration.config import ExportConfig
from eagle3.runner.artifact.opening import open_artifact
from eagle3.runner.hosts.opening import open_session
from eagle3.runner.loop.generation import complete

PROMPTS, TOKENS = ([5, 7, 11], [40, 41, 42, 43, 44, 45]), 8


@pytest.fixture(scope="module")
def artifact(host_artifact, tmp_path_factory):
    """A copy of the artifact, with the tokens of its own three methods in a file beside it."""
    copied = tmp_path_factory.mktemp("carried") / "artifact"
    shutil.copytree(host_artifact, copied)
    session, said = open_session(open_artifact(copied), "torch"), []
    session.has_speculate = False
    for prompt in PROMPTS:
        with proposed(session) as proposals:
            found = complete(session, prompt, max_new_tokens=TOKENS, stop_ids=[])
        said.append({"prompt": prompt, "margins": [1.0] * TOKENS, "token_ids": found.token_ids})
        said[-1] |= {"stats": found.stats.counts(), "proposals": proposals}
    session.close()
    check_on_gpu.expected_file(copied).write_text(json.dumps(said))
    return copied


def run(*command):
    return CliRunner().invoke(check_on_gpu.main, [str(part) for part in command])


def test_equal_results_are_printed_for_each_prompt(artifact):
    done = run("compare", artifact)
    assert done.exit_code == 0, done.output
    assert done.output.count("tokens equal, rounds equal") == 2
    made = [sum(map(len, each["proposals"])) for each in json.loads(check_on_gpu.expected_file(artifact).read_text())]
    for count in made:
        assert f"{count} of {count} proposals equal" in done.output


def test_a_different_token_and_an_artifact_that_does_not_run_are_refused(artifact, tmp_path):
    said = json.loads(check_on_gpu.expected_file(artifact).read_text())
    other, lacking = tmp_path / "other", tmp_path / "lacking"
    for folder in (other, lacking):
        shutil.copytree(artifact, folder)
    said[1]["token_ids"][3] ^= 1
    for margin, code in ((2.0, 1), (0.05, 0)):
        said[1]["margins"][3] = margin
        check_on_gpu.expected_file(other).write_text(json.dumps(said))
        done = run("compare", other)
        assert done.exit_code == code and f"parts at token 3, where the margin is {margin}" in done.output
    said[1]["token_ids"][3] ^= 1
    for given, code in (([], 0), ([[0] * len(call) for call in said[1]["proposals"]], 1)):
        changed = [said[0], said[1] | {"proposals": given or said[1]["proposals"]}]
        check_on_gpu.expected_file(other).write_text(json.dumps(changed))
        assert run("compare", other).exit_code == code
    del said[1]["token_ids"][3:]
    check_on_gpu.expected_file(other).write_text(json.dumps(said))
    assert run("compare", other).exit_code == 0  # three tokens are requested then

    def short(*given, **options):
        return complete(*given, **options | {"max_new_tokens": 2})

    with patch.object(check_on_gpu, "complete", short):
        done = run("compare", other)
    assert done.exit_code == 1 and "another number of tokens" in done.output
    done = run("compare", lacking, artifact)
    assert done.exit_code == 1 and "lacking: does not run" in done.output
    assert done.output.count("tokens equal") == 2 and done.output.endswith(f"Error: wrong: {lacking}\n")


def test_the_tokens_of_a_module_are_written_beside_its_artifact(tmp_path):
    folder = tmp_path / "artifact"
    folder.mkdir()
    greedy = EagerGreedy("cpu", ExportConfig("gemma4-tiny"))
    greedy.plan = replace(greedy.plan, eos_ids=tuple(range(1024)))  # the first 1,024 ids end the text
    with (
        patch.object(check_on_gpu, "config_of", lambda _artifact: None),
        patch.object(check_on_gpu, "EagerGreedy", lambda *_given: greedy),
        patch.object(check_interpreted, "CANDIDATES", 2),
    ):
        done = run("expect", folder, "--prompts", "1", "--tokens", "3")
        assert done.exit_code == 0, done.output
        with patch.object(EagerGreedy, "__call__", lambda *_given, **_options: ([1, 2, 3], [1.0] * 3)):
            parted = run("expect", folder, "--prompts", "1", "--tokens", "3")
    (said,) = json.loads(check_on_gpu.expected_file(folder).read_text())
    ids, margins = greedy(said["prompt"], 3, stops=False)
    assert said["token_ids"] == ids and said["margins"] == margins and len(margins) == 3 and said["proposals"]
    assert parted.exit_code == 1 and "choose other tokens" in parted.output
