"""Top-k, top-p and min-p at the limits of their values, for both vocabularies and in all pairs."""

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
import torch
from scripted import VOCABULARY, scripted_metadata
from scripted_logits import LogitsSession, random_logits
from transformers_sampling import CPU_TENSORS, by_transformers

from eagle3.runner.loop.generation import complete
from eagle3.runner.sampling.arrays import Device, Host
from eagle3.runner.sampling.draws import FIRST, MANY, Dense, Sparse, thresholds
from eagle3.runner.sampling.options import Sampling
from eagle3.runner.sampling.sampler import Sampler

DRAFT = 11  # ids of the scripted draft, of the target's VOCABULARY
TINY, BELOW_ONE = 1e-300, float(np.nextafter(1, 0))
PROMPT = [3, 1, 4]


def edges(target: int, draft: int) -> dict[str, list]:
    """Return the limits of each filter: off, the least value, one id fewer and more than each vocabulary, and more than
    any."""
    sizes = (size + more for size in (draft, target) for more in (-1, 0, 1))
    return {
        "top_k": [0, 1, 2, *sizes, 1 << 40],
        "top_p": [1.0, BELOW_ONE, 0.5, TINY],
        "min_p": [0.0, TINY, 0.3, BELOW_ONE],
    }


def all_pairs(filters: dict[str, list]) -> list[dict]:
    """Return each filter's values with those of each other filter, and all three filters at their first limit."""
    found = [
        dict(zip(names, values, strict=True))
        for names in combinations(filters, 2)
        for values in product(*(filters[name] for name in names))
    ]
    return [*found, {"top_k": 1, "top_p": TINY, "min_p": BELOW_ONE}]


def texts(sampling: Sampling, target: int, draft: int) -> list[list[int]]:
    """Generate with random logits of these vocabularies, with and without speculation."""
    draft_ids = torch.randperm(target, generator=torch.Generator().manual_seed(1))[:draft].sort().values
    tables = random_logits(2, 5, target)[0], random_logits(3, 4, draft)[0]
    metadata = replace(scripted_metadata(), vocab_size=target, has_logits=True)
    metadata = replace(metadata, draft_ids=draft_ids, draft_vocab_size=draft)
    found = []
    for chain in (0, 3):
        session = LogitsSession(metadata, *tables, draft_ids)
        choice = Sampler(sampling, metadata, PROMPT)
        found.append(complete(session, PROMPT, max_new_tokens=8, chain=chain, choice=choice).token_ids)
    return found


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("temperature", "other"), [(1, {}), (1e9, {"repetition_penalty": 1.3}), (1e-9, {"logit_bias": {2: 4.0, 5: -1e9}})]
)
def test_every_pair_of_filters_gives_the_text_of_sampling_without_speculation(temperature, other):
    for filters in all_pairs(edges(VOCABULARY, DRAFT)):
        alone, speculated = texts(Sampling(temperature, seed=7, **filters, **other), VOCABULARY, DRAFT)
        assert alone == speculated, filters


@pytest.mark.first(1)
@pytest.mark.parametrize("draft", [DRAFT, MANY + 2], ids=["few draft ids", "many"])
def test_filters_give_the_same_text_for_a_vocabulary_with_sparse_noise(draft):
    target = MANY + 2000
    for filters in all_pairs({name: values[1:] for name, values in edges(target, draft).items()}):
        alone, speculated = texts(Sampling(1.0, seed=7, **filters), target, draft)
        assert alone == speculated, filters


@pytest.mark.parametrize(("vocabulary", "temperature"), [(60, 0.4), (2 * FIRST, 1.7)])
def test_filters_keep_the_ids_that_transformers_processors_keep(temperature, vocabulary):
    """The order is that of transformers for any temperature: top-k, then top-p of the rest, then min-p."""
    logits = random_logits(9, 6, vocabulary)
    counts = set()
    for top_k, top_p, min_p in product([0, 2, 20], [1.0, 0.9, 0.4], [0.0, 0.02, 0.3]):
        if not top_k and top_p == 1 and not min_p:
            continue
        sampling = Sampling(temperature, top_k, top_p, min_p)
        expected = by_transformers(logits, sampling, PROMPT) > 0
        for arrays, given in ((Host(), logits.numpy()), (CPU_TENSORS, logits)):
            kept = torch.as_tensor(given >= thresholds(given, sampling, arrays))
            assert torch.equal(kept, expected), sampling
        counts.add(int(expected.sum()))
    assert len(counts) > 8


def test_ids_equal_to_the_last_of_top_k_count_in_top_p():
    """transformers keeps all of these ids, and top-p sums the probabilities that top-k leaves."""
    logits = torch.tensor([[[3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0]]])
    expected = by_transformers(logits, Sampling(1.5, top_k=2), PROMPT)
    assert int((expected > 0).sum()) == 7
    for top_p in (0.3, 0.4, 0.6, 0.9):
        first = float(expected[0, 0, 0])
        kept = [0] if top_p <= first else list(range(7))  # equal ids are all kept
        for arrays, given in ((Host(), logits.numpy()), (CPU_TENSORS, logits)):
            least = thresholds(given, Sampling(1.5, top_k=2, top_p=top_p), arrays)
            assert np.flatnonzero(np.asarray(given >= least)[0, 0]).tolist() == kept, top_p


@pytest.mark.parametrize(("top_k", "others"), [(VOCABULARY, {"min_p": 0.2}), (1 << 40, {"top_p": 0.6})])
def test_a_top_k_of_the_whole_vocabulary_has_no_effect(top_k, others):
    logits, ids = random_logits(5, 4, VOCABULARY), np.arange(VOCABULARY)
    drawn = []
    for kind, arrays, given in (
        (Dense, Host(), logits.numpy()),
        (Sparse, Host(), logits.numpy()),
        (Dense, Device(torch.device("cpu")), logits),
    ):
        for k in (0, top_k):
            draw = kind(Sampling(1.0, top_k=k, **others), 3, ids, arrays)
            drawn.append([draw(given, position).tolist() for position in range(20)])
    assert all(each == drawn[0] for each in drawn)
    assert len({row for rows in drawn[0] for row in rows[0]}) > 3


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": TINY}, {"min_p": BELOW_ONE}], ids=str)
@pytest.mark.parametrize("target", [VOCABULARY, MANY + 2000])
def test_the_strictest_value_of_each_filter_gives_the_greedy_text(filters, target):
    greedy = texts(Sampling(), target, DRAFT)
    assert texts(Sampling(1.0, seed=7, **filters), target, DRAFT) == greedy
    assert texts(Sampling(1.0, seed=7), target, DRAFT) != greedy
