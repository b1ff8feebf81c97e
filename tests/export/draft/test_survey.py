"""121 configurations of draft heads, as their trainers write them, are read as the trainer's code computes, or refused
for a known reason.

A line of ``tests/golden/survey/heads.jsonl`` has a name, ``config.json``, the shapes of the tensors, and what
is right: the RoPE base, the window (0 for none), whether the trainer feeds the normed state, and whether the file
leaves the base open (``untold``), which a line has to say; or words of the refusal. The facts come from the public
configurations and code of AngelSlim, SafeAILab/EAGLE, SpecForge, NeMo Automodel, ModelOpt, vLLM, speculators and
DeepSpec, and of heads on the hub, read 2026-11.
"""

import json

import pytest
from draft_oracle import check_draft
from places import GOLDEN
from survey_targets import save_zeros

from eagle3.export.draft.kinds.eagle.description import EagleDescription
from eagle3.export.draft.kinds.eagle.rope_reading import BASE_DOUBT
from eagle3.export.draft.reading import read_draft

ONE_OF_EACH = (
    "AngelSlim: qwen3-4B",
    "DFlash family: qwen3-32B, DSpark, a block of 16",
    "SafeAILab: EAGLE-mixtral",
    "SpecForge: qwen3-8B, P-EAGLE",
    "NeMo: gpt-oss-20B",
    "NeMo: phi4, EAGLE 1",
    "ModelOpt: gpt-oss-120b-Eagle3-v3",
    "speculators: a RoPE by layer type",
)
HEADS = [json.loads(line) for line in (GOLDEN / "survey" / "heads.jsonl").read_text().splitlines()]


def saved(head: dict, folder):
    (folder / "config.json").write_text(json.dumps(head["config"]))
    save_zeros({name: tuple(shape) for name, shape in head["tensors"].items()}, folder)
    return folder


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head["name"])
def test_a_head_is_read_as_its_trainer_computes_it(head, tmp_path):
    folder = saved(head, tmp_path)
    if "refused" in head:
        with pytest.raises(ValueError) as refusal:
            read_draft(folder)
        line = str(refusal.value).replace(str(tmp_path), "")
        assert head["refused"] in line and len(line) < 300 and "\n" not in line
        return
    draft = read_draft(folder)
    rope = draft.layer.rope_parameters
    windows = draft.windows if isinstance(draft, EagleDescription) else (draft.layer.sliding_window or 0,)
    assert head["right"] == {
        "base": rope["rope_theta"],
        "window": max(windows),
        "normed": getattr(draft, "feeds_normed", False),
        "untold": any(BASE_DOUBT in line for line in draft.warnings),
    }
    assert (rope.get("partial_rotary_factor") or 1.0) == 1.0
    if head["name"] in ONE_OF_EACH:  # a small copy of it equals the formulas of its kind
        check_draft(draft, 0 if draft.takes_final_state else len(draft.aux_layers or (0, 0, 0)))
