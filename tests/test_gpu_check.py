"""What ``scripts/gpu_check.py`` judges by, on the CPU: eager greedy decoding of packed weights, and its comparison."""

import gpu_check
import pytest
import torch
from torchao.utils import TorchAOBaseTensor

from eagle3.export.lowering.cuda.dispatch import small_m_dispatch
from eagle3.export.pipeline import make_metadata
from eagle3.runner.session import EagerSession

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def greedy():
    return gpu_check.EagerGreedy("cpu", None if torch.cuda.is_available() else "sm_90")


def test_a_moved_module_keeps_its_weights_and_their_kinds(greedy):
    weights = {name: value for name, value in greedy.target.named_parameters()}
    gpu_check.placed(greedy.target, "cpu")
    for name, value in greedy.target.named_parameters():
        assert type(value) is type(weights[name]), name
    assert sum(isinstance(value, TorchAOBaseTensor) for value in weights.values()) == 43


def test_a_session_of_the_same_weights_is_identical_and_another_is_not(greedy, monkeypatch):
    monkeypatch.setattr(gpu_check, "NEW_TOKENS", 6)
    session = EagerSession(greedy.speculator, make_metadata(greedy.plan, {}))
    with small_m_dispatch(greedy.plan.small_m_limit):
        facts = gpu_check.compare(session, greedy, [PROMPT])
        assert facts["identical to eager greedy"] == "1 of 1 prompts"

        def contrary(prompt, count):
            ids, _ = greedy(prompt, count)
            return [*ids[:3], ids[3] + 1, *ids[4:]], [margin] * count

        margin = 0.1
        assert gpu_check.compare(session, contrary, [PROMPT])["first divergence (prompt, token, margin)"] == (0, 3, 0.1)
        margin = 2.0
        with pytest.raises(RuntimeError, match="prompt 0 parts from eager greedy at token 3, by a margin of 2.0"):
            gpu_check.compare(session, contrary, [PROMPT])


def test_a_step_that_fails_or_finds_no_time_is_reported_and_the_next_runs(capsys):
    def fail(facts):
        raise ValueError("wrong\nnumbers")

    def skip(facts):
        raise gpu_check.NotRun("there is no export")

    report = gpu_check.Report()
    report.step("broken", fail)
    report.step("not needed", skip)
    report.step("fine", lambda facts: facts.update({"tokens/s": 3}))
    report.start -= gpu_check.BUDGET
    report.step("late", fail)
    statuses = [step.status for step in report.steps]
    reasons = ["not run: there is no export", "ok", "not run: no time left"]
    assert statuses == ["FAILED: ValueError: wrong numbers", *reasons]
    assert report.failed and "tokens/s 3" in capsys.readouterr().out
