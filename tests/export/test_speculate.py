"""A fused round gives the tokens, rounds and caches of the three methods."""

from random import Random

import pytest
import torch
from dialect_files import IDS, PEAGLE, random_eagle, random_peagle, write
from eager import eager_session
from hypothesis import given, note, settings
from hypothesis import strategies as st
from random_checkpoints import save_random_draft
from random_speculators import InTurn, random_metadata, random_speculator
from scripted import ScriptedSession, ThreeMethods, greedy_sequence, scripted_metadata

from eagle3.export.configuration.config import ExportConfig
from eagle3.export.planning.plan import make_plan
from eagle3.runner.artifact.opening import open_artifact
from eagle3.runner.contract import DRAFT_DECODE, SPECULATE, TARGET_VERIFY
from eagle3.runner.hosts.opening import open_session
from eagle3.runner.loop.adaptive_chain import AdaptiveChain
from eagle3.runner.loop.cached_tokens import CachedTokens
from eagle3.runner.loop.generation import complete
from eagle3.runner.sampling.options import Sampling
from eagle3.runner.sampling.sampler import Sampler

pytestmark = pytest.mark.usefixtures("host_artifact")  # some tests request the fixture by the name in a parameter


@pytest.fixture(scope="module")
def eager():
    return eager_session(make_plan(ExportConfig("gemma4-tiny", output_dir=None, cuda_arch="sm_90", max_seq_len=256)))


@pytest.fixture(scope="module")
def hosted(host_artifact):
    return open_session(open_artifact(host_artifact))


def prompt_of(length):
    return [(7 * i + 3) % 2000 + 5 for i in range(length)]


# --- the shipped model, in eager mode and compiled


# Prompts below the shortest prefill chunk, of its length, and of several chunks with a rest in verify windows.
@pytest.mark.first(3)
@pytest.mark.parametrize("length", [1, 9, 131])
@pytest.mark.parametrize("name", ["eager", "hosted"])
def test_fused_rounds_give_the_tokens_and_rounds_of_the_three_methods(length, name, request):
    session = request.getfixturevalue(name)
    options = {"max_new_tokens": 40, "stop_ids": []}
    three = complete(ThreeMethods(session), prompt_of(length), **options)
    fused = complete(session, prompt_of(length), **options)
    assert fused.token_ids == three.token_ids
    assert fused.stats.counts() == three.stats.counts()
    rounds = fused.stats.num_drafts
    assert fused.stats.method_calls[SPECULATE] == rounds and fused.stats.num_accepted_tokens > rounds


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("name", "left"), [*(("eager", left) for left in (1, 7, 8, 11)), *(("hosted", left) for left in (1, 8))]
)
def test_the_three_methods_replace_fused_rounds_at_the_contexts_end(name, left, request):
    session = request.getfixturevalue(name)
    prompt = prompt_of(session.metadata.max_seq_len - left)
    three, fused = (complete(each, prompt, stop_ids=[]) for each in (ThreeMethods(session), session))
    assert fused.token_ids == three.token_ids and len(fused.token_ids) == left
    assert fused.stats.counts() == three.stats.counts()
    assert (fused.stats.method_calls[SPECULATE] > 0) == (left >= 8)  # two windows of four


def test_sampling_and_grammars_use_the_three_methods(eager):
    prompt = prompt_of(20)
    sampler = Sampler(Sampling(temperature=0.8, seed=1), eager.metadata, prompt)
    for options in ({"chain": 2}, {"chain": 0}, {"choice": sampler}):
        calls = complete(eager, prompt, max_new_tokens=12, **options).stats.method_calls
        assert SPECULATE not in calls and calls[TARGET_VERIFY] + calls["decode"] > 0


def test_an_adaptive_chain_uses_fused_rounds_at_the_artifacts_length(eager):
    lengths, options = [3, 3, 3, 1, 0, 3, 2, 3], {"max_new_tokens": 40, "stop_ids": []}
    fused, three = (
        complete(each, prompt_of(20), chain=InTurn(lengths), **options) for each in (eager, ThreeMethods(eager))
    )
    assert fused.token_ids == three.token_ids and fused.stats.counts() == three.stats.counts()
    calls = fused.stats.method_calls
    assert calls[SPECULATE] > 3 and calls[TARGET_VERIFY] > 1 and calls["decode"] > 0
    auto = complete(eager, prompt_of(20), chain=AdaptiveChain(3), **options)
    assert auto.token_ids == three.token_ids and auto.stats.method_calls[SPECULATE] > 0


# --- every kind of head, window by window

HEADS = {
    "gemma4-31B": lambda folder, config: save_random_draft(folder, config, (0, 2, 6), window=12),
    "llama3.1-8B": lambda folder, config: write(folder, "safeailab", random_eagle(), True, draft_vocab_size=None),
    "qwen3-4B": lambda folder, config: write(folder, "speculators", random_peagle(), **PEAGLE, **{IDS: [0, 2, 3]}),
}
"""An EAGLE-3 with a ring, an EAGLE, a P-EAGLE."""


def by_three_methods(session, window, positions):
    step = session.target_verify(window, positions)
    agreed = (step.ids[0, :-1] == window[0, 1:]).tolist()
    rows = next((i for i, same in enumerate(agreed) if not same), len(agreed)) + 1
    drafted = session.draft_decode(step.ids[:, :rows], step.feature[:, :rows], positions[:rows])
    chain, following = [step.ids[:, rows - 1 : rows], drafted.ids], int(positions[0]) + rows
    for position in range(following, following + window.shape[1] - 1 - drafted.ids.shape[1]):
        drafted = session.draft_decode(drafted.ids, drafted.feature, session.positions[position : position + 1])
        chain.append(drafted.ids)
    return step.ids, torch.cat(chain, dim=1), session.positions[following : following + window.shape[1]]


@pytest.mark.first(3)  # every kind of head in its longest round
@pytest.mark.parametrize("target", HEADS)
@pytest.mark.parametrize("chain_len", [4, 1])
def test_a_fused_round_is_right_for_each_kind_of_head_and_any_acceptance(target, chain_len, checkpoints, tmp_path):
    model, folder = checkpoints(target)
    HEADS[target](tmp_path / "draft", model.config)
    paths = {"checkpoint": folder, "draft": tmp_path / "draft", "output_dir": None}
    session = eager_session(make_plan(ExportConfig(target, **paths, cuda_arch="sm_90", chain_len=chain_len)))
    assert session.metadata.proposals == (chain_len if target == "qwen3-4B" else 1)
    prompt = [3 + (5 * i) % 90 for i in range(30)]
    said = complete(session, prompt, max_new_tokens=40, stop_ids=[]).token_ids
    complete(session, prompt, max_new_tokens=2)  # by now the rings hold nothing of the prompt
    at = len(prompt)
    for accepted in (*range(chain_len + 1), 0, chain_len):
        index = at - len(prompt)
        right = said[index : index + accepted + 1]
        wrong = [(token + 1) % 96 for token in said[index + accepted + 1 : index + chain_len + 1]]
        window, positions = torch.tensor([right + wrong]), session.positions[at : at + chain_len + 1]
        ids, following, next_positions = by_three_methods(session, window, positions)
        fused = session.speculate(window, positions)
        assert torch.equal(fused.said, torch.cat((ids, following)))
        assert torch.equal(fused.tokens, following) and torch.equal(fused.input_pos, next_positions)
        assert int(next_positions[0]) == at + accepted + 1
        at += accepted + 1


# --- any target, any draft, on scripted caches


@settings(max_examples=60, deadline=None)
@given(random=st.randoms(use_true_random=True))
def test_fused_rounds_give_the_greedy_tokens_of_any_target_and_draft(random: Random):
    metadata, (target, draft) = random_metadata(random), random_speculator(random)
    note(f"{metadata}")
    prompt = [random.randrange(3) for _ in range(random.randint(1, metadata.max_seq_len - 1))]
    options = {"max_new_tokens": random.randint(1, 60), "stop_ids": random.sample(range(3), random.choice([0, 0, 1]))}
    sessions = [ScriptedSession(metadata, target, draft) for _ in range(2)]
    sessions[1].has_speculate = True
    three, fused = (complete(session, prompt, **options) for session in sessions)
    expected = greedy_sequence(target, prompt, options["max_new_tokens"], options["stop_ids"], metadata.max_seq_len)
    assert fused.token_ids == three.token_ids == expected
    assert fused.stats.counts() == three.stats.counts() and fused.finish_reason == three.finish_reason
    last = metadata.max_seq_len - 2 * (metadata.chain_len + 1)  # an anchor that is followed by two windows
    starts = len(prompt) <= last and fused.stats.num_drafts > 0
    assert (sessions[1].fused_rounds > 0) == starts


def test_a_conversation_continues_after_a_fused_round():
    def greedy(prefix):
        return (7 * prefix[-1] + 3 * len(prefix) + prefix[0]) % 23

    session, cached = ScriptedSession(scripted_metadata(), greedy, greedy), CachedTokens()
    session.has_speculate = True
    prompt = [3, 1, 4, 1, 5, 9, 6]
    said = prompt + complete(session, prompt, max_new_tokens=13, cached=cached).token_ids
    assert cached.draft_slots == len(said) - 1 and session.fused_rounds == 3
    again = complete(session, [*said, 2], max_new_tokens=13, cached=cached)
    assert again.stats.reused_prompt_tokens == len(said) - 1
    assert again.token_ids == greedy_sequence(greedy, [*said, 2], 13)


def test_the_time_of_a_fused_round_is_that_of_one_call(eager):
    stats = complete(eager, prompt_of(20), max_new_tokens=30, stop_ids=[]).stats
    assert stats.method_calls[SPECULATE] == stats.num_drafts and stats.method_seconds[SPECULATE] > 0
    assert stats.method_calls[DRAFT_DECODE] == 2 + 1  # the prompt's seed and the first chain
