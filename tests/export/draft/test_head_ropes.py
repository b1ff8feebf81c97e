"""An EAGLE head has the RoPE and the windows of its trainer's code, even if its file names others; a flag overrides
both."""

import pytest
from commands import fail_command
from dialect_files import LLAMA3, PEAGLE, norms, random_head, random_peagle, write
from draft_oracle import check_draft
from random_checkpoints import random_model

from eagle3.export.cli import main
from eagle3.export.configuration.config import ExportConfig
from eagle3.export.configuration.hub_names import HubName
from eagle3.export.draft.kinds.eagle.rope_reading import FILE, RopeFlags
from eagle3.export.draft.reading import read_draft
from eagle3.export.planning.plan import make_plan


def refusal(folder, **flags) -> str:
    with pytest.raises(ValueError) as refused:
        read_draft(folder, **flags)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def base(draft) -> float:
    assert check_draft(draft, 0 if draft.takes_final_state else 3)["logits"] < 1e-4
    return draft.layer.rope_parameters["rope_theta"]


MROPE = {"type": "mrope", "mrope_section": [2, 3, 3]}
INTERLEAVED = {"type": "default", "rope_type": "default", "mrope_interleaved": True, "mrope_section": [2, 3, 3]}
OF_QWEN3 = {"rope_theta": 1e6, "target_model_type": "qwen3"}


@pytest.mark.parametrize(
    ("keys", "trained"),
    [
        (OF_QWEN3, 1e4),
        (OF_QWEN3 | {"rope_scaling": MROPE}, 1e6),
        (OF_QWEN3 | {"rope_scaling": INTERLEAVED}, 1e6),
        (OF_QWEN3 | {"rope_scaling": LLAMA3}, 1e6),  # AngelSlim cannot have trained this head
    ],
)
def test_angelslims_heads_have_the_rope_base_of_their_training(keys, trained, tmp_path):
    draft = read_draft(write(tmp_path / "head", "angelslim", **keys))
    assert draft.dialect == "angelslim" and base(draft) == trained
    told = [line for line in draft.warnings if "rope_theta" in line]
    differs = "1e+06" not in str(trained) and trained != keys.get("rope_theta")
    assert len(told) == differs
    if differs:
        assert "rope_theta is 1000000, which AngelSlim's code ignores" in told[0]
        assert "has base 10000, as in training; type --draft-rope-theta file" in told[0]


@pytest.mark.parametrize(
    ("dialect", "keys", "says"),
    [
        ("safeailab", {}, "SafeAILab's code reads it when it runs a head"),
        ("specforge", {}, "SpecForge's code has read it since 2025-10-30 and used base 10000 before"),
        (
            "angelslim",
            {"target_model_type": None, "modal_type": None},
            "other systems save under the name of its class",
        ),
    ],
)
def test_a_rope_base_that_the_file_leaves_open_is_reported_with_the_flag(dialect, keys, says, tmp_path):
    folder = write(tmp_path / "head", dialect, rope_theta=1e6, **keys)
    draft = read_draft(folder)
    (line,) = [line for line in draft.warnings if "rope_theta" in line]
    assert base(draft) == 1e6 and says in line
    assert "rope_theta is 1000000, and the file does not show" in line and "type --draft-rope-theta 10000" in line
    for given, taken in ((1e4, 1e4), (FILE, 1e6)):
        draft = read_draft(folder, rope=RopeFlags(theta=given))
        assert base(draft) == taken and not any("rope_theta" in line for line in draft.warnings)
    plain = read_draft(write(tmp_path / "plain", dialect, rope_theta=1e4, **keys))
    assert not any("rope_theta" in line for line in plain.warnings)


def test_a_head_published_by_angelslim_with_specforges_name_has_angelslims_rope_base(tmp_path):
    folder = write(tmp_path / "head", "specforge", rope_theta=1e6)
    draft = read_draft(folder, rope=RopeFlags(publisher="AngelSlim"))
    (line,) = [line for line in draft.warnings if "rope_theta" in line]
    assert base(draft) == 1e4 and "which AngelSlim's code ignores" in line
    assert base(read_draft(folder, rope=RopeFlags(publisher="Tengyunw"))) == 1e6
    assert base(read_draft(folder, rope=RopeFlags(FILE, publisher="AngelSlim"))) == 1e6
    mrope = write(tmp_path / "mrope", "specforge", rope_theta=1e6, rope_scaling=MROPE)
    assert base(read_draft(mrope, rope=RopeFlags(publisher="AngelSlim"))) == 1e6


def test_the_publisher_of_a_head_is_the_owner_of_its_repository():
    named = {"draft": HubName("AngelSlim/Qwen3-4B_eagle3", "0" * 40)}
    assert ExportConfig("qwen3-4B", repositories=named).publisher == "AngelSlim"
    assert ExportConfig("qwen3-4B").publisher is None


@pytest.mark.parametrize(("value", "says"), [("nan", "nan is no finite number"), ("fil", "'fil' is not a valid")])
def test_an_impossible_rope_base_is_a_usage_error(value, says):
    code, line = fail_command(main, "--target-model", "gemma4-tiny", "--dry-run", "--draft-rope-theta", value)
    assert code == 2 and says in line


# --- a RoPE for each type of layer

BY_TYPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e4},
}


def test_speculators_heads_have_the_rope_of_sliding_layers(tmp_path):
    keys = {"rope_theta": None, "rope_parameters": BY_TYPE}
    assert base(read_draft(write(tmp_path / "head", "speculators", transformer_layer_config=keys))) == 5e4
    layers = {"num_hidden_layers": 2, "rope_theta": None, "rope_parameters": BY_TYPE}
    folder = write(tmp_path / "p", "speculators", random_peagle(), **PEAGLE | {"transformer_layer_config": layers})
    assert base(read_draft(folder)) == 5e4


@pytest.mark.parametrize("dialect", ["safeailab", "sglang"])
def test_a_rope_per_layer_type_is_refused_for_dialects_without_one(dialect, tmp_path):
    line = refusal(write(tmp_path / "head", dialect, rope_theta=None, rope_parameters=BY_TYPE))
    assert "rope_parameters has a RoPE for each type of layer" in line and "leave that one in rope_parameters" in line
    assert "rope_theta 1000000.0" in line and "rope_theta 50000.0" in line
    same = dict.fromkeys(BY_TYPE, {"rope_type": "default", "rope_theta": 5e4})
    equal = read_draft(
        write(tmp_path / "equal", dialect, rope_theta=None, rope_parameters=same, num_hidden_layers=1), "sglang"
    )
    assert base(equal) == 5e4


# --- partial rotary


@pytest.mark.parametrize(("layer", "peagle"), [("llama", False), ("qwen3", True)])
def test_speculators_heads_rotate_all_dimensions_whatever_partial_rotary_factor_says(layer, peagle, tmp_path):
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    keys = {"model_type": layer, "head_dim": 16, "rope_theta": None, "rope_parameters": rope}
    keys |= {"num_hidden_layers": 2} if peagle else {}
    more = norms("layers.0.self_attn.q_norm", "layers.0.self_attn.k_norm", size=16) if layer == "qwen3" else {}
    more |= norms("layers.1.self_attn.q_norm", "layers.1.self_attn.k_norm", size=16) if more and peagle else {}
    tensors = (random_peagle() if peagle else random_head()) | more
    named = PEAGLE if peagle else {}
    folder = write(tmp_path / "head", "speculators", tensors, **named | {"transformer_layer_config": keys})
    draft = read_draft(folder)
    (line,) = [line for line in draft.warnings if "partial_rotary_factor" in line]
    assert draft.layer.rope_parameters["partial_rotary_factor"] == 1.0 and check_draft(draft, 3)["logits"] < 1e-4
    assert "partial_rotary_factor is 0.5, which speculators' code ignores" in line
    assert "type --draft-partial-rotary file" in line
    given = read_draft(folder, rope=RopeFlags(part=FILE))
    assert given.layer.rope_parameters["partial_rotary_factor"] == 0.5 and check_draft(given, 3)["logits"] < 1e-4
    assert not any("partial_rotary_factor" in line for line in given.warnings)


@pytest.mark.parametrize("dialect", ["safeailab", "modelopt"])
def test_a_partial_rotary_factor_in_the_rope_is_refused_unless_a_flag_decides(dialect, tmp_path):
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    folder = write(tmp_path / "head", dialect, rope_theta=None, rope_parameters=rope)
    line = refusal(folder)
    assert "partial_rotary_factor is 0.5, which" in line and "ignores" in line
    for given, taken in ((1.0, 1.0), (FILE, 0.5)):
        draft = read_draft(folder, rope=RopeFlags(part=given))
        assert draft.layer.rope_parameters["partial_rotary_factor"] == taken
        assert check_draft(draft, 3)["logits"] < 1e-4


# --- windows

DERIVED = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}


@pytest.mark.parametrize(("dialect", "layer"), [("safeailab", "qwen2"), ("modelopt", "qwen3")])
def test_a_window_that_only_the_configuration_class_derives_is_refused(dialect, layer, tmp_path):
    line = refusal(write(tmp_path / "head", dialect, **DERIVED | {"model_type": layer}))
    assert "use_sliding_window is true, which" in line and "ignores" in line
    for name, change in (("off", {"use_sliding_window": False}), ("later", {"max_window_layers": 28})):
        assert read_draft(write(tmp_path / name, dialect, **DERIVED | change)).windows == (0,)
    assert read_draft(tmp_path / "head", "sglang").windows == (16,)


def test_rope_flags_reach_the_plan_and_its_record(tmp_path):
    random_model("llama3.1-8B", num_hidden_layers=12).save_pretrained(tmp_path / "target")
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    head = write(tmp_path / "head", "sglang", rope_theta=None, rope_parameters=rope)
    given = {"checkpoint": tmp_path / "target", "draft": head, "backend": "xnnpack"}
    plain = make_plan(ExportConfig("llama3.1-8B", **given)).draft.layer.rope_parameters
    flags = {"draft_rope_theta": 1e4, "draft_partial_rotary": 1.0}
    plan = make_plan(ExportConfig("llama3.1-8B", **given, **flags))
    assert (plain["rope_theta"], plain["partial_rotary_factor"]) == (1e6, 0.5)
    assert plan.draft.layer.rope_parameters == plain | {"rope_theta": 1e4, "partial_rotary_factor": 1.0}
    assert plan.config.as_json().items() >= flags.items() and check_draft(plan.draft, 3)["logits"] < 1e-4
