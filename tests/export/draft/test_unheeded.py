"""A draft head with keys that its trainer's code ignores is refused with the flag to type."""

import pytest
from dialect_files import (
    FC_NORMS,
    HIDDEN,
    IDS,
    LLAMA3,
    biases,
    norms,
    random_eagle,
    random_head,
    without,
    write,
)
from draft_oracle import check_draft
from refusals import refusal

from eagle3.export.draft.reading import read_draft

WINDOW = {"layer_types": ["sliding_attention"], "sliding_window": 6}
NOT_SAFEAILAB = [
    (random_head(), {"norm_before_residual": True}, "norm_before_residual is true"),
    (random_head(), {"eagle_config": {"norm_before_residual": True}}, "norm_before_residual is true"),
    (random_head() | norms("input_norm", size=3 * HIDDEN), {"norm_before_fc": True}, "norm_before_fc is true"),
    (random_head() | FC_NORMS, {}, "has fc_norm.0.weight"),
    (random_head(), {"use_aux_hidden_state": False}, "use_aux_hidden_state is false"),
    (without(random_head(), "norm.weight"), {"use_last_layernorm": False}, "use_last_layernorm is false"),
    (random_head(), WINDOW, 'layer_types is ["sliding_attention"]'),
    (random_head(), {"rope_scaling": LLAMA3}, 'rope_scaling has the type "llama3"'),
    (random_head(), {"rope_parameters": LLAMA3 | {"rope_theta": 1e4}}, 'rope_parameters has the type "llama3"'),
    (random_head() | biases("layers.0.self_attn.q_proj", size=HIDDEN), {}, "has layers.0.self_attn.q_proj.bias"),
    (random_head() | biases("fc", size=HIDDEN), {}, "has fc.bias"),
    (random_head() | norms("layers.0.self_attn.q_norm", size=16), {}, "has layers.0.self_attn.q_norm.weight"),
    (random_head(layers=2), {"num_hidden_layers": 2}, "has layers.1."),
    (random_eagle() | norms("norm"), {}, "has norm.weight"),
]
"""The settings that SafeAILab's modules have no place for: tensors, keys, and how the refusal begins."""


@pytest.mark.parametrize(("tensors", "keys", "says"), NOT_SAFEAILAB, ids=[each[2] for each in NOT_SAFEAILAB])
def test_keys_that_safeailabs_code_ignores_are_refused_with_the_flag_to_type(tensors, keys, says, tmp_path):
    line = refusal(read_draft, write(tmp_path / "head", "safeailab", tensors, **keys))
    assert says in line and "which SafeAILab's code ignores" in line and "--draft-dialect sglang" in line


@pytest.mark.parametrize(
    ("dialect", "keys", "says"),
    [
        ("specforge", {"norm_before_residual": True}, "norm_before_residual is true, which SpecForge's"),
        ("specforge", {"eagle_config": {"norm_before_fc": True}}, "norm_before_fc is true, which SpecForge's"),
        ("specforge", {"rope_scaling": {"rope_type": "proportional"}}, 'has the type "proportional"'),
        ("nemo", {"norm_before_residual": True}, "norm_before_residual is true, which NeMo's"),
        ("modelopt", {"eagle_config": {"norm_output": True}}, "norm_output is true, which ModelOpt's"),
        ("angelslim", {"norm_before_residual": True}, "norm_before_residual is true, which AngelSlim's"),
        ("angelslim", WINDOW, "layer_types is"),
    ],
)
def test_keys_that_another_trainers_code_ignores_are_refused_with_the_flag_to_type(dialect, keys, says, tmp_path):
    line = refusal(read_draft, write(tmp_path / "head", dialect, **keys))
    assert says in line and "--draft-dialect sglang" in line


def test_ignored_keys_are_accepted_if_the_dialect_is_given(tmp_path):
    bias = biases("layers.0.self_attn.q_proj", size=HIDDEN)
    keys = {"norm_before_residual": True, "norm_output": True, "rope_scaling": LLAMA3}
    folder = write(tmp_path / "head", "safeailab", random_head() | bias, **keys)
    draft = read_draft(folder, "sglang")
    assert draft.norm_before_residual and draft.feeds_normed and draft.layer.rope_parameters["rope_type"] == "llama3"
    assert check_draft(draft, 3)["logits"] < 1e-4
    plain = {"norm_before_residual": False, "norm_output": False, "rope_scaling": None, "use_last_layernorm": True}
    assert read_draft(write(tmp_path / "plain", "safeailab", **plain)).dialect == "safeailab"
    flagged = write(tmp_path / "flagged", "safeailab", norm_before_residual=True)
    assert read_draft(flagged, norm_before_residual=True).norm_before_residual  # the flag decides, without an error
    assert not read_draft(flagged, norm_before_residual=False).norm_before_residual


def test_taps_that_safeailabs_code_ignores_are_reported(tmp_path):
    draft = read_draft(write(tmp_path / "head", "safeailab", **{IDS: [1, 3, 4]}))
    (warning,) = draft.warnings
    assert draft.aux_layers == (1, 3, 4) and "names taps 1,3,4" in warning and "--aux-layers" in warning
    assert read_draft(write(tmp_path / "none", "safeailab")).warnings == ()
