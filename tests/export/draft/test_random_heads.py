"""Random configurations of every kind of head equal the oracle (``tests/oracle``), or are refused in one line.

A configuration is that of a golden head with a few keys changed. The oracle makes the weights of its small copy itself.
"""

import json
import shutil
import tempfile
from pathlib import Path

import pytest
from draft_oracle import ORACLES, check_draft
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from places import GOLDEN
from random_checkpoints import random_model, save_random_assistant

from eagle3.export.draft.kinds import KINDS
from eagle3.export.draft.loading import check_computed, check_head
from eagle3.export.draft.reading import read_draft

LAYER = "transformer_layer_config"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 8.0, "mscale": 1.0}
LONG = {"original_max_position_embeddings": 64}
ROPES = [{"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}, LLAMA3 | LONG, YARN | LONG]
OF_LAYERS = {
    "hidden_act": st.sampled_from(["silu", "gelu", "gelu_pytorch_tanh", "relu"]),
    "rms_norm_eps": st.sampled_from([1e-6, 1e-5, 1e-3]),
    "rope_parameters": st.builds(
        lambda rope, theta: rope | {"rope_theta": theta}, st.sampled_from(ROPES), st.sampled_from([1e4, 5e5])
    ),
}
"""Keys of the layers of any kind, each with values."""
OF_EAGLE = {
    "norm_before_residual": st.booleans(),
    "norm_output": st.booleans(),
    "partial_rotary_factor": st.sampled_from([0.5, 1.0]),
}
OF_DFLASH = {
    "block_size": st.integers(3, 6),
    "sample_from_anchor": st.booleans(),
    "sliding_window_non_causal": st.booleans(),
    "input_embedding_scale": st.sampled_from([1.0, 2.5]),
    "output_multiplier": st.sampled_from([1.0, 0.5]),
    "final_logit_softcapping": st.sampled_from([None, 5.0]),
    "num_jacobi_passes": st.integers(1, 4),
    "pure_draft_prefix_len": st.integers(0, 2),
    "selector_top_k": st.integers(2, 8),
}
OF_MLP = {"n_predict": st.integers(2, 5), "scale_input": st.booleans(), "tie_weights": st.booleans()}
KEYS = dict.fromkeys(("EAGLE-3", "EAGLE", "P-EAGLE"), OF_EAGLE) | {"MLP speculator": OF_MLP, "MTP": {}}
FOLDERS = {"EAGLE-3": "eagle3", "EAGLE": "eagle", "P-EAGLE": "peagle", "MLP speculator": "mlp", "MTP": "mtp"}
GOLDEN_HEADS = {
    kind: [path for path in sorted((GOLDEN / FOLDERS.get(kind, "dflash")).iterdir()) if path.is_dir()]
    for kind in KINDS
    if kind != "Gemma 4 assistant"
}
GOLDEN_HEADS |= {
    kind: [path for path in GOLDEN_HEADS[kind] if path.name.split("_")[0] == kind.lower()]
    for kind in KINDS
    if kind not in FOLDERS and kind in GOLDEN_HEADS
}
EXAMPLES = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))


def outcome(folder: Path) -> bool:
    """Return True for a head that equals the oracle, False for one that is refused."""
    try:
        draft = read_draft(folder)
        check_computed(draft, taps := 0 if draft.takes_final_state else len(draft.aux_layers or (1, 2, 3)))
    except ValueError as error:
        assert "\n" not in str(error)
        note(str(error))
        return False
    found = check_draft(draft, taps)
    return found["logits"] < 1e-4 and found["states"] < 1e-4


def test_every_kind_has_an_oracle_and_golden_heads():
    assert set(ORACLES) == set(KINDS) and all(GOLDEN_HEADS.values())


@pytest.mark.parametrize("kind", GOLDEN_HEADS)
def test_random_configurations_equal_the_oracle_or_are_refused(kind):
    computed = []

    @EXAMPLES
    @given(source=st.sampled_from(GOLDEN_HEADS[kind]), data=st.data())
    def check(source, data):
        config = json.loads((source / "config.json").read_text())
        keys = KEYS.get(kind, OF_DFLASH)
        own = data.draw(st.fixed_dictionaries({}, optional=keys))
        layer = {} if kind == "MLP speculator" else data.draw(st.fixed_dictionaries({}, optional=OF_LAYERS))
        for each in (config, config.get("dflash_config") or {}):
            each |= {key: value for key, value in own.items() if key in each or each is config}
        fields = config.get(LAYER, config)
        fields |= layer
        if "rope_parameters" in layer:
            fields.pop("rope_scaling", None)
            fields.pop("rope_theta", None)
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made, "head")
            shutil.copytree(source, folder)
            (folder / "config.json").write_text(json.dumps(config))
            note(f"{source.name}: {own} {layer}")
            computed.append(outcome(folder))

    check()
    assert any(computed)


@settings(EXAMPLES, max_examples=3)
@given(ordered=st.booleans(), epsilon=OF_LAYERS["rms_norm_eps"], window=st.integers(8, 20))
def test_random_assistants_equal_transformers_own(ordered, epsilon, window):
    config = random_model("gemma4-31B").config
    with tempfile.TemporaryDirectory() as made:
        assert outcome(save_random_assistant(Path(made), config, ordered, rms_norm_eps=epsilon, sliding_window=window))


def test_an_assistant_that_would_not_be_computed_as_transformers_does_is_refused(tmp_path):
    folder = save_random_assistant(tmp_path, random_model("gemma4-31B").config, hidden_activation="silu")
    with pytest.raises(ValueError, match="would not be computed as transformers computes it"):
        check_head(read_draft(folder), 0)


def test_a_head_whose_sizes_do_not_fit_together_is_refused_before_its_weights_load(tmp_path):
    folder = tmp_path / "head"
    shutil.copytree(GOLDEN / "eagle3" / "llama_nbr_true", folder)
    config = json.loads((folder / "config.json").read_text())
    config[LAYER]["num_key_value_heads"] = 3
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="describes a draft head that cannot be computed"):
        check_head(read_draft(folder), 3)
