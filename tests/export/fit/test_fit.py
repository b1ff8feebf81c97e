"""The readings of a head are measured: the right one is found, a correct head is left unchanged, and a random head is
reported as no pair."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from check_fit import HEADS, Fault, plan_of, played, randomized
from click.testing import CliRunner

from eagle3.export.configuration.config import ExportConfig
from eagle3.export.draft.common.field import HeadReading
from eagle3.export.draft.kinds import KINDS
from eagle3.export.draft.loading import load_draft
from eagle3.export.fit.attention import WholeText
from eagle3.export.fit.fitting import Measured, fitted_plan, read_plan
from eagle3.export.fit.trials import Trials
from eagle3.export.fit_command import main
from eagle3.export.planning.plan import make_plan
from eagle3.targets.attention import EagerAttention


@pytest.fixture(scope="module")
def measured():
    return Measured(plan_of("draft"))


def broken(head: str, **changes) -> Fault:
    plan = plan_of(head)
    fields = {field.name: field for field in KINDS[plan.draft.kind].load().FIELDS}
    reading = HeadReading(plan.draft, plan.taps, plan.target_config)
    for name, value in changes.items():
        reading = fields[name].applied(reading, value)
    return Fault(changes, read_plan(plan, reading))


@pytest.mark.first(2)
@pytest.mark.parametrize("head", HEADS)
def test_a_shipped_head_fits_and_keeps_the_reading_of_its_files(measured, head):
    fit = measured.fit(plan_of(head))
    assert fit.verdict == "fits" and fit.best is fit.file and not fit.best.changes
    low, high = fit.of(fit.file).interval
    assert low > 1.8 and low < fit.of(fit.file).length < high


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("head", "fault", "typed"),
    [
        ("draft", {"norm_before_residual": False}, "--norm-before-residual true"),
        ("draft", {"tap_order": (2, 1, 0)}, "--read tap_order=0,1,2"),
        (
            "draft",
            {"norm_before_residual": False, "tap_order": (1, 2, 0)},
            "--read tap_order=0,1,2 --norm-before-residual true",
        ),
        pytest.param("peagle", {"tap_order": (2, 0, 1)}, "--read tap_order=0,1,2", marks=pytest.mark.whole),
        ("assistant", {"embeds_as_target": False}, "--read embeds_as_target=true"),
        ("assistant", {"state": "last_layer"}, "--read state=normed"),
        pytest.param("dflash", {"embeds_as_target": True}, "--read embeds_as_target=false", marks=pytest.mark.whole),
    ],
)
def test_the_reading_that_undoes_a_fault_is_found_and_named(measured, head, fault, typed):
    fit = measured.fit(broken(head, **fault).plan)
    assert fit.verdict == "another reading" and fit.typed(fit.best) == typed
    assert fit.of(fit.best).interval[0] > fit.of(fit.file).interval[1]


@pytest.mark.first(1)
@pytest.mark.parametrize("seed", range(5))
def test_a_random_head_is_reported_as_no_pair_and_keeps_its_reading(measured, seed):
    fit = measured.fit(randomized(plan_of("draft"), seed))
    assert fit.verdict == "no pair" and fit.best is fit.file


def test_chains_after_every_token_equal_those_of_the_head_with_its_cache(measured):
    plan = plan_of("draft")
    reading = HeadReading(plan.draft, plan.taps, plan.target_config)
    trials = Trials(reading, measured.target, measured.seen, 4, torch.float32)
    seen = measured.seen[0]
    head = trials.head(reading)
    taps = seen.feature_of(plan.taps)
    rows = len(seen.tokens) - 1
    feature = head.fuse(taps)[:, :rows]
    ids, _ = head.chains(seen.tokens[None, 1:], feature, 4)
    cached = load_draft(plan.draft, 200, torch.float32, EagerAttention, measured.target)
    for row in (3, 40, 80):
        token, state, at = seen.tokens[None, 1 : row + 2], feature[:, : row + 1], torch.arange(row + 1)
        for step in range(4):
            logits, recurrent = cached(token, state, at)
            token, state, at = cached.target_ids(logits[:, -1:]), recurrent[:, -1:], at[-1:] + 1
            assert int(token) == int(ids[row, step])


def test_a_whole_text_at_once_gives_the_states_of_its_chunks():
    plan = plan_of("draft")
    module = plan.spec.module()
    tokens = torch.randint(2048, (1, 150), generator=torch.Generator().manual_seed(0))
    whole, chunked = (
        module.load(plan.target_source.tensors(), plan.target_config, 200, torch.float32, attention)
        for attention in (WholeText, EagerAttention)
    )
    taps = (0, 3, 6)
    _, states = whole(tokens, torch.arange(150), taps)
    parts = [chunked(tokens[:, at : at + 50], torch.arange(at, at + 50), taps)[1] for at in (0, 50, 100)]
    for place, state in enumerate(states):
        torch.testing.assert_close(state, torch.cat([part[place] for part in parts], 1), atol=1e-4, rtol=1e-4)


@pytest.mark.whole
def test_a_measured_reading_fills_gaps_of_the_files_and_never_contradicts_them(measured):
    fault = broken("assistant", embeds_as_target=False)
    plan, lines = fitted_plan(fault.plan, measured.fit(fault.plan))
    assert plan.draft.embeds_as_target and "it is taken" in lines[-1]
    fault = broken("draft", norm_before_residual=False)
    with pytest.raises(ValueError, match=r"1\.\d\d tok.* 2\.\d\d tok.* type --norm-before-residual true, or"):
        fitted_plan(fault.plan, measured.fit(fault.plan))


def test_a_reading_given_by_flags_replaces_that_of_the_files(tmp_path: Path):
    config = ExportConfig("gemma4-tiny", backend="xnnpack", read=("tap_order=2,1,0", "rope_theta=500000"))
    plan = make_plan(config)
    assert plan.draft.tap_order == (2, 1, 0) and plan.draft.layer.rope_parameters["rope_theta"] == 500_000
    with pytest.raises(ValueError, match=r"--read taps=1: a head of the kind EAGLE-3 has aux_convention, "):
        make_plan(ExportConfig("gemma4-tiny", backend="xnnpack", read=("taps=1",)))
    with pytest.raises(ValueError, match="--read d2t=both: 'both' is none of offsets, ids: type another value"):
        make_plan(ExportConfig("gemma4-tiny", backend="xnnpack", read=("d2t=both",)))


@pytest.mark.whole
def test_eagle3_fit_prints_json_for_a_head_whose_file_has_a_wrong_norm(tmp_path: Path):
    shutil.copytree(HEADS["draft"], tmp_path / "head")
    file = tmp_path / "head" / "config.json"
    file.write_text(file.read_text().replace('"norm_before_residual": true', '"norm_before_residual": false'))
    done = CliRunner().invoke(main, ["gemma4-tiny", str(tmp_path / "head"), "--json", "--seed", "3"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["verdict"] == "another reading" and found["best"]["changes"] == {"norm_before_residual": True}
    assert found["file"]["interval"][1] < found["best"]["interval"][0] <= found["best"]["acceptance_length"]
    assert {"changes", "acceptance_length", "interval"} <= set(found["readings"][0]) and len(found["readings"]) > 10


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("head", "recipe"), [*((head, "none") for head in HEADS), ("draft", "8da8w"), ("draft", "8da4w")]
)
def test_the_expected_tokens_of_a_round_equal_those_of_the_runners_loop(measured, head, recipe):
    plan = plan_of(head, qlinear=recipe, draft_qlinear=recipe if recipe == "none" else "8da8w")
    fit = measured.fit(plan)
    expected = fit.of(fit.file)
    low, high = expected.interval
    length = played(plan, measured)
    assert low <= length <= high
    if recipe == "none":
        assert length == pytest.approx(expected.length, abs=0.15)  # the rounds that the text's end cuts are missing


def test_quantization_costs_few_tokens_in_8_bits_and_more_in_4(measured):
    fine, coarse = (measured.quantized(plan_of("draft", qlinear=recipe)) for recipe in ("8da8w", "8da4w"))
    assert fine.changed < 0.02 < coarse.changed < 0.15
    assert fine.after.interval[0] < fine.before.length and "--qlinear 8da8w" in fine.line()
    assert measured.quantized(plan_of("draft", draft_qlinear="none")) is None
