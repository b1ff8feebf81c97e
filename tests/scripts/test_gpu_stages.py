"""The stages of ``scripts/gpu/gpu_run.py``, on an artifact that is compiled for the CPU: what they measure, and which
results they refuse."""

import json
import shutil
from contextlib import contextmanager
from dataclasses import replace

import gpu_rounds
import gpu_stages
import pytest
import torch
from artifact_tokens import with_tokens
from gpu_run import EXPECTED
from gpu_stages import NotRun, Wrong

from eagle3.runner.loop.generation import complete

WEIGHTS = dict.fromkeys(("target_verify", "draft_decode", "prefill"), {"weight_bytes": 10**6})


@pytest.fixture(scope="module")
def artifact(host_artifact, tmp_path_factory):
    return with_tokens(host_artifact, tmp_path_factory.mktemp("carried") / "artifact")


@pytest.fixture
def on_the_host(monkeypatch):
    monkeypatch.setattr(gpu_rounds, "recorded", lambda _folder: WEIGHTS)
    monkeypatch.setattr(gpu_rounds, "copied", lambda: 1e9)


def test_a_round_and_its_kernels_are_measured(host_artifact, on_the_host):
    facts = gpu_rounds.measure_round(host_artifact, "off")
    assert set(facts["ms"]) == {"target_verify", "draft_decode", "speculate"} and facts[gpu_rounds.A_ROUND] > 0
    assert facts["of copy bandwidth"] == pytest.approx(4e6 / (1e-3 * facts["ms"]["speculate"]) / 1e9, rel=0.05)
    assert facts["kernels"] == {"of": "speculate", "all, us": 0}  # no kernel runs on a GPU


def test_an_artifact_is_opened_once_for_all_prefills(host_artifact, on_the_host, monkeypatch):
    opened, count = gpu_rounds.opened, []
    monkeypatch.setattr(gpu_rounds, "opened", lambda *given: count.append(1) or opened(*given))
    monkeypatch.setattr(gpu_rounds, "PREFILL_ROWS", (16, 64, 4096))
    facts = gpu_rounds.measure_prefill(host_artifact)
    assert facts["16 tokens"]["ms"] < facts["64 tokens"]["ms"] and len(count) == 1
    assert facts["4096 tokens"].startswith("not run: chunks have")


def test_kernels_are_distinguished_by_their_full_names_and_grids():
    def launched(name, grid, microseconds):
        return {"cat": "kernel", "name": name, "dur": microseconds, "args": {"grid": grid}}

    long = "triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_and_much_more_that_two_kernels_have_in_common_"
    events = [launched(f"{long}{number}", [1, 1, 1], 2.0) for number in (3, 4, 3, 4)]
    events += [launched("int4", [336, 1, 1], 50.0), launched("int4", [42, 1, 1], 20.0), {"cat": "cpu_op", "name": "x"}]
    found = gpu_rounds.kernel_times(events, rounds=2)
    assert list(found.values()) == [39.0, [0.5, 25.0], [0.5, 10.0], [1.0, 2.0], [1.0, 2.0]]
    assert list(found)[1] == "int4 [336, 1, 1]" and list(found)[3].endswith("_common_3 [1, 1, 1]")


def test_a_head_that_proposes_a_block_is_timed_with_one_draft_call_per_round(host_artifact, on_the_host, monkeypatch):
    opened, given = gpu_rounds.opened, {"proposals": 3}

    @contextmanager
    def changed(*arguments):
        with opened(*arguments) as session:
            session.metadata = replace(session.metadata, **given)
            yield session

    monkeypatch.setattr(gpu_rounds, "opened", changed)
    facts = gpu_rounds.measure_round(host_artifact, "auto")
    assert facts["of copy bandwidth"] == pytest.approx(2e6 / (1e-3 * facts["ms"]["speculate"]) / 1e9, rel=0.05)
    given["has_draft"] = False
    with pytest.raises(NotRun, match="no draft head"):
        gpu_rounds.measure_round(host_artifact, "auto")


def test_captured_graphs_are_not_reported_for_a_session_that_failed(host_artifact, tmp_path):
    facts = {}
    (tmp_path / "model.pte").write_bytes(b"another file")
    with pytest.raises(ValueError, match="no ExecuTorch program"), gpu_rounds.opened(tmp_path, "auto", facts):
        pass
    with pytest.raises(RuntimeError, match="failed on"), gpu_rounds.opened(host_artifact, "auto", facts):
        raise RuntimeError("speculate failed on cuda:0")
    assert not facts


# --- Tokens


def test_equal_tokens_are_said_for_each_prompt(artifact):
    lines = gpu_stages.compare(artifact)["prompts"]
    made = [sum(map(len, each["proposals"])) for each in json.loads((artifact / EXPECTED).read_text())]
    assert [line.startswith("tokens equal, rounds equal") for line in lines] == [True, True]
    assert all(line.endswith(f"{count} of {count} proposals equal") for line, count in zip(lines, made, strict=True))


def test_other_tokens_proposals_and_lengths_are_refused(artifact, tmp_path, monkeypatch):
    said, other = json.loads((artifact / EXPECTED).read_text()), tmp_path / "other"
    shutil.copytree(artifact, other)

    def compare(changed):
        (other / EXPECTED).write_text(json.dumps(changed))
        return gpu_stages.compare(other)

    said[1]["token_ids"][3] ^= 1
    said[1]["margins"][3] = 0.05  # a near-tie
    assert "parts at token 3, where the margin is 0.05" in compare(said[1:])["prompts"][0]
    said[1]["margins"][3] = 2.0
    with pytest.raises(Wrong, match="parts at token 3, where the margin is 2.0"):
        compare(said[1:])
    said[1]["token_ids"][3] ^= 1
    with pytest.raises(Wrong, match="0 of .* proposals equal"):
        compare([said[1] | {"proposals": [[0] * len(call) for call in said[1]["proposals"]]}])

    def short(*given, **options):
        return complete(*given, **options | {"max_new_tokens": 2})

    monkeypatch.setattr(gpu_stages, "complete", short)
    with pytest.raises(Wrong, match="another number of tokens"):
        compare(said[1:])


# --- Many rounds


def test_a_soak_repeats_greedy_sampled_and_structured_texts(host_artifact, tmp_path, monkeypatch):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def main("}\n')
    for name, value in {"ROUNDS": 60, "BEFORE": 20, "TOKENS": 12, "PROMPTS": prompts, "SECONDS": 600}.items():
        monkeypatch.setattr(gpu_stages, name, value)
    facts = gpu_stages.soaked(host_artifact)
    assert 60 <= facts["rounds"] < 90
    assert set(facts["grown, MiB"]) == ({"host", "GPU"} if torch.cuda.is_available() else {"host"})

    sizes = iter([{"host": 100.0, "GPU": 900.0}, {"host": 110.0, "GPU": 917.0}])
    monkeypatch.setattr(gpu_stages, "memory", lambda: next(sizes))
    with pytest.raises(Wrong, match="memory grew in 6. rounds: GPU 17.0 MiB$"):
        gpu_stages.soaked(host_artifact)

    texts = iter(["a", "a", "b"])
    monkeypatch.setattr(gpu_stages, "generated", lambda *_given: (next(texts), 9))
    with pytest.raises(Wrong, match="after 18 rounds the greedy text of 'def main.' is another one"):
        gpu_stages.soaked(host_artifact)
