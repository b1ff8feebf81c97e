"""Targets with any kind of state are measured on texts that are not mixed into each other: as transformers computes
them, and as the runner's loop decodes them."""

from types import SimpleNamespace

import pytest
import torch
from check_fit import plan_of, played
from recurrent_pairs import CONFIGS, recurrent_plan, trained

from eagle3.export.fit import texts
from eagle3.export.fit.attention import WholeText
from eagle3.export.fit.fitting import Measured
from eagle3.export.fit.seen import look
from eagle3.export.fit.streamed import in_memory
from eagle3.export.fit.texts import Piece
from eagle3.targets.state_mixers import token_by_token

PLAYED = ("lfm2", "bamba", "kimi_linear", "qwen3_5_text")
"""A target of each kind of state: short convolutions, Mamba 2, Kimi's delta attention and the gated delta rule."""


@pytest.mark.first(4)
@pytest.mark.parametrize("name", list(dict.fromkeys((*PLAYED, *CONFIGS))))
def test_each_text_of_a_target_with_states_is_transformers_own(name, tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "SEGMENTS", 2)
    monkeypatch.setattr(texts, "WRITTEN", 20)
    plan, model = recurrent_plan(name, tmp_path)
    measured = Measured(plan)
    assert measured.writes and len(measured.over.seen) == 2
    for seen in measured.over.seen:
        with token_by_token(model):
            expected = model(seen.tokens[None], use_cache=False).logits[0]
        found = measured.over.target.logits(seen.final)[0]
        torch.testing.assert_close(found, expected, atol=1e-3 * float(expected.std()), rtol=1e-3)
        assert torch.equal(seen.greedy, found.argmax(-1)) and torch.equal(seen.tokens[32:], seen.greedy[31:-1])


@pytest.mark.first(1)
@pytest.mark.parametrize("name", PLAYED)
def test_the_runners_loop_gives_the_expected_tokens_for_a_target_with_states(name, tmp_path):
    plan, _ = recurrent_plan(name, tmp_path)
    measured = Measured(plan)
    plan = trained(plan, measured)
    fit = measured.fit(plan)
    low, high = fit.of(fit.file).interval
    assert fit.verdict == "fits" and 1.5 < low < played(plan, measured) < high < 3.99


def test_a_state_of_a_kind_that_nobody_knows_does_not_reach_another_text():
    """The target adds to each row the sum of the rows before it, which it forgets at position 0."""
    plan = plan_of("draft")
    own = in_memory(plan, 60, torch.float32, WholeText)
    held = torch.zeros(1, 1, plan.target_config.hidden_size)

    def with_a_sum(tokens, input_pos, taps):
        final, states = own(tokens, input_pos, taps)
        before = held * float(input_pos[0] > 0)
        sums = before + final.cumsum(1)
        held.copy_(sums[:, -1:])
        return sums, states

    class WithSum(SimpleNamespace):
        __call__ = staticmethod(with_a_sum)

    target = WithSum(scores=own.scores, kept=own.kept)
    first, second = (Piece("", list(range(at, at + 20))) for at in (5, 300))
    look(target, 6, first, 10)
    after = look(target, 6, second, 10)
    alone = look(target, 6, second, 10)
    assert torch.equal(after.final, alone.final) and torch.equal(after.tokens, alone.tokens)
    whole = own(after.tokens[None], torch.arange(30), ())[0].cumsum(1)
    torch.testing.assert_close(after.final, whole, atol=1e-3, rtol=1e-4)
