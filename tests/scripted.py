"""A scripted session: a target whose greedy tokens are a function of the prefix, a draft that is told what to propose.

It keeps what real caches keep, tokens by position, and refuses what would corrupt them: gaps, reads of positions that
were never written, and features that do not belong to their slot.
"""

from collections import Counter
from collections.abc import Callable

import torch

from eagle3.runner.contract import Metadata
from eagle3.runner.session import Step

VOCABULARY = 23


def scripted_metadata(max_seq_len=64, min_prefill=4, max_prefill=7, chain_len=3, eos_ids=()) -> Metadata:
    return Metadata(
        max_seq_len=max_seq_len,
        vocab_size=VOCABULARY,
        n_layers=1,
        min_prefill=min_prefill,
        max_prefill=max_prefill,
        sliding_window=0,
        chain_len=chain_len,
        draft_vocab_size=VOCABULARY,
        bos_id=-1,
        eos_ids=tuple(eos_ids),
        manifest={},
        use_kv_cache=True,
        use_sdpa_with_kv_cache=False,
        enable_dynamic_shape=True,
    )


class ScriptedSession:
    """``greedy(prefix) -> token`` is the target; ``proposal(prefix) -> token`` the draft, each of a tuple of ids.

    The feature of position p is [p, id(prefix up to p)]: a draft slot checks that it got its own.
    """

    def __init__(self, metadata: Metadata, greedy: Callable, proposal: Callable):
        self.metadata, self.greedy, self.proposal = metadata, greedy, proposal
        self.positions = torch.arange(metadata.max_seq_len)
        self.target_cache: list[int] = []
        self.draft_cache: list[int] = []
        self.has_decode = True
        self.seconds, self.calls = Counter(), Counter()
        self.windows: list[int] = []

    def _target(self, tokens, input_pos):
        positions, row = input_pos.tolist(), tokens[0].tolist()
        assert positions == list(range(positions[0], positions[0] + len(row)))
        assert positions[0] <= len(self.target_cache), "the target attends to a position that was never written"
        assert positions[-1] < self.metadata.max_seq_len, "past the cache"
        self.target_cache[positions[0] :] = row  # no query attends past its own position
        prefixes = [tuple(self.target_cache[: p + 1]) for p in positions]
        ids = torch.tensor([[self.greedy(prefix) for prefix in prefixes]])
        feature = torch.tensor([[[p, hash(prefix) % 9973] for p, prefix in zip(positions, prefixes, strict=True)]])
        return Step(ids, feature.float())

    def prefill(self, tokens, input_pos):
        assert self.metadata.min_prefill <= tokens.shape[1] <= self.metadata.max_prefill
        step = self._target(tokens, input_pos)
        return Step(step.ids[:, -1:], step.feature)

    def decode(self, tokens, input_pos):
        assert tokens.shape[1] == 1
        return self._target(tokens, input_pos)

    def target_verify(self, tokens, input_pos):
        assert 2 <= tokens.shape[1] <= self.metadata.chain_len + 1
        self.windows.append(tokens.shape[1])
        return self._target(tokens, input_pos)

    def draft_decode(self, tokens, feature, input_pos):
        positions, row = input_pos.tolist(), tokens[0].tolist()
        assert 1 <= len(row) <= max(self.metadata.max_prefill, self.metadata.chain_len + 1)
        assert feature.shape[:2] == tokens.shape
        assert positions[0] <= len(self.draft_cache), "the draft attends to a slot that was never written"
        assert positions[-1] < self.metadata.max_seq_len - 1, "a draft slot whose token is past the context"
        for p, (given, belongs) in zip(positions, feature[0].tolist(), strict=True):
            assert given in (p, -1), f"slot {p} was given the feature of {given}"
            if given == p:
                assert belongs == hash(tuple(self.target_cache[: p + 1])) % 9973, "the feature of a rejected prefix"
        self.draft_cache[positions[0] :] = row
        prefix = (self.target_cache[0], *self.draft_cache)  # slot p holds token p + 1
        return Step(torch.tensor([[self.proposal(prefix)]]), torch.tensor([[[-1.0, 0.0]]]))


def greedy_sequence(greedy: Callable, prompt: list[int], count: int, stop_ids=(), max_seq_len: int = 64) -> list[int]:
    """What decoding token by token gives."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < count and len(tokens) < max_seq_len:
        tokens.append(greedy(tuple(tokens)))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]
