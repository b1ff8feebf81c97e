"""The heads shipped with gemma4-tiny have the acceptance length of their training, and change no token."""

import json

import pytest
from eager import eager_session

from eagle3.export.configuration.config import ExportConfig
from eagle3.export.planning.plan import make_plan
from eagle3.runner.loop.generation import complete
from eagle3.runner.loop.statistics import GenerationStats
from eagle3.runner.text.text import Text
from eagle3.targets import TARGETS

TINY = TARGETS["gemma4-tiny"]
FIGURES = json.loads((TINY.checkpoint.parent / "training.json").read_text())
PROMPTS = ["def main(argv=None):\n    parser = ", "class Queue:\n    def __init__(self, maxsize=0):\n        self."]
KINDS = {"draft": "EAGLE-3", "peagle": "P-EAGLE", "assistant": "Gemma 4 assistant", "dflash": "DFlash"}


@pytest.mark.first(1)
@pytest.mark.parametrize("folder", TINY.drafts, ids=lambda folder: folder.name)
def test_a_shipped_head_has_the_acceptance_length_of_its_training_and_changes_no_token(folder):
    plan = make_plan(ExportConfig("gemma4-tiny", draft=folder, backend="xnnpack", chain_len=3))
    assert plan.draft.kind == KINDS[folder.name]
    session, text, stats = eager_session(plan), Text(TINY.checkpoint), GenerationStats()
    for prompt in map(text.encode, PROMPTS):
        found, plain = (complete(session, prompt, max_new_tokens=60, chain=chain) for chain in (3, 0))
        assert found.token_ids == plain.token_ids
        stats.add(found.stats)
    trained = FIGURES[folder.name]["acceptance"]
    assert abs(stats.counts()["mean_acceptance_length"] - trained["mean_acceptance_length"]) < 0.8
    assert trained["mean_acceptance_length"] > 2
