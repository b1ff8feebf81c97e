"""``--draft none`` and ``--verify-rows`` export the right methods, refuse contradictory flags, and change no token."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import run_command
from eager import eager_session, eager_speculator
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_cases import PROMPT, greedy
from scripted import VOCABULARY, ScriptedSession, greedy_sequence, scripted_metadata

from eagle3.export.cli import main as export_main
from eagle3.export.configuration.backends import BACKENDS
from eagle3.export.configuration.config import ExportConfig
from eagle3.export.exporting import prepare
from eagle3.export.planning.plan import make_plan
from eagle3.runner.artifact.opening import open_artifact
from eagle3.runner.commands.run import main as run_main
from eagle3.runner.contract import DRAFT_DECODE
from eagle3.runner.hosts.opening import open_session
from eagle3.runner.hosts.session import Step
from eagle3.runner.loop.cached_tokens import CachedTokens
from eagle3.runner.loop.generation import complete
from eagle3.runner.loop.lookup_choice import LookupChoice
from eagle3.runner.model import Model
from eagle3.runner.options import Options

NONE = ExportConfig("gemma4-tiny", draft=Path("none"), backend="xnnpack", max_seq_len=256)


def lengths(config):
    return {method.name: (method.min_len, method.max_len) for method in make_plan(config).methods}


# --- the plan


def test_without_a_head_there_are_three_methods_and_the_longest_windows_of_the_kernels():
    rows = BACKENDS["xnnpack"].fast_rows  # the number depends on the processor
    assert lengths(NONE) == {"prefill": (9, 64), "target_verify": (2, rows["none"]), "decode": (1, 1)}
    assert lengths(replace(NONE, qlinear="8da4w"))["target_verify"] == (2, rows["8da4w"])
    assert lengths(replace(NONE, backend="cuda", cuda_arch="sm_90"))["target_verify"] == (2, 8)
    assert lengths(replace(NONE, verify_rows=16)) == {
        "prefill": (17, 64),
        "target_verify": (2, 16),
        "decode": (1, 1),
    }
    assert "decode" not in lengths(replace(NONE, with_forward=True))  # ExecuTorch's runner would call ``decode``


def test_a_window_longer_than_the_chain_changes_only_the_bounds_of_prefill():
    headed = ExportConfig("gemma4-tiny", backend="xnnpack", verify_rows=12)
    found = lengths(headed)
    assert found["target_verify"] == (2, 12) and found["speculate"] == (4, 4)
    assert found["prefill"] == (17, 64) and found["draft_decode"] == (1, 64)
    plan = make_plan(headed)
    assert (plan.chain_len, plan.few_rows) == (3, 16)
    assert lengths(replace(headed, max_prefill=17, verify_rows=16))["draft_decode"] == (1, 17)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"chain_len": 3}, "--chain-len needs a draft head"),
        ({"draft_qlinear": "none"}, "--draft-qlinear needs a draft head"),
        ({"aux_layers": (1, 2, 3)}, "--aux-layers needs a draft head"),
        ({"draft_rope_theta": "file"}, "--draft-rope-theta needs a draft head"),
        ({"draft": None, "verify_rows": 3}, "--verify-rows 3 is too short .* 4 rows: type --verify-rows 4"),
    ],
)
def test_flags_that_contradict_draft_none_or_verify_rows_are_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        prepare(replace(NONE, dry_run=True, **flags))


# --- the runner


class HeadlessSession(ScriptedSession):
    """A scripted target without a draft: its methods return no features."""

    def __init__(self, target, **lengths):
        metadata = scripted_metadata(chain_len=0, **lengths)
        super().__init__(replace(metadata, has_draft=False, has_draft_cache=False), target, None)

    def _target(self, tokens, input_pos):
        return Step(super()._target(tokens, input_pos).ids, None)

    draft_decode = None


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_any_target_without_a_head_gives_its_greedy_tokens_with_and_without_lookup(data):
    table = data.draw(st.lists(st.integers(0, 2), min_size=20, max_size=20), "target")
    rows = data.draw(st.integers(2, 9), "verify rows")
    window = data.draw(st.sampled_from([0, 9, 12]), "window")
    session = HeadlessSession(
        lambda prefix: table[(3 * prefix[-1] + len(prefix) // 3) % 20], verify_rows=rows, window=window
    )
    session.has_decode = data.draw(st.booleans(), "has decode")
    cached, lookup, said = CachedTokens(), LookupChoice(0, rows - 1), [0]
    for _ in range(3):
        prompt = (said + data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=12)))[-40:]
        used = data.draw(st.sampled_from([None, lookup]))
        result = complete(session, prompt, max_new_tokens=20, cached=cached, lookup=used)
        assert result.token_ids == greedy_sequence(session.greedy, prompt, 20)
        said = prompt + result.token_ids


def test_without_a_head_a_chain_length_is_refused_and_auto_means_none():
    session = HeadlessSession(greedy, verify_rows=4)
    with pytest.raises(ValueError, match="chain length 3, but the artifact has no draft head"):
        complete(session, PROMPT, chain=3)
    model = Model(session.metadata, lambda: session)
    result = model.generate(PROMPT, max_new_tokens=9, chain_len="auto", ngram=False)
    assert result.token_ids == greedy_sequence(greedy, PROMPT, 9)
    assert model.chain.note is None


def test_the_lookup_is_on_by_default_on_a_cpu_if_windows_exceed_the_chain():
    cpu = {"manifest": {"backend": "xnnpack"}}
    session = HeadlessSession(lambda prefix: (5 * (len(prefix) % 7)) % VOCABULARY, verify_rows=4, **cpu)
    model, prompt = Model(session.metadata, lambda: session), [(5 * (at % 7)) % VOCABULARY for at in range(20)]
    said = model.generate(prompt, max_new_tokens=30)
    assert said.stats.num_lookup_accepted_tokens > 15
    assert model.replay(said).divergence is None
    assert not model.generate(prompt, max_new_tokens=30, ngram=False).stats.num_drafts
    headed = Model(scripted_metadata(**cpu), lambda: session)
    assert headed.lookup_for(Options()) is None and headed.lookup_for(Options(chain_len=0, ngram=True)) is headed.lookup
    longer = Model(scripted_metadata(verify_rows=5, **cpu), lambda: session)
    assert longer.lookup_for(Options()) is longer.lookup and longer.lookup_for(Options(chain_len=0)) is None
    on_cuda = Model(scripted_metadata(verify_rows=5, manifest={"backend": "cuda"}), lambda: session)
    assert on_cuda.lookup_for(Options()) is None


# --- the methods, eagerly and exported


@pytest.fixture(scope="module")
def eager():
    return eager_session(make_plan(NONE))


def test_the_targets_methods_give_the_same_with_and_without_a_head(eager):
    headed = eager_session(make_plan(replace(NONE, draft=None, verify_rows=7)))
    step = eager.prefill(*[torch.arange(5, 25)[None], eager.positions[:20]])
    assert step.feature is None and step.logits.shape == (1, 1, eager.metadata.vocab_size)
    assert not list(eager_speculator(make_plan(NONE)).draft.parameters())
    for prompt in ([2, 17], [(7 * at + 3) % 2000 + 5 for at in range(80)]):
        plain = complete(headed, prompt, max_new_tokens=24, chain=0, stop_ids=[])
        for lookup in (None, LookupChoice(0, 6)):
            assert complete(eager, prompt, max_new_tokens=24, stop_ids=[], lookup=lookup).token_ids == plain.token_ids
        for lookup in (None, LookupChoice(3, 6)):
            both = complete(headed, prompt, max_new_tokens=24, stop_ids=[], lookup=lookup)
            assert both.token_ids == plain.token_ids


@pytest.mark.whole
def test_a_small_target_without_a_head_is_exported_checked_and_run(tmp_path):
    """The target has two layers with random weights. Its text repeats, so that windows of the lookup are verified."""
    out = tmp_path / "out"
    small = ("--draft", "none", "--random-weights", "--layers", "2", "--max-seq-len", "128", "--verify-rows", "6")
    flags = "--target-model", "gemma4-tiny", "--backend", "xnnpack", *small, "--no-sessions"
    run_command(export_main, *flags, "--output-dir", out)
    artifact = open_artifact(out)
    assert not artifact.metadata.has_draft and artifact.metadata.window == 6
    assert artifact.metadata.manifest["format_version"] == 6 and artifact.metadata.manifest["draft"] is None
    session = open_session(artifact)
    with pytest.raises(ValueError, match=DRAFT_DECODE):
        session.draft_decode(*[session.positions[:1]] * 3)
    prompt = [5, 6, 7, 8, 9] * 6
    plain, looked_up = (
        complete(session, prompt, max_new_tokens=40, stop_ids=[], lookup=each) for each in (None, LookupChoice(0, 5))
    )
    assert plain.token_ids == looked_up.token_ids
    assert looked_up.stats.method_calls["target_verify"] == looked_up.stats.num_lookup_drafts > 0
    asked = ("--prompt-tokens", "5,6,7,5,6,7,5,6", "--max-new-tokens", "16", "--verify-lossless")
    assert "identical: 16 tokens" in run_command(run_main, out, *asked).stderr
