"""Published checkpoints are read as transformers reads them: with heads tied to embeddings of any name, MTP layers, and
parts of a multimodal model beside its text model. Only tensors that transformers ignores are ignored."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from eager import eager_session, eager_speculator
from random_checkpoints import SIZE, save_random_draft
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from eagle3.export.checkpoints import open_source
from eagle3.export.checkpoints.target_config import read_target_config
from eagle3.export.configuration.config import ExportConfig
from eagle3.export.planning.plan import make_plan
from eagle3.export.twin.target import check_target
from eagle3.runner.loop.generation import complete

ALL = SIZE | {"num_hidden_layers": 4}
TEXT = {key: value for key, value in ALL.items() if key != "head_dim"}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
ROUTED = EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1}
MLA = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
MLA |= {"head_dim": 8, "num_key_value_heads": 4}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}
PIXTRAL = VISION | {"model_type": "pixtral", "head_dim": 16}
INTERN = VISION | {"model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [14, 14]}
ALPHA = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}


def around(model_type: str, **text) -> dict:
    """Return the fields of a multimodal configuration around a text model; the outer part does not mention the
    lm_head."""
    fields = transformers.CONFIG_MAPPING[model_type](**text).to_dict()
    del fields["tie_word_embeddings"]
    return fields


CONFIGS = {
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **TEXT, **EXPERTS, shared_expert_intermediate_size=64, num_experts=4
    ),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(**ALL, **ROUTED, topk_group=1),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**ALL | MLA, **ROUTED, topk_group=1),
    "hunyuan_v1_dense": lambda: transformers.HunYuanDenseV1Config(**ALL, rope_parameters=ALPHA),
    "mistral3": lambda: transformers.Mistral3Config(text_config=around("mistral", **ALL), vision_config=PIXTRAL),
    "internvl": lambda: transformers.InternVLConfig(text_config=around("qwen2", **TEXT), vision_config=INTERN),
    "idefics3": lambda: transformers.Idefics3Config(text_config=around("llama", **ALL), vision_config=VISION),
}


def saved(name: str, folder: Path, **changes):
    """Return a random model. Its folder is written by ``save_pretrained`` and contains a draft head."""
    torch.manual_seed(3)
    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    multimodal = config is not config.get_text_config()
    model = (AutoModelForImageTextToText if multimodal else AutoModelForCausalLM).from_config(config).float().eval()
    for value in model.requires_grad_(False).parameters():
        if value.ndim > 1:
            value.normal_(std=value.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    save_random_draft(folder / "draft", config.get_text_config(), aux_layers=(1, 2, 3))
    return model


def planned(folder: Path):
    return make_plan(ExportConfig("auto", None, folder, folder / "draft", backend="xnnpack", max_seq_len=64))


def greedy(model, prompt: list[int], count: int) -> list[int]:
    said = list(prompt)
    for _ in range(count):
        said.append(int(model(torch.tensor([said])).logits[0, -1].argmax()))
    return said[len(prompt) :]


def change(folder: Path, tensors: dict[str, Tensor | None]) -> None:
    """Add tensors to a checkpoint; None removes one."""
    file = folder / "model.safetensors"
    every = load_file(file) | tensors
    save_file({name: value for name, value in every.items() if value is not None}, file, {"format": "pt"})


# The twin check refuses Idefics 3: its image tower reads its own values while it is made on the meta device.
@pytest.mark.first(1)
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "idefics3"])
def test_a_published_checkpoints_tokens_equal_transformers(name, tmp_path):
    model = saved(name, tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) == (name not in ("mistral3", "internvl"))
    plan = planned(tmp_path)
    check_target(plan.spec, "auto", tmp_path, plan.target_config)
    session = eager_session(plan)
    prompt = list(range(5, 25))
    assert complete(session, prompt, max_new_tokens=16, stop_ids=()).token_ids == greedy(model, prompt, 16)


def further_layer(folder: Path, layer: int, stem: str = "model.layers") -> dict[str, Tensor]:
    """Return the tensors of an MTP layer as DeepSeek V3 and GLM-4.5 store it: copies of the last layer's tensors, and
    four further ones."""
    last = {name: value for name, value in load_file(folder / "model.safetensors").items() if ".layers.3." in name}
    made = {name.replace(".layers.3.", f".layers.{layer}."): value.clone() for name, value in last.items()}
    own = {"eh_proj": (64, 128), "enorm": (64,), "hnorm": (64,), "shared_head.norm": (64,)}
    made |= {f"{stem}.{layer}.{name}.weight": torch.ones(shape) for name, shape in own.items()}
    return made | {f"{stem}.{layer}.{name}.weight": torch.ones(96, 64) for name in ("embed_tokens", "shared_head.head")}


def test_an_mtp_layer_in_a_checkpoint_is_ignored(tmp_path):
    model = saved("deepseek_v3", tmp_path)
    before = planned(tmp_path)
    further = further_layer(tmp_path, 4)
    further["model.layers.4.eh_proj.weight"].fill_(float("nan"))  # its values are never read
    change(tmp_path, further)
    plan = planned(tmp_path)
    assert plan.target_headers == before.target_headers
    speculator = eager_speculator(plan)
    session = eager_session(plan, speculator)
    prompt = list(range(5, 25))
    assert complete(session, prompt, max_new_tokens=8, stop_ids=()).token_ids == greedy(model, prompt, 8)


def test_a_layer_listed_as_ignored_for_another_model_size_is_refused(tmp_path):
    """A class lists a layer for each published size. In the larger model, the layer listed for the smaller one is an
    ordinary layer."""
    from eagle3.export.planning.tensors import unread
    from eagle3.targets.decoder_layers import skeleton

    config = transformers.Glm4MoeConfig(**ALL | {"num_hidden_layers": 60}, **ROUTED, topk_group=1)
    names = {"model.layers.46.own.weight", "model.layers.92.own.weight"}
    config.save_pretrained(tmp_path)
    assert unread(names, names, skeleton(config, 16).model, config, tmp_path) == {"model.layers.92.own.weight"}


@pytest.mark.parametrize("name", ["mistral3", "idefics3"])
def test_only_parts_beside_the_text_model_are_ignored(name, tmp_path):
    saved(name, tmp_path)
    plan = planned(tmp_path)
    beside = set(load_file(tmp_path / "model.safetensors")) - set(plan.target_headers)
    part = {"mistral3": "multi_modal_projector", "idefics3": "connector"}[name]
    assert {name for name in beside if part in name}
    text = {"mistral3": "language_model.model", "idefics3": "model.text_model"}[name]
    for stray in ("model.second_projector.weight", f"{text}.layers.0.self_attn.q_proj.lora_A.weight"):
        change(tmp_path, {stray: torch.ones(2, 2)})
        with pytest.raises(ValueError, match=stray.replace(".", r"\.")):
            planned(tmp_path)
        change(tmp_path, {stray: None})


@pytest.mark.parametrize("name", ["mistral3", "idefics3"])
def test_a_missing_lm_head_is_reported_if_the_whole_configuration_ties_none(name, tmp_path):
    saved(name, tmp_path, tie_word_embeddings=False)
    change(tmp_path, {"lm_head.weight": None, "language_model.lm_head.weight": None})
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight, which its config\.json implies"):
        planned(tmp_path)


def test_a_window_of_zero_is_accepted_only_if_no_layer_uses_it(tmp_path):
    config = CONFIGS["qwen2_moe"]()
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["sliding_window"] == 0
    assert set(read_target_config(tmp_path, "auto").layer_types) == {"full_attention"}
    for other in (
        transformers.MistralConfig(**ALL, sliding_window=16),
        transformers.Gemma3TextConfig(**ALL, sliding_window=16),
        transformers.Qwen2Config(**TEXT, use_sliding_window=True, sliding_window=16, max_window_layers=2),
    ):
        shutil.rmtree(tmp_path)
        other.save_pretrained(tmp_path)
        fields = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(fields | {"sliding_window": 0}))
        with pytest.raises(ValueError, match="sliding_window is 0, but must be a whole number from 1"):
            read_target_config(tmp_path, "auto")


@pytest.mark.parametrize("rope", [ALPHA | {"alpha": 0}, {"rope_type": "dynamic", "factor": 2.0}])
def test_a_dynamic_rope_without_a_fixed_alpha_is_refused(rope, tmp_path):
    config = transformers.HunYuanDenseV1Config(**ALL, rope_parameters=ALPHA | rope)
    config.rope_parameters = {"rope_theta": 1e4} | rope
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="rope_type dynamic is not supported"):
        read_target_config(tmp_path, "auto")
    transformers.LlamaConfig(**ALL, rope_parameters=ALPHA).save_pretrained(tmp_path)  # its class has no alpha
    with pytest.raises(ValueError, match="rope_type dynamic is not supported"):
        read_target_config(tmp_path, "auto")


@pytest.mark.parametrize("name", ["bloom", "mamba", "rwkv"])
def test_a_model_without_positions_or_attention_heads_is_refused_in_one_line(name, tmp_path):
    transformers.CONFIG_MAPPING[name]().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"json \({name}\) has no (max_position|num_attention)\w+, which every"):
        read_target_config(tmp_path, "auto")


@pytest.mark.parametrize("usual", [True, False], ids=["beside the usual file", "alone"])
def test_weight_files_of_another_name_that_transformers_would_read_are_refused(usual, tmp_path):
    model = AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZE))
    model.save_pretrained(tmp_path)
    draft = save_random_draft(tmp_path / "draft", model.config, aux_layers=(0, 1, 2))
    weights = {name: value + 1 for name, value in load_file(tmp_path / "model.safetensors").items()}
    save_file(weights, tmp_path / "other.safetensors", metadata={"format": "pt"})
    if not usual:
        (tmp_path / "model.safetensors").unlink()
    file = tmp_path / "config.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps(said | {"transformers_weights": "other.safetensors"}))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.model.embed_tokens.weight, weights["model.embed_tokens.weight"])
    with pytest.raises(ValueError, match="transformers_weights is 'other.safetensors', and transformers reads it"):
        planned(tmp_path)
    own = draft / "config.json"
    own.write_text(json.dumps(json.loads(own.read_text()) | {"transformers_weights": "other.safetensors"}))
    with pytest.raises(ValueError, match="draft/config.json: transformers_weights"):
        open_source(draft)
