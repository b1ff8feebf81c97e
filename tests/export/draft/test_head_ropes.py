"""An EAGLE head has the RoPE and the windows of its trainer's code, even if its file names others; a flag overrides
both."""

import json

import pytest
import torch
from commands import fail_command
from dialect_files import HIDDEN, LLAMA3, PEAGLE, norms, random_eagle, random_head, random_peagle, write
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
COSYVOICE = {"architectures": ["CosyVoice3Eagle3LlamaForCausalLM"], "target_model_type": None, "modal_type": None}


@pytest.mark.parametrize(
    ("keys", "trained"),
    [
        (OF_QWEN3, 1e4),
        (OF_QWEN3 | {"rope_scaling": {"type": "linear", "factor": 2.0}}, 1e4),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e4),
        (COSYVOICE | {"rope_theta": 1e6}, 1e4),
        (OF_QWEN3 | {"rope_scaling": MROPE}, 1e6),
        (OF_QWEN3 | {"rope_scaling": MROPE | {"rope_type": "default"}}, 1e6),  # as transformers rewrites the file
        (OF_QWEN3 | {"rope_scaling": INTERLEAVED}, 1e6),
        (OF_QWEN3 | {"rope_scaling": LLAMA3}, 1e6),  # AngelSlim cannot have trained this head
        ({"rope_theta": 1e4}, 1e4),
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


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--draft-rope-theta", "0"], "0.0 is not in the range x>0"),
        (["--draft-rope-theta", "nan"], "nan is no finite number"),
        (["--draft-rope-theta", "fil"], "'fil' is not a valid"),
        (["--draft-partial-rotary", "1.5"], "1.5 is not in the range 0<x<=1"),
    ],
)
def test_an_impossible_rope_value_is_a_usage_error(flags, says):
    code, line = fail_command(main, "--target-model", "gemma4-tiny", "--dry-run", *flags)
    assert code == 2 and says in line


@pytest.mark.parametrize("dialect", ["sglang", "nemo", "modelopt", "deepspec", "speculators"])
def test_the_rope_base_of_a_trainer_that_reads_it_gets_no_warning(dialect, tmp_path):
    keys = {"transformer_layer_config": {"rope_theta": 1e6}} if dialect == "speculators" else {"rope_theta": 1e6}
    draft = read_draft(write(tmp_path / "head", dialect, **keys))
    assert base(draft) == 1e6 and not any("rope_theta" in line for line in draft.warnings)


def test_safeailabs_eagle_1_has_the_rope_base_of_its_file(tmp_path):
    draft = read_draft(write(tmp_path / "head", "safeailab", random_eagle(), rope_theta=5e5, draft_vocab_size=None))
    assert base(draft) == 5e5 and draft.warnings == ()


def test_the_rope_base_flag_resolves_safeailabs_linear_rope(tmp_path):
    linear = {"type": "linear", "factor": 2.0}
    folder = write(tmp_path / "head", "safeailab", rope_theta=5e5, rope_scaling=linear)
    assert "rope_theta beside a linear rope_scaling" in refusal(folder)
    assert base(read_draft(folder, rope=RopeFlags(theta=1e4))) == 1e4
    assert base(read_draft(folder, rope=RopeFlags(theta=FILE))) == 5e5


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


@pytest.mark.parametrize("dialect", ["safeailab", "specforge", "sglang", "angelslim", "nemo", "modelopt", "deepspec"])
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


@pytest.mark.parametrize("peagle", [False, True])
@pytest.mark.parametrize("layer", ["llama", "qwen3"])
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


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_speculators_heads_with_a_scaled_rope_rotate_a_part_of_each_head(kind, tmp_path):
    rope = (LLAMA3 if kind == "llama3" else {"rope_type": kind, "factor": 2.0}) | {"rope_theta": 1e4}
    keys = {"rope_theta": None, "rope_parameters": rope | {"partial_rotary_factor": 0.5}}
    draft = read_draft(write(tmp_path / "head", "speculators", transformer_layer_config=keys))
    assert draft.layer.rope_parameters["partial_rotary_factor"] == 0.5
    assert not any("partial_rotary_factor" in line for line in draft.warnings)


@pytest.mark.parametrize("dialect", ["safeailab", "specforge", "angelslim", "modelopt"])
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


@pytest.mark.parametrize("layer", ["qwen2", "qwen3"])
@pytest.mark.parametrize("dialect", ["safeailab", "specforge", "angelslim", "modelopt"])
def test_a_window_that_only_the_configuration_class_derives_is_refused(dialect, layer, tmp_path):
    line = refusal(write(tmp_path / "head", dialect, **DERIVED | {"model_type": layer}))
    assert "use_sliding_window is true, which" in line and "ignores" in line
    for name, change in (("off", {"use_sliding_window": False}), ("later", {"max_window_layers": 28})):
        assert read_draft(write(tmp_path / name, dialect, **DERIVED | change)).windows == (0,)
    assert read_draft(tmp_path / "head", "sglang").windows == (16,)


def test_nemos_heads_have_full_attention_whatever_their_targets_layers(tmp_path):
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 6, "sliding_window": 6}
    draft = read_draft(write(tmp_path / "head", "nemo", model_type="gpt_oss", **kinds))
    assert draft.windows == (0,) and check_draft(draft, 3)["logits"] < 1e-4
    assert any("NeMo copies the sliding layers from the target" in line for line in draft.warnings)


# --- nonsense


@pytest.mark.parametrize("value", ["Infinity", "NaN", "0", "1e30"])
@pytest.mark.parametrize("dialect", ["safeailab", "speculators"])
def test_a_norm_epsilon_that_is_not_a_small_number_is_refused(dialect, value, tmp_path):
    folder = write(tmp_path / "head", dialect)
    config = json.loads((folder / "config.json").read_text())
    (config["transformer_layer_config"] if dialect == "speculators" else config)["rms_norm_eps"] = float(value)
    (folder / "config.json").write_text(json.dumps(config))
    assert "rms_norm_eps is" in refusal(folder)


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


def test_the_rope_base_changes_a_heads_numbers(tmp_path):
    from eagle3.export.draft.kinds.eagle.layers import rotary_table

    folder = write(tmp_path / "head", "angelslim", **OF_QWEN3)
    position, state = torch.tensor([[40]]), torch.zeros(1, 1, HIDDEN)
    trained, file = (read_draft(folder, rope=RopeFlags(theta=theta)) for theta in (None, FILE))
    assert not torch.equal(rotary_table(trained)(state, position)[0], rotary_table(file)(state, position)[0])
