"""``scripts/gpu/gpu_check.py`` without a GPU: its reference, its stages, and their report."""

import json
import subprocess
from contextlib import contextmanager
from dataclasses import replace

import gpu_artifacts
import gpu_check
import gpu_greedy
import gpu_rounds
import gpu_soak
import gpu_steps
import pytest
import torch
from click.testing import CliRunner
from torchao.utils import TorchAOBaseTensor

from eagle3.export.configuration.config import ExportConfig
from eagle3.export.lowering.cuda.graph.dispatch import small_m_dispatch
from eagle3.export.pipeline import make_metadata
from eagle3.runner.hosts.session import EagerSession

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def greedy():
    config = ExportConfig("gemma4-tiny", cuda_arch=None if torch.cuda.is_available() else "sm_90")
    return gpu_greedy.EagerGreedy("cpu", config)


def test_a_module_moved_to_a_device_keeps_its_weights_and_their_types(greedy):
    weights = {name: value for name, value in greedy.target.named_parameters()}
    gpu_greedy.placed(greedy.target, "cpu")
    for name, value in greedy.target.named_parameters():
        assert type(value) is type(weights[name]), name
    assert sum(isinstance(value, TorchAOBaseTensor) for value in weights.values()) == 43


def test_a_session_with_the_same_weights_is_identical_and_a_contrary_one_is_refused(greedy, monkeypatch):
    monkeypatch.setattr(gpu_greedy, "NEW_TOKENS", 6)
    session = EagerSession(greedy.speculator, make_metadata(greedy.plan, {}))
    with small_m_dispatch(greedy.plan.few_rows):
        facts = gpu_greedy.compare(session, greedy, [PROMPT])
        assert facts["identical to eager greedy"] == "1 of 1 prompts"

        def contrary(prompt, count):
            ids, _ = greedy(prompt, count)
            return [*ids[:3], ids[3] + 1, *ids[4:]], [margin] * count

        margin = 0.05
        assert gpu_greedy.compare(session, contrary, [PROMPT])["first divergence (prompt, token, margin)"] == (
            0,
            3,
            0.05,
        )
        margin = 2.0
        with pytest.raises(
            RuntimeError, match="prompt 0 differs from eager greedy at token 3, by a margin of 2.0 deviations"
        ):
            gpu_greedy.compare(session, contrary, [PROMPT])


def noted(folder, unable=None) -> gpu_steps.Report:
    return gpu_steps.Report(folder, {"gpu": "none"}, unable)


def read(folder) -> list[dict]:
    return json.loads((folder / gpu_steps.REPORT).read_text())["steps"]


def fail(facts):
    raise ValueError("wrong\nnumbers")


def skip(facts):
    raise gpu_steps.NotRun("there is no export")


def lack(facts):
    import torch.nothing_of_this_name  # noqa: F401


def lack_ours(facts):
    import eagle3.runner.nothing_of_this_name  # noqa: F401


def test_every_step_gets_an_outcome_and_the_next_one_runs(tmp_path, capsys):
    report = noted(tmp_path)

    def steps():
        for name, run in {"broken": fail, "not needed": skip, "of another PyTorch": lack, "ours": lack_ours}.items():
            report.step(name, run)
        report.step("fine", lambda facts: facts.update({"tokens/s": 3}))
        report._start -= gpu_steps.BUDGET
        report.step("late", fail)
        raise KeyError("of the stage")

    report.stage("some", steps)
    report.stage("other", lambda: report.step("in time again", lambda facts: None))
    assert [step["status"].split(" 'torch.")[0].split(" 'eagle3.")[0] for step in read(tmp_path)] == [
        "FAILED: ValueError: wrong numbers",
        "not run: there is no export",
        "not run: ModuleNotFoundError: No module named",
        "FAILED: ModuleNotFoundError: No module named",
        "ok",
        "not run: no time left",
        "not run: no time left",
        "ok",
    ]
    assert report.failed and "tokens/s 3" in capsys.readouterr().out


def test_the_json_is_complete_after_each_step_and_keeps_other_stages(tmp_path):
    def of(report, *names):
        return lambda: [report.step(name, lambda facts: None) for name in names]

    first = noted(tmp_path)
    first.stage("tiny", of(first, "a", "b"))
    first.stage("wide", of(first, "c"))
    second = noted(tmp_path)
    second.stage("wide", of(second, "d", "e"))
    assert [step["name"] for step in read(tmp_path)] == ["a", "b", "d", "e"]
    other = gpu_steps.Report(tmp_path, {"gpu": "another"})
    other.stage("tiny", of(other, "f"))
    assert [step["name"] for step in read(tmp_path)] == ["f"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_every_step_of_every_stage_is_not_run(tmp_path):
    done = CliRunner().invoke(gpu_check.main, ["--output-dir", str(tmp_path / "out"), "--work", str(tmp_path)])
    assert done.exit_code == 0, done.output
    steps = read(tmp_path / "out")
    assert {step["stage"] for step in steps} == set(gpu_check.STAGES)
    assert all(step["status"].startswith("not run: this needs an NVIDIA GPU") for step in steps)


def test_a_failed_export_says_its_last_line_and_keeps_its_log(tmp_path, monkeypatch):
    check = gpu_artifacts.Check(noted(tmp_path / "out"), tmp_path, (), 4)
    with pytest.raises(RuntimeError, match="2, see tiny-native-export.log: .*--no-such-flag"):
        gpu_artifacts.export(check, tmp_path / "tiny-native", "--no-such-flag")
    assert "such option" in (tmp_path / "out" / "tiny-native-export.log").read_text()

    def late(*args, timeout, **kwargs):
        raise subprocess.TimeoutExpired("export", timeout)

    monkeypatch.setattr(gpu_artifacts.subprocess, "run", late)
    with pytest.raises(RuntimeError, match="no end in time, see tiny-native-export.log"):
        gpu_artifacts.export(check, tmp_path / "tiny-native")


def test_steps_are_not_run_with_another_pytorch_or_without_a_compiler(tmp_path, monkeypatch):
    check = gpu_artifacts.Check(noted(tmp_path), tmp_path, (), 4)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.11.0")
    with pytest.raises(gpu_steps.NotRun, match="torch 2.11.0: lowering for CUDA without a GPU was tested only with"):
        gpu_check.export_named(check, tmp_path / "tiny-named")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(gpu_steps.NotRun, match="no-such-compiler is not on PATH"):
        gpu_artifacts.export(check, tmp_path / "tiny-native")


def test_the_stages_of_gpu_check_measure_an_artifact(host_artifact, greedy, tmp_path, monkeypatch):
    """The artifact is compiled for the CPU; every method is called and every figure is computed."""
    weights = {"weight_bytes": 10**6}
    monkeypatch.setattr(
        gpu_rounds, "recorded", lambda folder: dict.fromkeys(("target_verify", "draft_decode", "prefill"), weights)
    )
    monkeypatch.setattr(gpu_artifacts.Check, "copied", 1e9)
    for name in ("reset_peak_memory_stats", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    check = gpu_artifacts.Check(noted(tmp_path), tmp_path, (), 4)
    facts = {}
    gpu_rounds.measure_round(facts, check, host_artifact, "off")
    assert set(facts["ms"]) == {"target_verify", "draft_decode", "speculate"} and facts["a round, ms"] > 0
    assert facts["of copy bandwidth"] == pytest.approx(4e6 / (1e-3 * facts["ms"]["speculate"]) / 1e9, rel=0.05)
    facts = {}
    gpu_rounds.measure_prefill(facts, check, host_artifact, 64)
    assert facts["tokens/s"] > 0
    with pytest.raises(gpu_steps.NotRun, match="its chunks are of"):
        gpu_rounds.measure_prefill(facts, check, host_artifact, 4096)
    found = gpu_rounds.kernels_of_a_round(host_artifact)
    assert found == {"of": "speculate", "all, us": 0}  # no kernel runs on a GPU
    facts = {}
    gpu_check.run_layers(facts, host_artifact)
    assert facts["tokens/s"] > 0 and facts["graphs"] == "captured"


def test_several_artifacts_are_timed_in_turn_and_compared(tmp_path, monkeypatch):
    tiles, records, broken = (tmp_path / name for name in ("tiles", "records", "broken"))
    milliseconds = {("tiles", "auto"): 10.0, ("tiles", "off"): 12.0, ("records", "auto"): 8.5, ("records", "off"): 9.0}

    def measure(facts, _check, artifact, graphs):
        facts[gpu_rounds.A_ROUND] = milliseconds[artifact.name, graphs]

    monkeypatch.setattr(gpu_rounds, "measure_round", measure)
    monkeypatch.setattr(gpu_rounds, "kernels_of_a_round", lambda artifact: {"of": artifact.name})

    def steps_of(*artifacts):
        report = noted(tmp_path)
        check = gpu_artifacts.Check(report, tmp_path, (), 4, artifacts)
        report.stage("round", lambda: gpu_rounds.measure_rounds(check))
        return {step["name"]: step for step in read(tmp_path)}

    steps = steps_of(tiles, records)
    assert list(steps)[:2] == ["tiles: by CUDA graphs", "tiles: without graphs"] and len(steps) == 7
    assert steps["records: its kernels"]["facts"] == {"of": "records"}
    assert steps["compared"]["facts"] == {
        "by CUDA graphs": {"tiles": [10.0, 1.0], "records": [8.5, 0.85]},
        "without graphs": {"tiles": [12.0, 1.0], "records": [9.0, 0.75]},
    }
    assert steps_of(tiles, broken)["compared"]["status"] == "not run: fewer than two artifacts were timed"
    assert list(steps_of(tiles)) == ["by CUDA graphs", "without graphs", "its kernels"]


def test_kernels_are_distinguished_by_their_full_names_and_grids():
    def launched(name, grid, microseconds):
        return {"cat": "kernel", "name": name, "dur": microseconds, "args": {"grid": grid}}

    long = "triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_and_much_more_that_two_kernels_have_in_common_"
    events = [launched(f"{long}{number}", [1, 1, 1], 2.0) for number in (3, 4, 3, 4)]
    events += [launched("int4", [336, 1, 1], 50.0), launched("int4", [42, 1, 1], 20.0), {"cat": "cpu_op", "name": "x"}]
    found = gpu_rounds.kernel_times(events, rounds=2)
    assert list(found.values()) == [39.0, [0.5, 25.0], [0.5, 10.0], [1.0, 2.0], [1.0, 2.0]]
    assert list(found)[1] == "int4 [336, 1, 1]" and list(found)[3].endswith("_common_3 [1, 1, 1]")


def test_a_head_that_proposes_a_block_is_timed_with_one_draft_call_per_round(host_artifact, tmp_path, monkeypatch):
    monkeypatch.setattr(
        gpu_rounds, "recorded", lambda folder: dict.fromkeys(("target_verify", "draft_decode"), {"weight_bytes": 10**6})
    )
    monkeypatch.setattr(gpu_artifacts.Check, "copied", 1e9)
    opened = gpu_rounds.opened
    given = {"proposals": 3}

    @contextmanager
    def changed(*arguments):
        with opened(*arguments) as session:
            session.metadata = replace(session.metadata, **given)
            yield session

    monkeypatch.setattr(gpu_rounds, "opened", changed)
    check, facts = gpu_artifacts.Check(noted(tmp_path), tmp_path, (), 4), {}
    gpu_rounds.measure_round(facts, check, host_artifact, "off")
    assert facts["of copy bandwidth"] == pytest.approx(2e6 / (1e-3 * facts["ms"]["speculate"]) / 1e9, rel=0.05)
    given["has_draft"] = False
    with pytest.raises(gpu_steps.NotRun, match="no draft head"):
        gpu_rounds.measure_round(facts, check, host_artifact, "off")


def test_captured_graphs_are_not_reported_for_a_session_that_failed(host_artifact, tmp_path):
    facts = {}
    (tmp_path / "model.pte").write_bytes(b"another file")
    with pytest.raises(ValueError, match="no ExecuTorch program"), gpu_artifacts.opened(tmp_path, "auto", facts):
        pass
    with pytest.raises(RuntimeError, match="failed on"), gpu_artifacts.opened(host_artifact, "auto", facts):
        raise RuntimeError("speculate failed on cuda:0")
    assert not facts


def test_a_soak_repeats_greedy_sampled_and_structured_texts(host_artifact, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_soak, "ROUNDS", 60)
    monkeypatch.setattr(gpu_soak, "BEFORE", 20)
    monkeypatch.setattr(gpu_soak, "TOKENS", 12)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def main("}\n')
    check = gpu_artifacts.Check(noted(tmp_path), tmp_path, (host_artifact,), 4)

    def steps():
        check.report.stage("soak", lambda: gpu_soak.soak(check, prompts))
        return read(tmp_path)[-1]

    step = steps()
    assert step["status"] == "ok" and 60 <= step["facts"]["rounds"] < 90
    assert set(step["facts"]["grown, MiB"]) == ({"host", "GPU"} if torch.cuda.is_available() else {"host"})

    sizes = iter([{"host": 100.0, "GPU": 900.0}, {"host": 110.0, "GPU": 917.0}])
    monkeypatch.setattr(gpu_soak, "memory", lambda: next(sizes))
    assert "memory grew in 6" in (said := steps()["status"]) and said.endswith("rounds: GPU 17.0 MiB")

    texts = iter(["a", "a", "b"])
    monkeypatch.setattr(gpu_soak, "generated", lambda *_given: (next(texts), 9))
    assert "after 18 rounds the greedy text of 'def main(' is another one" in steps()["status"]

    check = gpu_artifacts.Check(noted(tmp_path), tmp_path, (), 4)
    assert steps()["status"].startswith("not run: name gemma4-tiny's artifact")
