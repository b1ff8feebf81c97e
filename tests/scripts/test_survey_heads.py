"""The survey of heads reads a configuration of each trainer as that trainer's code does, and finds wrong readings."""

from dataclasses import replace

import pytest
from survey_heads import READ, REFUSED, WRONG, heads, outcome

BY_NAME = {f"{head.trainer}: {head.name}": head for head in heads()}
ONE_OF_EACH = [
    "AngelSlim: qwen3-4B",
    "AngelSlim: qwen3-4B of VL, mrope",
    "AngelSlim: cosyvoice3",
    "SafeAILab: EAGLE-mixtral",
    "SpecForge: phi4",
    "SpecForge: qwen3-8B, P-EAGLE",
    "NeMo: gpt-oss-20B",
    "NeMo: phi4, EAGLE 1",
    "ModelOpt: gpt-oss-120b-Eagle3-v3",
    "speculators: a RoPE by layer type",
    "DFlash family: qwen3-32B, DSpark, a block of 16",
]


def test_no_head_is_listed_twice_and_about_a_hundred_are():
    assert len(BY_NAME) == len(list(heads())) > 100


@pytest.mark.first(2)
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_head_is_read_as_its_trainer_computes_it(name):
    what, line = outcome(BY_NAME[name])
    assert what == READ, line


@pytest.mark.parametrize("name", [name for name, head in BY_NAME.items() if head.refused])
def test_a_head_of_the_survey_is_refused_for_the_expected_reason(name):
    what, line = outcome(BY_NAME[name])
    assert what == REFUSED and len(line) < 300, line


@pytest.mark.parametrize("change", [{"base": 1e6}, {"window": 7}, {"normed": True}, {"untold": True}, {"refused": "x"}])
def test_the_survey_finds_a_head_that_is_read_wrongly(change):
    assert outcome(replace(BY_NAME["AngelSlim: qwen3-4B"], **change))[0] == WRONG
