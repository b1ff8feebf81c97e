"""A head of an unsupported kind or form, and a checkpoint that is no head, are refused in one line that says so."""

import json
from pathlib import Path

import pytest
import torch
from dialect_files import FLAT, write
from mtp_heads import changed, plan_of, save_target
from random_checkpoints import random_model
from refusals import refusal
from safetensors.torch import save_file

from eagle3.export.draft.reading import read_draft

LLAMA = FLAT | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None}


def save(folder: Path, config: dict, *names: str, file: str = "model.safetensors") -> Path:
    """Write a checkpoint of tensors with these names. Without names the file is invalid, so that opening it fails."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if names:
        save_file({name: torch.zeros(2, 2) for name in names}, folder / file)
    else:
        (folder / file).write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    ("config", "file", "says"),
    [
        ({"medusa_num_heads": 3, "medusa_num_layers": 1}, "medusa_lm_head.pt", "is a Medusa head"),
        ({"hydra_num_heads": 4, "hydra_num_layers": 4}, "hydra_lm_head.pt", "is a Hydra head"),
        ({"model_type": "recurrent_drafting_drafter"}, "model.safetensors", "is a ReDrafter head"),
    ],
)
def test_a_head_of_another_kind_is_named_before_its_weights_are_looked_for(config, file, says, tmp_path):
    line = refusal(read_draft, save(tmp_path / "head", config, file=file))
    assert says in line and "--list-drafts" in line


def test_a_griffin_head_is_refused_by_its_fusion(tmp_path):
    head = save(tmp_path / "head", LLAMA, "fc.fc.weight", "fc.mlp.up_proj.weight", "layers.0.self_attn.q_proj.weight")
    assert "is a GRIFFIN head" in refusal(read_draft, head)


# --- models that draft by themselves


def test_an_independent_draft_model_is_refused(tmp_path):
    small = save(tmp_path / "small", LLAMA, "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight")
    line = refusal(read_draft, small)
    assert f"if it is the target, type --checkpoint {small}; independent draft models are not supported" in line
    pard = save(tmp_path / "pard", LLAMA | {"pard_token": 5}, "model.layers.0.self_attn.q_proj.weight")
    line = refusal(read_draft, pard)
    assert f"{pard} is a PARD model (pard_token in config.json): independent draft models are not supported" in line
    assert read_draft(write(tmp_path / "head", "sglang", pard_token=5)).kind == "EAGLE-3"


# --- MTP layers


@pytest.mark.parametrize(
    ("layer", "architecture"),
    [("model.layers.0.", "DeepseekV3ForCausalLMNextN"), ("model.layers.61.", "DeepseekV3ForCausalLM")],
)
def test_an_export_of_only_the_mtp_layer_asks_for_its_target(layer, architecture, tmp_path):
    config = {"model_type": "deepseek_v3", "architectures": [architecture], "num_hidden_layers": 61}
    names = [f"{layer}{name}.weight" for name in ("eh_proj", "enorm", "self_attn.kv_b_proj")]
    line = refusal(read_draft, save(tmp_path / "head", config, "model.embed_tokens.weight", *names))
    assert "is the MTP layer of a deepseek_v3 model alone" in line
    assert "type --checkpoint with its folder or its name on the hub, and --draft mtp" in line


def test_a_target_whose_mtp_layer_has_unknown_names_gets_a_message(tmp_path):
    llama = tmp_path / "llama"
    random_model("llama3.1-8B", num_hidden_layers=4).save_pretrained(llama)
    name = "model.mtp_layers.0.input_proj.weight"
    target = changed(llama, tmp_path / "target", tensors={name: torch.zeros(64, 128)})
    line = refusal(plan_of, target)
    assert f"--draft mtp: {target} has an MTP layer of an unsupported form ({name})" in line
    line = refusal(read_draft, target)
    assert "is a llama model with an MTP layer of an unsupported form, no head by itself" in line


# --- other files


def test_a_gguf_head_is_refused_with_a_request_for_its_original_checkpoint(tmp_path):
    asks = "GGUF heads are not read: type --draft with the checkpoint that the head was converted from"
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "eagle3.gguf").write_bytes(b"GGUF")
    assert f"{folder} has only GGUF weights (eagle3.gguf): {asks}" in refusal(read_draft, folder)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert asks in refusal(read_draft, folder)
    target = save_target(tmp_path / "target", "qwen3")
    for file in (folder / "eagle3.gguf", tmp_path / "nothing.GGUF"):
        assert f"--draft {file}: {asks}" in refusal(plan_of, target, file)


def test_a_head_in_mistrals_own_form_is_refused_by_name(tmp_path):
    (tmp_path / "params.json").write_text("{}")
    save_file({"eagle_linear.weight": torch.zeros(2, 2)}, tmp_path / "consolidated.safetensors")
    line = refusal(read_draft, tmp_path)
    assert f"{tmp_path} is in Mistral's own form (params.json, no config.json), which is not supported" in line
