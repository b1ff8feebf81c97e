"""Parts of the native runner do what their Python originals do: chain lengths, kept prefixes, draws."""

import subprocess
from dataclasses import replace
from random import Random

import pytest
import torch
from scripted import scripted_metadata

from eagle3.runner.hosts.session import Step
from eagle3.runner.loop.adaptive_chain import AcceptanceRates, AdaptiveChain
from eagle3.runner.loop.cached_tokens import CachedTokens
from eagle3.runner.sampling.options import Sampling
from eagle3.runner.sampling.sampler import Sampler


def told(built, part, *args, given, number=int, noted="") -> list:
    """Run a part of the program ``internals``, and return the numbers that it prints. It must end with
    ``noted`` on stderr."""
    given = given if isinstance(given, bytes) else "\n".join(given).encode()
    done = subprocess.run([built / "internals", part, *map(str, args)], input=given, capture_output=True)
    assert done.returncode == 0 and done.stderr.decode().endswith(noted), done.stderr
    return [number(each) for each in done.stdout.split()]


@pytest.mark.parametrize("longest", [1, 3, 7])
def test_the_adaptive_chain_chooses_the_same_lengths(built, longest):
    rounds = []
    for text, rate in enumerate((0.9, 0.2, 0.6, 0.95)):
        rounds.append((-1, 1.0))  # another text begins
        for index in range(300):
            accepted = 0
            while (index * 7919 + accepted * 104729 + text) % 1000 < 1000 * rate and accepted < longest:
                accepted += 1
            stall = 2.0 if index in range(100, 140) or index % 97 == 0 else 1.0
            rounds.append((accepted, stall * (1 + 0.01 * (index % 5)) * (2.0 if text == 2 else 1.0)))
    chain, expected = AdaptiveChain(longest), []
    chain.begin()
    for accepted, seconds in rounds:
        proposed = chain.next()
        if accepted < 0:
            chain.begin()
        chain.record(proposed, min(max(accepted, 0), proposed), seconds * (1 + 0.25 * proposed))
        expected.append(chain.next())
    lines = [f"{accepted} {seconds!r}" for accepted, seconds in rounds]
    assert len(set(expected)) > 1 and chain.note
    assert told(built, "chain", longest, given=lines, noted=chain.note) == expected


def test_the_expected_tokens_of_a_round_are_the_same(built):
    """From the prior of a first round on. The chosen lengths alone would hide a difference."""
    random, rates = Random(3), AcceptanceRates(4)
    expected, lines = [*rates.tokens()], []
    for index in range(400):
        proposed = -1 if index % 90 == 89 else random.randint(0, 4)
        accepted = random.randint(0, max(proposed, 0))
        lines.append(f"{proposed} {accepted}")
        if proposed < 0:
            rates.forget_text()
        else:
            rates.record(proposed, accepted)
        expected += rates.tokens()
    assert told(built, "rates", 4, given=lines, number=float) == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("rollback", [None, 3])
@pytest.mark.parametrize(("window", "draft_window"), [(0, 0), (0, None), (4, 0), (8, 4)])
def test_the_same_prefixes_are_kept(built, window, draft_window, rollback):
    metadata = scripted_metadata(window=window, draft_window=draft_window, rollback_rows=rollback)
    cached, random, lines, expected = CachedTokens(), Random(1), [], []

    def call(name, *numbers):
        lines.append(" ".join(map(str, (name, *numbers))))

    for _ in range(2000):
        if random.random() < 0.7:
            start, rows = random.randint(0, max(0, len(cached.tokens) - 1)), random.randint(1, 7)
            call("run", start, rows)
            cached.run(start, rows, rollback)
        if random.random() < 0.3:
            place = random.randint(0, len(cached.tokens) + 4)
            call("reach", place)
            cached.reach(place)
        cached.tokens = cached.tokens + random.choices(range(3), k=random.randint(0, 6))
        call("text", *cached.tokens)
        cached.draft_slots = random.randint(0, len(cached.tokens))
        call("slots", cached.draft_slots)
        draft = random.random() < 0.7
        prompt = cached.tokens[: random.randint(0, 40)] + random.choices(range(3), k=random.randint(0, 5)) + [1]
        call("reuse", int(draft), *prompt)
        expected += [cached.reuse(prompt, metadata, draft), len(cached.tokens), cached.draft_slots]
    bounds = [-1 if each is None else each for each in (metadata.min_prefill, window, draft_window, rollback)]
    assert told(built, "cached", *bounds, given=lines) == expected
    assert draft_window is None or sum(kept > 0 for kept in expected[::3]) > 100


FILTERS = [
    {"temperature": 1.0},
    {"temperature": 0.3, "top_k": 5},
    {"temperature": 2.0, "top_k": 40, "top_p": 0.8},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 3.0, "top_p": 0.97},
    {"temperature": 1.5, "min_p": 0.2},
    {"temperature": 1.0, "top_k": 300, "min_p": 0.01, "top_p": 0.999},
]


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize(("vocabulary", "step"), [(40, 0.5), (300, 0.25), (300, 0.0), (20_000, 0.5)])
def test_draws_are_the_same_for_logits_with_ties(built, filters, vocabulary, step):
    logits = 3 * torch.randn(1, 4, vocabulary)
    if step:
        logits = (logits / step).round() * step
    for seed, length in ((0, 0), (7, 510), (2**63 - 1, 1021), (12345678901234567, 16383)):
        stride = 1 + length % 3
        metadata = replace(
            scripted_metadata(proposals=4),
            vocab_size=vocabulary * stride + 2,
            has_logits=True,
            draft_ids=1 + stride * torch.arange(vocabulary),
        )
        target = Sampler(Sampling(seed=seed, **filters), replace(metadata, vocab_size=vocabulary), [0] * length)
        draft = Sampler(Sampling(seed=seed, **filters), metadata, [0] * (length + 2))
        ids = target.target(Step(torch.zeros(1, 4), None, logits), [])
        expected = ids[0].tolist()
        draft.target(Step(torch.zeros(1, 4), None, torch.zeros(1, 1, metadata.vocab_size)), [])
        for proposed in ([], [torch.zeros(1, 4)]):
            expected += draft.draft(Step(torch.zeros(1, 4), None, logits), proposed)[0].tolist()
        values = [filters.get(name, default) for name, default in (("temperature", 0), ("top_k", 0), ("top_p", 1))]
        args = *values, filters.get("min_p", 0), seed, length, vocabulary, stride
        assert told(built, "draw", *args, given=logits.numpy().tobytes()) == expected
