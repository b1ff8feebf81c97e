"""Generates from a prompt by every path of the loop, in a session with any kind of head."""

import torch
from scripted import ThreeMethods

from eagle3.runner.contract import SPECULATE
from eagle3.runner.loop.cached_tokens import CachedTokens
from eagle3.runner.loop.generation import complete
from eagle3.runner.sampling.options import Sampling
from eagle3.runner.sampling.sampler import Sampler

OPTIONS = {"max_new_tokens": 30, "stop_ids": []}


def prompt_of(length: int) -> list[int]:
    """Return random tokens, by seed the same for each length, within the 96 ids of a random model."""
    return torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def same_tokens_by_every_path(session, prompt: list[int]) -> list[int]:
    """Assert that fused rounds, the three methods, other chain lengths and no speculation give the same tokens, greedy
    and sampled. Returns the greedy tokens."""
    plain = complete(session, prompt, chain=0, **OPTIONS).token_ids
    fused, three = complete(session, prompt, **OPTIONS), complete(ThreeMethods(session), prompt, **OPTIONS)
    assert fused.token_ids == three.token_ids == plain == complete(session, prompt, chain=2, **OPTIONS).token_ids
    assert fused.stats.counts() == three.stats.counts() and fused.stats.method_calls[SPECULATE] > 10
    assert_the_same_windows(session, prompt)
    sampled = []
    for chain in (0, session.metadata.chain_len):
        choice = Sampler(Sampling(temperature=3.0, seed=3), session.metadata, prompt)
        sampled.append(complete(session, prompt, chain=chain, choice=choice, **OPTIONS).token_ids)
    assert sampled[0] == sampled[1] != plain
    return plain


class Fused:
    """A session that records the proposals of fused rounds, by the position of the window's first token."""

    def __init__(self, session):
        self._session, self.windows = session, {}

    def __getattr__(self, name):
        return getattr(self._session, name)

    def speculate(self, tokens, input_pos):
        done = self._session.speculate(tokens, input_pos)
        self.windows[int(done.input_pos[0])] = done.said[1].tolist()
        return done


class Verified(ThreeMethods):
    """A session without fused rounds that records its verify windows in the same way."""

    def __init__(self, session):
        super().__init__(session)
        self.windows = {}

    def target_verify(self, tokens, input_pos):
        self.windows[int(input_pos[0])] = tokens[0].tolist()
        return self._session.target_verify(tokens, input_pos)


def assert_the_same_windows(session, prompt: list[int]) -> None:
    """Assert that fused rounds propose the same tokens as the three methods. Accepted tokens alone show little about a
    random head."""
    fused, verified = Fused(session), Verified(session)
    for each in (fused, verified):
        complete(each, prompt, **OPTIONS)
    both = sorted(fused.windows.keys() & verified.windows.keys())
    assert len(both) > 5
    assert [fused.windows[at] for at in both] == [verified.windows[at] for at in both]


def same_tokens_behind_a_kept_prefix(session, prompt: list[int], plain: list[int], reused: int) -> None:
    """Assert that a prompt gives the same tokens with empty caches and with at least its first ``reused`` tokens in the
    caches. ``plain`` are the greedy tokens after ``prompt``."""
    cached = CachedTokens()
    complete(session, prompt, cached=cached, **OPTIONS | {"max_new_tokens": 8})
    longer = prompt + plain[:4] + [5, 6]
    again, fresh = complete(session, longer, cached=cached, **OPTIONS), complete(session, longer, **OPTIONS)
    assert again.stats.reused_prompt_tokens >= reused
    assert again.token_ids == fresh.token_ids and again.stats.num_accepted_tokens == fresh.stats.num_accepted_tokens
