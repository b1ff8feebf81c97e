"""The readings of a head are measured: the right one is found, a correct head is left unchanged, and a random head is
reported as no pair."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from check_fit import HEADS, Fault, plan_of, played, randomized
from click.testing import CliRunner
from tokenizers import Tokenizer

from eagle3.export.configuration.config import ExportConfig
from eagle3.export.draft.common.field import HeadReading
from eagle3.export.draft.common.head import Pieces
from eagle3.export.draft.kinds import KINDS
from eagle3.export.draft.loading import load_draft
from eagle3.export.fit import texts
from eagle3.export.fit.attention import Chains, WholeText
from eagle3.export.fit.fitting import Measured, fitted_plan, read_plan
from eagle3.export.fit.trials import Trial, Trials
from eagle3.export.fit.verdict import clearly_better, of_given_text
from eagle3.export.fit_command import main
from eagle3.export.planning.plan import Plan, make_plan
from eagle3.targets import TARGETS
from eagle3.targets.attention import EagerAttention, KVCacheShape


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


def for_another_embedding(plan: Plan) -> Plan:
    """Return the plan with a head whose embedding is one row off."""

    class Shifted(type(plan.draft.source)):
        def tensors(self):
            for name, tensor in super().tensors():
                yield name, tensor.roll(1, 0) if name == "embed_tokens.weight" else tensor

    return replace(plan, draft=replace(plan.draft, source=Shifted(plan.draft.source.path)))


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


def test_a_reading_in_doubt_is_compared_on_a_second_text():
    measured = Measured(plan_of("peagle"), seed=1)
    fit = measured.fit(broken("peagle", aux_layers=(1, 3, 6)).plan)
    assert fit.typed(fit.best) == "--aux-convention input"
    assert len(fit.best.trial.hits) == len(fit.file.trial.hits) == measured.longer.chains > measured.over.chains


@pytest.mark.whole
def test_the_search_goes_on_from_a_better_reading(measured):
    fit = measured.fit(broken("dflash", aux_convention="output", tap_order=(0, 2, 1)).plan)
    assert fit.typed(fit.best) == "--aux-convention input --read tap_order=0,1,2"


@pytest.mark.first(1)
@pytest.mark.parametrize("seed", range(5))
def test_a_random_head_is_reported_as_no_pair_and_keeps_its_reading(measured, seed):
    fit = measured.fit(randomized(plan_of("draft"), seed))
    assert fit.verdict == "no pair" and fit.best is fit.file


def test_a_reading_that_is_better_than_others_but_gains_nothing_is_no_other_reading():
    """With one field changed, the head is accepted twice as often, beyond chance, in a sixth of the first proposals."""
    measured, plan = Measured(plan_of("draft"), seed=1), for_another_embedding(plan_of("draft"))
    fit = measured.fit(plan)
    assert fit.verdict == "no pair" and fit.best is fit.file
    better = max(fit.tried, key=lambda each: float(each.trial.first.mean()))
    assert clearly_better(better.trial, fit.file.trial, len(fit.tried))
    assert fit.facts["chance"] + 0.04 < float(better.trial.first.mean()) < 0.25
    assert fitted_plan(plan, fit)[0] is plan


@pytest.mark.parametrize(("longer", "better"), [(10, False), (20, True)])
def test_a_certain_gain_of_less_than_three_percent_is_no_better_reading(longer, better):
    """``longer`` of 200 chains of 2 tokens have one more."""
    hits = torch.tensor([[True, False]]).expand(200, 2)
    also = hits.clone()
    also[:: 200 // longer, 1] = True
    known, likely = torch.ones_like(hits), torch.rand(200, generator=torch.Generator().manual_seed(0))
    own, other = Trial(hits, known, likely, 100), Trial(also, known, likely + 1, 100)
    assert clearly_better(other, own, 20) == better


def proposed_with_a_cache(measured, plan, seen, row: int, length: int) -> list[int]:
    """Return a chain behind one row of a text, as the head with its own cache drafts it."""
    head = load_draft(plan.draft, 200, torch.float32, EagerAttention, measured.over.target)
    token, at = seen.tokens[None, 1 : row + 2], torch.arange(row + 1)
    state, found = head.fuse(seen.feature_of(plan.taps))[:, : row + 1], []
    for _ in range(length):
        logits, recurrent = head(token, state, at)
        token, state, at = head.target_ids(logits[:, -1:]), recurrent[:, -1:], at[-1:] + 1
        found.append(int(token))
    return found


@pytest.mark.parametrize("window", [0, 9])
def test_every_row_of_a_chain_attends_to_what_it_would_see_if_its_chain_were_the_only_one(window):
    shape, drawn = KVCacheShape(1, 8, 64, window, torch.float32, heads=2), torch.Generator().manual_seed(0)
    pieces, anchors = Pieces(), torch.tensor([4, 11, 29])

    def rows(count: int) -> list[torch.Tensor]:
        return [torch.randn(1, count, heads, 8, generator=drawn) for heads in (2, 1, 1)]

    chains, text, steps = Chains(shape, pieces), rows(30), [rows(3) for _ in range(3)]
    found = [chains(*text, chains.rows(torch.arange(30)), 0.3)[:, anchors]]
    for step, given in enumerate(steps, 1):
        pieces.step, pieces.anchors, pieces.kept = step, anchors, torch.arange(3)
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


def test_chains_behind_many_rows_equal_those_of_the_head_with_its_cache(measured):
    plan, seen, rows = plan_of("draft"), measured.over.seen[0], list(range(31, 90, 4))
    reading = HeadReading(plan.draft, plan.taps, plan.target_config)
    trials = Trials(reading, measured.over, 4, torch.float32)
    feature = trials.head(reading).fuse(seen.feature_of(plan.taps))[:, :-1]
    wanted = torch.tensor([proposed_with_a_cache(measured, plan, seen, row, 4) for row in rows])
    for steps in range(5):  # a chain whose proposal number ``steps`` is not wanted ends there
        other = wanted.clone()
        other[::2, steps:] = -1
        given = seen.tokens[None, 1:], feature, torch.arange(feature.shape[1]), torch.tensor(rows), other
        hits, _ = trials.head(reading).chains(*given, trials.pieces)
        assert hits.sum(1).tolist() == [steps if place % 2 == 0 else 4 for place in range(len(rows))]


@pytest.mark.parametrize("head", ["draft", "dflash"])
def test_a_reading_that_is_given_up_could_not_have_been_better(measured, head):
    plan = broken(head, tap_order=(1, 2, 0)).plan
    fit = measured.fit(plan)
    reading = HeadReading(plan.draft, plan.taps, plan.target_config)
    trials = Trials(reading, measured.over, 3, torch.float32)
    begun = [each for each in fit.tried if len(each.trial.hits) <= trials.half]
    assert 5 < len(begun) < len(fit.tried) - 2 and fit.best not in begun
    assert min(len(each.trial.hits) for each in begun) < trials.half  # behind one piece
    for each in begun:
        whole = trials.run(each.reading)
        assert len(whole.hits) == 2 * trials.half and not clearly_better(whole, fit.file.trial, 1)
        assert torch.equal(whole.first_chains(len(each.trial.hits)).hits, each.trial.hits)


def test_blocks_behind_a_given_text_are_drafted_after_every_nth_token(measured, monkeypatch):
    plan = plan_of("dflash")
    reading = HeadReading(plan.draft, plan.taps, plan.target_config)
    given = replace(measured.over, written=False)
    monkeypatch.setattr(texts, "BLOCK_ROWS", 8 * given.chains)
    whole = Trials(reading, given, 3, torch.float32)
    monkeypatch.setattr(texts, "BLOCK_ROWS", 8 * given.chains / 3 - 1)
    few = Trials(reading, given, 3, torch.float32)
    assert (whole.every, few.every) == (1, 4) and few.text() == f"{whole.text()}, a block behind each 4th"
    one, other = whole.run(reading), few.run(reading)
    ends = torch.tensor([len(each.tokens) - each.begin for each in given.seen]).cumsum(0).tolist()
    kept = [at for begin, end in zip([0, *ends], ends, strict=False) for at in range(begin, end, 4)]
    assert torch.equal(one.hits[kept], other.hits) and torch.equal(one.known[kept], other.known)
    torch.testing.assert_close(one.likelihood[kept], other.likelihood, atol=1e-4, rtol=1e-4)
    assert few.half == sum(at < ends[2] for at in kept)


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


def test_the_interval_of_a_given_text_holds_the_true_length_in_95_of_100_texts():
    """The proposals are accepted independently, each with the rate of its position, so that the length is known."""
    rates, texts, drawn = torch.tensor([0.7, 0.5, 0.3, 0.0, 0.5, 0.5, 0.5]), 400, torch.Generator().manual_seed(0)
    length, within, widths = float(1 + rates.cumprod(0).sum()), 0, []
    for _ in range(texts):
        hits = (torch.rand(200, 7, generator=drawn) < rates).cumprod(1).bool()
        expected = of_given_text(Trial(hits, torch.ones_like(hits), torch.zeros(200), 100))
        low, high = expected.interval
        within, widths = within + (low <= length <= high), [*widths, high - low]
    assert 0.92 * texts < within < 0.99 * texts and 0.2 < sum(widths) / texts < 0.4


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


def test_a_text_is_not_padded_as_its_tokenizer_says(tmp_path):
    tokenizer = Tokenizer.from_file(str(TARGETS["gemma4-tiny"].checkpoint / "tokenizer.json"))
    (tmp_path / "text.jsonl").write_text('{"prompt": "a b"}\n')
    expected = tokenizer.encode("a b").ids
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (piece,) = texts.pieces(tmp_path, 2048, 64, 1, text=tmp_path / "text.jsonl")
    assert piece.ids == expected
