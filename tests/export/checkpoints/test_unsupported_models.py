"""An unsupported model is refused in one line with the file, the model, the reason and what to type."""

import pytest
import torch
from family_configs import SIZE
from torch.nn import functional as F
from transformers import CONFIG_MAPPING
from transformers.models.llama.modeling_llama import LlamaMLP

from eagle3.export.checkpoints.target_config import read_target_config
from eagle3.export.twin.target import check_target
from eagle3.targets import spec_for
from eagle3.targets.attention import ForwardRows, Window, _attend

NO_DECODER = ("bloom", "gpt2", "jetmoe", "mpt", "opt")
OTHER_LAYERS = {"minimax": "linear_attention", "zaya": "hybrid"}


def refusal(config, folder) -> str:
    config.save_pretrained(folder)
    with pytest.raises(ValueError) as raised:
        text = read_target_config(folder, "auto")
        check_target(spec_for("auto", text.model_type), "auto", folder, text)
    line = str(raised.value)
    assert str(folder / "config.json") in line and "\n" not in line and len(line) - len(str(folder)) < 400
    return line


@pytest.mark.parametrize("model_type", NO_DECODER)
def test_a_model_with_another_structure_is_refused(model_type, tmp_path):
    line = refusal(CONFIG_MAPPING[model_type](), tmp_path)
    assert f"({model_type})" in line and " has no " in line and "--list-targets" in line


@pytest.mark.parametrize("model_type", OTHER_LAYERS)
def test_an_unsupported_kind_of_layer_is_refused(model_type, tmp_path):
    line = refusal(CONFIG_MAPPING[model_type](), tmp_path)
    assert f"({model_type})" in line and f"layer_types has {OTHER_LAYERS[model_type]}" in line and "--list-t" in line


def test_a_state_that_no_cache_and_no_layer_type_shows_is_refused(tmp_path, monkeypatch):
    """In transformers' own model each MLP also reads the row before (a token shift, as in RWKV)."""
    original = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: original(self, x + F.pad(x, (0, 0, 1, 0))[:, :-1]))
    assert "would not compute" in refusal(CONFIG_MAPPING["llama"](**SIZE), tmp_path)


def test_a_multimodal_model_with_its_lm_head_in_another_place_is_refused(tmp_path):
    assert "Florence2ForConditionalGeneration has no" in refusal(CONFIG_MAPPING["florence2"](), tmp_path)


def test_a_layer_that_computes_its_own_mask_is_refused(tmp_path):
    """Doge computes a mask that weighs the positions, which the attention of an export would leave out."""
    fields = SIZE | {"hidden_size": 64, "num_attention_heads": 4}
    assert "attention_mask" in refusal(CONFIG_MAPPING["doge"](**fields), tmp_path)
    module = torch.nn.Module()
    module.forward_rows, module.kv_window = ForwardRows(), Window()
    module.forward_rows.by_window[Window()] = ()
    query = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match="attention_mask"):
        _attend(module, query, query, query, torch.zeros(1, 1, 3, 3), 1.0)
