"""The prefix in the caches is reused whenever that is correct, and only then, whatever happened between two prompts."""

from itertools import product
from random import Random

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from random_speculators import (
    PROMPT,
    Failure,
    disturb,
    generate_some,
    greedy,
    random_metadata,
    random_request,
    random_speculator,
    reused,
)
from scripted import VOCABULARY, ScriptedSession, greedy_sequence, scripted_metadata

from eagle3.runner.loop.cached_tokens import CachedTokens
from eagle3.runner.loop.generation import complete


@pytest.fixture
def cached():
    return CachedTokens()


@pytest.fixture
def session(cached):
    """Make a session that has generated nine tokens, the first and two rounds, and holds nothing else in its caches."""
    session = ScriptedSession(scripted_metadata(), greedy, greedy)
    assert reused(session, cached, PROMPT, max_new_tokens=9) == 0
    return session


@settings(max_examples=500, deadline=None)
@given(random=st.randoms(use_true_random=True))
def test_generations_that_share_caches_give_the_tokens_of_single_generations(random: Random):
    metadata, (target, draft) = random_metadata(random), random_speculator(random)
    session, cached, said = ScriptedSession(metadata, target, draft), CachedTokens(), [[]]
    note(f"{metadata}")
    for _ in range(random.randint(2, 6)):
        prompt, options = random_request(random, metadata, said)
        rounds = random.choice([None, None, random.randint(0, 5)])
        disturb(session, random)
        note(f"{vars(cached)}, {prompt}, {options}, left after {rounds}, {session.failure!r} at {session.calls_left}")
        tokens, ended = generate_some(session, prompt, rounds, cached=cached, **options)
        limits = options["max_new_tokens"], options["stop_ids"], metadata.max_seq_len
        alone = greedy_sequence(target, prompt, *limits)
        assert tokens == (alone if ended else alone[: len(tokens)])
        said.append(prompt + tokens)


def right_at(*offsets):
    return lambda prefix: greedy(prefix) if len(prefix) % 4 in offsets else (greedy(prefix) + 1) % VOCABULARY


SAID = PROMPT + greedy_sequence(greedy, PROMPT, 9)


@pytest.mark.parametrize("chain", [None, 0])
def test_a_prompt_that_continues_the_caches_reuses_all_but_the_last_token(session, cached, chain):
    assert reused(session, cached, [*SAID, 0, 1], max_new_tokens=5, chain=chain) == len(SAID) - 1
    again = [*SAID, 0, 1, *greedy_sequence(greedy, [*SAID, 0, 1], 5)]
    assert reused(session, cached, [*again, 2], chain=chain) == len(again) - 1


@pytest.mark.parametrize(("chain", "recomputed"), [(None, 1), (0, 0)])
def test_only_the_draft_needs_the_feature_before_the_token_that_differs(session, cached, chain, recomputed):
    other = (SAID[15] + 1) % VOCABULARY
    assert reused(session, cached, [*SAID[:15], other, 3, 3, 3], chain=chain) == 15 - recomputed


def test_a_generation_without_speculation_leaves_the_draft_cache_unchanged(session, cached):
    plain = [*SAID, *greedy_sequence(greedy, SAID, 6)]
    assert reused(session, cached, SAID, max_new_tokens=6, chain=0) == len(SAID) - 1
    assert reused(session, cached, [*plain, 1], chain=0, max_new_tokens=1) == len(plain) - 1
    assert reused(session, cached, [*plain, 2]) == len(SAID) - 1


@pytest.mark.parametrize(("failure", "kept"), [(KeyboardInterrupt(), 14), (Failure(), 0)])
def test_the_complete_chunks_of_an_interrupted_prompt_are_reused(session, cached, failure, kept):
    cached.clear()
    session.failure, session.calls_left = failure, 4  # each chunk of seven is a call of the target and one of the draft
    assert generate_some(session, PROMPT, None, cached=cached) == ([], False)
    session.failure = None
    assert reused(session, cached, PROMPT) == kept


@pytest.mark.parametrize(("kept", "taken_up"), [(30, 29), (28, 27), (24, 0), (10, 0)])
@pytest.mark.parametrize("name", ["window", "draft_window"])
def test_a_ring_cache_is_reused_as_far_back_as_it_holds_a_window(cached, name, kept, taken_up):
    session = ScriptedSession(scripted_metadata(**{name: 8}), greedy, greedy)
    complete(session, PROMPT, max_new_tokens=9, cached=cached)  # the next window would end at position 35
    assert reused(session, cached, SAID[:kept]) == taken_up


@pytest.mark.parametrize(("proposals", "chain", "fused"), [(1, 3, False), (1, 3, True), (3, 3, True), (5, 1, False)])
def test_ring_slots_that_an_unverified_chain_overwrote_are_not_reused(proposals, chain, fused):
    """A generation ends after the draft's last chain, which wrote further than any window. The scripted caches refuse
    reads of a slot that the chain overwrote. The lengths of the kept prefix include the limit."""
    metadata = scripted_metadata(chain_len=max(chain, proposals), draft_window=7 + proposals, proposals=proposals)
    lost = []
    for budget, kept in product(range(6, 10), range(14, 34)):
        session, cached = ScriptedSession(metadata, greedy, greedy if budget % 2 else right_at(0, 1)), CachedTokens()
        session.has_speculate = fused
        said = PROMPT + complete(session, PROMPT, max_new_tokens=budget, chain=chain, cached=cached).token_ids
        again = [*said[:kept], 1, 2]
        result = complete(session, again, max_new_tokens=6, cached=cached)
        assert result.token_ids == greedy_sequence(greedy, again, 6)
        lost.append(kept - result.stats.reused_prompt_tokens)
    assert min(lost) <= 2 and max(lost) > 13


def test_ring_slots_that_mask_rows_overwrote_are_not_reused(cached):
    """The last chunk is one token and no round follows, so nothing else is written that far."""
    metadata = scripted_metadata(max_prefill=6, chain_len=5, draft_window=10, proposals=5)
    session = ScriptedSession(metadata, greedy, greedy)
    prompt = [*PROMPT, 0]
    complete(session, prompt, max_new_tokens=1, cached=cached)  # mask rows to position 27: the ring lacks 7 and below
    assert reused(session, cached, prompt[:17]) == 0
    complete(session, prompt, max_new_tokens=1, cached=cached)
    assert reused(session, cached, prompt[:19]) == 18


def test_a_ring_of_unknown_length_is_not_reused(cached):
    session = ScriptedSession(scripted_metadata(draft_window=0), greedy, greedy)
    complete(session, PROMPT, max_new_tokens=4, cached=cached)
    object.__setattr__(session.metadata, "draft_sliding_window", None)
    assert reused(session, cached, PROMPT, chain=0) == len(PROMPT) - 1
    assert reused(session, cached, PROMPT) == 0


@pytest.mark.parametrize(
    ("kept", "fresh", "window", "reused"),
    [
        (44, 2, 0, 43),  # only positions before the last window are committed
        (41, 30, 0, 41),
        (30, 30, 0, 24),  # continues from the state that the prompt's chunk saved
        (30, 3, 0, 0),  # too few tokens for a long chunk, which reads that state
        (20, 40, 0, 0),  # the saved state is after the common prefix
        (30, 30, 19, 24),
        (30, 30, 18, 0),  # the ring holds the window before 30, but not the one before the saved state
    ],
)
def test_recurrent_layers_continue_from_uncommitted_positions_or_the_saved_state(kept, fresh, window, reused):
    lengths = {"min_prefill": 18, "max_prefill": 40, "max_seq_len": 128}
    metadata = scripted_metadata(window=window, rollback_rows=16, **lengths)
    cached = CachedTokens()
    cached.run(0, 40, metadata.rollback_rows)
    cached.run(40, 4, metadata.rollback_rows)
    cached.tokens = list(range(44))
    assert cached.reuse([*range(kept), *[90] * fresh], metadata, draft=False) == reused
    assert cached.tokens == (list(range(reused + 1)) if reused else [])
