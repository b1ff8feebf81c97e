"""Sampling has the right distribution, gives the same text with and without speculation, and each parameter has
transformers' meaning."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import VOCABULARY, scripted_metadata
from scripted_logits import LogitsSession, random_logits
from transformers_sampling import CPU_TENSORS, by_transformers

from eagle3.runner.hosts.session import Step
from eagle3.runner.loop.generation import complete
from eagle3.runner.sampling.arrays import Host
from eagle3.runner.sampling.draws import Dense, Sparse, gumbel, keys, spread, words
from eagle3.runner.sampling.logprobs import Logprobs
from eagle3.runner.sampling.options import Sampling
from eagle3.runner.sampling.sampler import Sampler

PROMPT = [3, 1, 4, 1, 5, 9, 6]


SETTINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.6, top_k=5),
    Sampling(temperature=1.3, top_p=0.8),
    Sampling(temperature=2.0, min_p=0.3),
    Sampling(temperature=0.9, top_k=8, top_p=0.9, min_p=0.05),
    Sampling(temperature=0.8, repetition_penalty=1.3, logit_bias={2: 1.5, 7: -2.0}),
]


@pytest.mark.first(1)
@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_frequencies_over_seeds_are_transformers_probabilities(sampling):
    """A chi-square test over 2,000 seeds with 12 ids, so up to 11 degrees of freedom; a value above 38 has a
    probability of 1 in 10,000."""
    logits, metadata = random_logits(1, 1, 12, scale=1.5), replace(scripted_metadata(), vocab_size=12, has_logits=True)
    expected = by_transformers(logits, sampling, PROMPT[:4])[0, 0].double()
    counts = torch.zeros(12, dtype=torch.double)
    for seed in range(2000):
        sampler = Sampler(replace(sampling, seed=seed), metadata, PROMPT[:4])
        counts[sampler.target(Step(None, None, logits), []).item()] += 1
    assert counts[expected == 0].sum() == 0
    drawn = expected > 0
    assert ((counts - 2000 * expected)[drawn] ** 2 / (2000 * expected)[drawn]).sum() < 38


def test_noise_of_neighbouring_positions_ids_and_seeds_is_independent():
    """Positions, ids and seeds are varied; the correlation of 2^17 numbers has five standard deviations at 0.014."""
    ids = spread(np.arange(1 << 17, dtype=np.int32))
    noise = [gumbel(words(keys(seed, at, 1)[0], ids), 1.0, Host()) for seed, at in ((0, 0), (0, 1), (0, 513), (1, 0))]
    for other in (*noise[1:], np.roll(noise[0], 1), np.roll(noise[1], 1)):
        assert abs(np.corrcoef(noise[0], other)[0, 1]) < 0.014
    assert abs(noise[0].mean() - 0.5772) < 0.02 and abs(noise[0].var() - np.pi**2 / 6) < 0.05
    assert noise[0].max() > 10


@settings(max_examples=40, deadline=None)
@given(
    temperature=st.sampled_from([0.3, 0.8, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 40, 300]),
    top_p=st.sampled_from([1.0, 0.95, 0.5]),
    min_p=st.sampled_from([0.0, 0.02]),
    scale=st.sampled_from([0.1, 3.0, 12.0]),
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 100_000),
)
def test_sparse_dense_and_device_sampling_draw_the_same_ids(temperature, top_k, top_p, min_p, scale, seed, position):
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits, ids = random_logits(seed % 97, 3, 20_000, scale=scale), np.arange(20_000)
    dense = Dense(sampling, seed, ids, Host())(logits.numpy(), position)
    sparse = Sparse(sampling, seed, ids, Host())(logits.numpy(), position)
    tensors = Dense(sampling, seed, ids, CPU_TENSORS)(logits, position)
    assert dense.tolist() == sparse.tolist() == tensors.tolist()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_sampling_any_logits_with_speculation_gives_the_text_without_it(data):
    seed = data.draw(st.integers(0, 10_000), "tables")
    sampling = Sampling(
        temperature=data.draw(st.sampled_from([0.0, 0.5, 1.0, 3.0]), "temperature"),
        top_k=data.draw(st.sampled_from([0, 3]), "top_k"),
        top_p=data.draw(st.sampled_from([1.0, 0.7]), "top_p"),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.5]), "penalty"),
        logit_bias=data.draw(st.dictionaries(st.integers(0, VOCABULARY - 1), st.sampled_from([-5.0, 3.0]), max_size=3)),
        seed=data.draw(st.integers(0, 1000), "seed"),
    )
    draft_ids = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(seed))[:11].sort().values
    target, draft = random_logits(seed, 13, VOCABULARY)[0], random_logits(seed + 1, 7, 11)[0]
    metadata = replace(scripted_metadata(), has_logits=True, draft_ids=draft_ids, draft_vocab_size=11)
    prompt = data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20), "prompt")
    texts = []
    for chain in (0, 1, 2, 3):
        session = LogitsSession(metadata, target, draft, draft_ids)
        choice = Sampler(sampling, metadata, prompt)
        texts.append(complete(session, prompt, max_new_tokens=25, chain=chain, choice=choice).token_ids)
    assert texts[0] == texts[1] == texts[2] == texts[3]


@pytest.mark.parametrize(
    "others",
    [{}, {"repetition_penalty": 1.5}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"logit_bias": {2: 6.0}}],
    ids=str,
)
def test_all_samples_of_a_draft_equal_to_the_target_are_accepted(others):
    """The draft's logits have the same biases and penalties as the target's, for the prompt, the generated tokens and
    its own proposals."""
    logits, metadata = random_logits(5, 1, VOCABULARY)[0], replace(scripted_metadata(), has_logits=True)
    session = LogitsSession(metadata, logits, logits, torch.arange(VOCABULARY))
    sampler = Sampler(Sampling(temperature=1.0, seed=2, **others), metadata, PROMPT)
    assert complete(session, PROMPT, max_new_tokens=40, choice=sampler).stats.mean_acceptance_length > 3.9


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_one_of_openais_penalties_alone_is_subtracted_for_generated_tokens(name):
    sampler = Sampler(Sampling(**{name: 0.8}), replace(scripted_metadata(), vocab_size=4, has_logits=True), [1])
    step, said = Step(None, None, torch.tensor([[[0.0, 1.0, 0.5, 0.1]]])), []
    for _ in range(3):
        said += sampler.target(step, [])[0].tolist()
        sampler.accept(said[-1:])
    assert said == [1, 2, 1]  # the prompt has no penalty; at last 0.2 is the largest logit


def test_log_probabilities_are_of_the_raw_logits(session):
    prompt, metadata = [2, 318, 1664, 11], session.metadata
    choice = Logprobs(Sampler(Sampling(temperature=1.5, seed=1), metadata, prompt), 3)
    tokens = complete(session, prompt, max_new_tokens=12, choice=choice).token_ids
    again = prompt + tokens
    for index, said in enumerate(choice.tokens[: len(tokens)]):
        at = len(prompt) + index
        complete(session, again[:at], max_new_tokens=1)
        rows, positions = torch.tensor([[again[at - 1]] * 2]), session.positions[at - 1 : at + 1]
        expected = session.target_verify(rows, positions).logits[0, 0].log_softmax(-1)
        assert said.token_id == tokens[index]
        assert said.logprob == pytest.approx(float(expected[tokens[index]]), abs=1e-3)
        assert [token for token, _ in said.top] == expected.topk(3).indices.tolist()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": "1"}, "temperature is '1'"),
        ({"temperature": True}, "temperature is True"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"min_p": 1.0}, "min_p is 1.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"logit_bias": {3: float("inf")}}, "logit_bias of 3 is inf"),
        ({"logit_bias": [3]}, "logit_bias is"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_invalid_sampling_values_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**given)


def test_sampling_that_an_artifact_does_not_support_is_refused():
    metadata = scripted_metadata()
    with pytest.raises(ValueError, match="needs logits, which this artifact lacks: .* without --no-logits"):
        Sampler(Sampling(temperature=0.5), metadata, PROMPT)
    with pytest.raises(ValueError, match="id 23 of logit_bias is outside the vocabulary 0..22"):
        Sampler(Sampling(logit_bias={23: 1.0}), replace(metadata, has_logits=True), PROMPT)
    Sampler(Sampling(), metadata, PROMPT)
