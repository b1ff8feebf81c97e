"""A whole round as one method: the tokens, rounds and caches are those of the three methods."""

from dataclasses import replace

import pytest
from scripted import VOCABULARY, ScriptedSession, greedy_sequence, scripted_metadata

from eagle3.export.config import ExportConfig
from eagle3.export.pipeline import load_speculator, make_metadata
from eagle3.export.plan import make_plan
from eagle3.runner.contract import DRAFT_DECODE, SPECULATE, TARGET_VERIFY
from eagle3.runner.loop import complete
from eagle3.runner.session import EagerSession
from eagle3.targets.attention import EagerAttention


@pytest.fixture(scope="module")
def eager():
    import torch

    plan = make_plan(ExportConfig("gemma4-tiny", output_dir=None, cuda_arch="sm_90"))
    return EagerSession(load_speculator(plan, EagerAttention, torch.float32), make_metadata(plan, {}))


class ThreeMethods:
    has_speculate = False

    def __init__(self, session):
        self._session = session

    def __getattr__(self, name):
        return getattr(self._session, name)


def prompt_of(length):
    return [(7 * i + 3) % 2000 + 5 for i in range(length)]


def test_quick(eager):
    for length in (1, 2, 8, 9, 64, 65, 131, eager.metadata.max_seq_len - 30):
        one = complete(eager, prompt_of(length), max_new_tokens=60)
        other = complete(ThreeMethods(eager), prompt_of(length), max_new_tokens=60)
        print(one.stats.method_calls, other.stats.method_calls)
        assert one.token_ids == other.token_ids
        assert one.stats.counts() == other.stats.counts()
