"""The readings of a head are measured: the right one is found, a correct head is left unchanged, and a random head is
reported as no pair."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from check_fit import HEADS, plan_of, played, randomized
from click.testing import CliRunner
from tokenizers import Tokenizer

from eagle3.export.checks.fit import chains, texts
from eagle3.export.checks.fit.chains import Chains, Trial, Trials
from eagle3.export.checks.fit.measure import fitted_plan, measure_head, read_plan
from eagle3.export.checks.fit.readings import clearly_better, expected
from eagle3.export.checks.fit.target import Measured
from eagle3.export.cli import main as export
from eagle3.export.configuration.config import ExportConfig
from eagle3.export.draft.common.field import HeadReading
from eagle3.export.draft.common.head import Pieces
from eagle3.export.draft.kinds import KINDS
from eagle3.export.fit_command import main
from eagle3.export.planning.plan import Plan, make_plan
from eagle3.targets import TARGETS
from eagle3.targets.attention import EagerAttention, KVCacheShape

ORDER, NORM = "tap_order=0,1,2", "--norm-before-residual true"


@pytest.fixture(scope="module", autouse=True)
def short_text():
    """Let everything be measured on half of the tokens that ``eagle3-fit`` takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "SEGMENTS", 4)
        patch.setattr(texts, "WRITTEN", 48)
        yield


@pytest.fixture(scope="module")
def measured(short_text):
    return Measured(plan_of("draft"))


def reading_of(plan: Plan) -> HeadReading:
    return HeadReading(plan.draft, plan.taps, plan.target_config)


def broken(head: str, **changes) -> Plan:
    plan = plan_of(head)
    fields = {field.name: field for field in KINDS[plan.draft.kind].load().FIELDS}
    reading = reading_of(plan)
    for name, value in changes.items():
        reading = fields[name].applied(reading, value)
    return read_plan(plan, reading)


def for_another_embedding(plan: Plan) -> Plan:
    """Return the plan with a head whose embedding is one row off."""

    class Shifted(type(plan.draft.source)):
        def tensors(self):
            for name, tensor in super().tensors():
                yield name, tensor.roll(1, 0) if name == "embed_tokens.weight" else tensor

    return replace(plan, draft=replace(plan.draft, source=Shifted(plan.draft.source.path)))


@pytest.mark.first(1)
@pytest.mark.parametrize("head", HEADS)
def test_a_shipped_head_fits_and_the_runners_loop_gives_the_expected_tokens_of_a_round(measured, head):
    plan = plan_of(head)
    apart = replace(plan, draft=plan.draft.in_program(shares_caches=False))  # it is measured over the target's caches
    fit, length = measure_head(measured, apart), played(plan, measured)
    assert fit.verdict == "fits" and fit.best is fit.file and not fit.best.changes
    low, high = fit.file.expected.interval
    assert 1.7 < low < length < high
    assert length == pytest.approx(fit.file.expected.length, abs=0.15)  # without the rounds that the end cuts


FAULTS = [
    ("draft", {"norm_before_residual": False, "tap_order": (1, 2, 0)}, f"{ORDER} {NORM}"),
    ("assistant", {"embeds_as_target": False}, "embeds_as_target=true"),
    ("assistant", {"state": "last_layer"}, "state=normed"),
    ("draft", {"tap_order": (2, 1, 0)}, ORDER),
    ("peagle", {"tap_order": (2, 0, 1)}, ORDER),
    ("dflash", {"embeds_as_target": True}, "embeds_as_target=false"),
]


@pytest.mark.first(2)
@pytest.mark.parametrize(("head", "fault", "typed"), FAULTS)
def test_the_reading_that_undoes_a_fault_is_found_and_named(measured, head, fault, typed):
    fit = measure_head(measured, broken(head, **fault))
    assert fit.verdict == "another reading" and fit.typed(fit.best).removeprefix("--read ") == typed
    assert fit.best.expected.interval[0] > fit.file.expected.interval[1]


@pytest.mark.first(1)
@pytest.mark.parametrize("seed", range(3))
def test_a_random_head_is_reported_as_no_pair_and_keeps_its_reading(measured, seed):
    fit = measure_head(measured, randomized(plan_of("draft"), seed))
    assert fit.verdict == "no pair" and fit.best is fit.file


def test_a_reading_that_is_better_than_others_but_gains_nothing_is_no_other_reading():
    """With fields changed, the head is accepted more often, beyond chance, in under a quarter of first proposals."""
    measured, plan = Measured(plan_of("draft"), seed=1), for_another_embedding(plan_of("draft"))
    fit = measure_head(measured, plan)
    assert fit.verdict == "no pair" and fit.best is fit.file
    better = max(fit.tried, key=lambda each: float(each.trial.first.mean()))
    assert clearly_better(better.trial, fit.file.trial, len(fit.tried))
    assert fit.facts["chance"] + 0.03 < float(better.trial.first.mean()) < 0.25
    assert fitted_plan(plan, fit)[0] is plan


@pytest.mark.parametrize(("longer", "better"), [(10, False), (20, True)])
def test_a_certain_gain_of_less_than_three_percent_is_no_better_reading(longer, better):
    """``longer`` of 200 chains of 2 tokens have one more."""
    hits = torch.tensor([[True, False]]).expand(200, 2)
    also = hits.clone()
    also[:: 200 // longer, 1] = True
    known, likely = torch.ones_like(hits), torch.rand(200, generator=torch.Generator().manual_seed(0))
    assert clearly_better(Trial(also, known, likely + 1), Trial(hits, known, likely), 20) == better


def test_the_interval_of_a_given_text_holds_the_true_length_in_95_of_100_texts():
    """The proposals are accepted independently, each with the rate of its position, so that the length is known."""
    rates, drawn = torch.tensor([0.7, 0.5, 0.3, 0.0, 0.5, 0.5, 0.5]), torch.Generator().manual_seed(0)
    length, within, widths = float(1 + rates.cumprod(0).sum()), 0, []
    for _ in range(400):
        hits = (torch.rand(200, 7, generator=drawn) < rates).cumprod(1).bool()
        low, high = expected(hits, torch.ones_like(hits)).interval
        within, widths = within + (low <= length <= high), [*widths, high - low]
    assert 0.92 * 400 < within < 0.99 * 400 and 0.2 < sum(widths) / 400 < 0.4


@pytest.mark.parametrize("window", [0, 9])
def test_every_row_of_a_chain_attends_to_what_it_would_see_if_its_chain_were_the_only_one(window):
    shape, drawn = KVCacheShape(1, 8, 64, window, torch.float32, heads=2), torch.Generator().manual_seed(0)
    pieces, anchors = Pieces(), torch.tensor([4, 11, 29])

    def rows(count: int) -> list[torch.Tensor]:
        return [torch.randn(1, count, heads, 8, generator=drawn) for heads in (2, 1, 1)]

    chains, text, steps = Chains(shape, pieces), rows(30), [rows(3) for _ in range(3)]
    found = [chains(*text, chains.rows(torch.arange(30)), 0.3)[:, anchors]]
    for step, given in enumerate(steps, 1):
        pieces.step, pieces.anchors = step, anchors
        found.append(chains(*given, chains.rows(anchors + step), 0.3))
    for place, anchor in enumerate(anchors.tolist()):
        alone = EagerAttention(shape)
        given = [
            torch.cat((part[:, : anchor + 1], *(step[index][:, place, None] for step in steps)), 1)
            for index, part in enumerate(text)
        ]
        out = [
            alone(*(part[:, at, None] for part in given), alone.rows(torch.tensor([at])), 0.3)
            for at in range(anchor + 4)
        ]
        torch.testing.assert_close(torch.cat([each[:, place, None] for each in found], 1), torch.cat(out[anchor:], 1))


def test_blocks_behind_a_given_text_are_drafted_after_every_nth_token(measured, monkeypatch):
    plan = plan_of("dflash")
    reading = reading_of(plan)
    monkeypatch.setattr(measured, "written", False)
    monkeypatch.setattr(chains, "BLOCK_ROWS", 8 * measured.chains)
    whole = Trials(reading, measured)
    monkeypatch.setattr(chains, "BLOCK_ROWS", 8 * measured.chains / 3 - 1)
    few = Trials(reading, measured)
    assert (whole.every, few.every) == (1, 4) and few.text() == f"{whole.text()}, a block behind each 4th"
    one, other = whole.run(reading, 3), few.run(reading, 3)
    ends = torch.tensor([len(each.tokens) - each.begin for each in measured.seen]).cumsum(0).tolist()
    kept = [at for begin, end in zip([0, *ends], ends, strict=False) for at in range(begin, end, 4)]
    assert torch.equal(one.hits[kept], other.hits) and torch.equal(one.known[kept], other.known)
    torch.testing.assert_close(one.likelihood[kept], other.likelihood, atol=1e-4, rtol=1e-4)


def test_a_measured_reading_fills_gaps_of_the_files_and_never_contradicts_them(measured):
    plan = broken("assistant", embeds_as_target=False)
    plan = replace(plan, draft=plan.draft.in_program(shares_caches=False))
    fit = measure_head(measured, plan)
    taken, lines = fitted_plan(plan, fit)
    assert taken.draft.embeds_as_target and taken.draft.has_cache and "it is taken" in lines[-1]
    with pytest.raises(ValueError, match=r"1\.\d\d tok.* 2\.\d\d tok.* type --read embeds_as_target=true, or"):
        fitted_plan(plan, replace(fit, open=frozenset()))


def test_a_reading_given_by_flags_replaces_that_of_the_files():
    config = ExportConfig("gemma4-tiny", backend="xnnpack", read=("tap_order=2,1,0", "rope_theta=500000"))
    plan = make_plan(config)
    assert plan.draft.tap_order == (2, 1, 0) and plan.draft.layer.rope_parameters["rope_theta"] == 500_000
    with pytest.raises(ValueError, match=r"--read taps=1: a head of the kind EAGLE-3 has aux_convention, "):
        make_plan(ExportConfig("gemma4-tiny", backend="xnnpack", read=("taps=1",)))
    with pytest.raises(ValueError, match="--read d2t=both: 'both' is none of offsets, ids: type another value"):
        make_plan(ExportConfig("gemma4-tiny", backend="xnnpack", read=("d2t=both",)))


def test_a_text_is_not_padded_as_its_tokenizer_says(tmp_path: Path):
    tokenizer = Tokenizer.from_file(str(TARGETS["gemma4-tiny"].checkpoint / "tokenizer.json"))
    (tmp_path / "text.jsonl").write_text('{"prompt": "a b"}\n')
    wanted = tokenizer.encode("a b").ids
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert texts.pieces(tmp_path, 2048, 64, 1, text=tmp_path / "text.jsonl") == [("text.jsonl", wanted)]


def test_the_command_compares_heads_and_names_the_flag_for_a_wrong_norm(tmp_path: Path):
    shutil.copytree(HEADS["draft"], tmp_path / "head")
    file = tmp_path / "head" / "config.json"
    file.write_text(file.read_text().replace('"norm_before_residual": true', '"norm_before_residual": false'))
    done = CliRunner().invoke(main, ["gemma4-tiny", str(tmp_path / "head"), "2", "--json"])
    assert done.exit_code == 0, done.output
    found, other = json.loads(done.stdout)["heads"].values()
    assert found["verdict"] == "another reading" and found["best"]["changes"] == {"norm_before_residual": True}
    assert found["file"]["interval"][1] < found["best"]["interval"][0] <= found["best"]["acceptance_length"]
    assert {"changes", "acceptance_length", "interval"} <= set(found["readings"][0]) and len(found["readings"]) > 10
    assert other["verdict"] == "fits"


def test_an_export_that_only_measures_prints_the_table_of_readings_and_writes_nothing(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(export, ["--target-model", "gemma4-tiny", "--backend", "xnnpack", "--fit-only"])
    assert done.exit_code == 0, done.output
    assert "as its files say" in done.output and "the head fits: 2." in done.output and not list(tmp_path.iterdir())
