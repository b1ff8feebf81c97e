"""The shifted loop gives the target's greedy sequence, whatever the draft proposes and whatever the lengths are."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_cases import PROMPT, greedy, right_at, wrong
from scripted import VOCABULARY, ScriptedSession, greedy_sequence, scripted_metadata

from eagle3.runner.loop.generation import complete, generate
from eagle3.runner.loop.results import LENGTH, STOP


@pytest.mark.parametrize(
    ("proposal", "length"),
    [(wrong, 1.0), (right_at(0, 1), None), (greedy, 4.0)],
    ids=["none accepted", "some accepted", "all accepted"],
)
def test_the_output_is_greedy_whatever_is_accepted(proposal, length):
    session = ScriptedSession(scripted_metadata(), greedy, proposal)
    result = complete(session, PROMPT, max_new_tokens=33)
    assert result.token_ids == greedy_sequence(greedy, PROMPT, 33)
    assert result.finish_reason == LENGTH
    assert 1 <= result.stats.mean_acceptance_length <= 4
    if length:
        assert result.stats.mean_acceptance_length == length
    else:
        assert 0 < result.stats.num_accepted_tokens < result.stats.num_draft_tokens


def test_each_round_takes_one_target_forward():
    session = ScriptedSession(scripted_metadata(), greedy, right_at(1, 2))
    rounds = []
    for fresh in generate(session, PROMPT, max_new_tokens=30):
        rounds.append(len(fresh))
    assert len(session.windows) == len(rounds) - 1  # the first is the prefill's
    assert sum(rounds) == 30


def test_an_accepted_stop_token_ends_the_text_within_its_round():
    tokens = greedy_sequence(greedy, PROMPT, 40)
    stop = tokens[2]  # the second proposal of the first round, when all are accepted
    assert stop not in tokens[:2]
    session = ScriptedSession(scripted_metadata(eos_ids=[stop]), greedy, greedy)
    result = complete(session, PROMPT, max_new_tokens=40)
    assert result.token_ids == tokens[:3]
    assert result.finish_reason == STOP


def test_without_speculation_the_tokens_are_the_same():
    session = ScriptedSession(scripted_metadata(), greedy, wrong)
    result = complete(session, PROMPT, max_new_tokens=20, chain=0)
    assert result.token_ids == greedy_sequence(greedy, PROMPT, 20)
    assert session.windows == []


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "empty"),
        ([1] * 64, {}, "64 tokens"),
        ([1, VOCABULARY], {}, f"token id {VOCABULARY} is outside"),
        ([1, -1], {}, "token id -1 is outside"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([1], {"chain": 4}, "chain length 4"),
        ([1], {"chain": -1}, "chain length -1"),
    ],
)
def test_invalid_prompts_and_options_are_refused_before_anything_runs(prompt, options, message):
    session = ScriptedSession(scripted_metadata(), greedy, greedy)
    with pytest.raises(ValueError, match=message):
        complete(session, prompt, **options)
    assert not session.target_cache.entries


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_target_and_any_draft_give_the_greedy_sequence(data):
    table = data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=40, max_size=40), "target")
    hits = data.draw(st.lists(st.booleans(), min_size=17, max_size=17), "where the draft is right")

    def target(prefix):
        return table[(3 * prefix[-1] + 5 * len(prefix) + prefix[len(prefix) // 2]) % 40]

    def draft(prefix):
        right = target(prefix)
        return right if hits[(len(prefix) + prefix[-1]) % 17] else (right + 1) % VOCABULARY

    chain_len = data.draw(st.integers(1, 6), "artifact's chain length")
    min_prefill = data.draw(st.integers(2, 6), "min prefill")
    max_prefill = data.draw(st.integers(min_prefill, 12), "max prefill")
    max_seq_len = data.draw(st.integers(16, 48), "max_seq_len")
    eos_ids = data.draw(st.sets(st.integers(0, VOCABULARY - 1), max_size=2), "stop ids")
    metadata = scripted_metadata(max_seq_len, min_prefill, max_prefill, chain_len, eos_ids)
    prompt = data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=max_seq_len - 1), "prompt")
    budget = data.draw(st.integers(1, 60), "budget")
    used = data.draw(st.integers(0, chain_len), "chain length")
    result = complete(ScriptedSession(metadata, target, draft), prompt, max_new_tokens=budget, chain=used)
    assert result.token_ids == greedy_sequence(target, prompt, budget, eos_ids, max_seq_len)
    assert result.finish_reason == (STOP if result.token_ids[-1] in eos_ids else LENGTH)
