"""Checkpoints with experts are read as transformers reads them, in each stored form, or refused by name."""

import json
from types import SimpleNamespace

import pytest
import torch
from eager import eager_speculator
from mxfp4_checkpoints import mxfp4_checkpoint
from random_checkpoints import MAVERICK, SIZE, random_model, save_random_draft
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    GptOssForCausalLM,
    Llama4Config,
    Llama4ForConditionalGeneration,
    Llama4TextConfig,
    Mxfp4Config,
)
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

from eagle3.export.checkpoints import open_source
from eagle3.export.checks.preflight import preflight
from eagle3.export.configuration.config import ExportConfig
from eagle3.export.output.progress import Progress
from eagle3.export.planning.plan import make_plan
from eagle3.export.twin.randomize import randomize
from eagle3.export.twin.target import without_images
from eagle3.targets.experts import use_experts

TOKENS = torch.arange(5, 45)[None]
EXPERT = "model.layers.1.mlp.experts.2.down_proj.weight"


def planned(folder, name: str):
    draft = save_random_draft(folder.parent / "draft", text_config(folder), aux_layers=(0, 1, 2))
    return make_plan(
        ExportConfig(name, output_dir=None, backend="xnnpack", checkpoint=folder, draft=draft, max_seq_len=64)
    )


def text_config(folder):
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder).get_text_config()


def logits(plan) -> torch.Tensor:
    """Return the target's logits for ``TOKENS``, computed in the longest forwards that it supports."""
    target, found = eager_speculator(plan).target, []
    for positions in torch.arange(TOKENS.shape[1]).split(16):
        state, _ = target(TOKENS[:, positions], positions, ())
        found.append(target.logits(state))
    return torch.cat(found, dim=1)


def edited(folder, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def qwen(tmp_path):
    model = random_model("qwen3-30B-A3B", num_hidden_layers=2)
    model.save_pretrained(tmp_path / "target")
    return model, tmp_path / "target"


def test_stacked_experts_in_a_checkpoint_are_read(qwen):
    model, folder = qwen
    assert EXPERT in load_file(folder / "model.safetensors")  # stored one by one, as transformers saves them
    expected = logits(planned(folder, "qwen3-30B-A3B"))
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    assert EXPERT not in load_file(folder / "model.safetensors")
    assert torch.equal(logits(planned(folder, "qwen3-30B-A3B")), expected)
    torch.testing.assert_close(expected, model(TOKENS).logits, atol=1e-4, rtol=1e-4)


def test_a_missing_expert_is_named(qwen):
    edited(qwen[1], lambda tensors: tensors.pop(EXPERT))
    with pytest.raises(ValueError, match=f"lacks {EXPERT}"):
        planned(qwen[1], "qwen3-30B-A3B")


def test_an_expert_of_another_shape_is_named(qwen):
    edited(qwen[1], lambda tensors: tensors.update({EXPERT: tensors[EXPERT][:, :-1].clone()}))
    with pytest.raises(ValueError, match=rf"{EXPERT} is \[64, 63\], but config.json implies \[64, 64\]"):
        planned(qwen[1], "qwen3-30B-A3B")


def test_the_text_model_of_a_multimodal_llama_4_is_computed_as_transformers_does(tmp_path):
    text = Llama4TextConfig(**SIZE | {"num_hidden_layers": 4}, **MAVERICK)
    vision = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes = {"image_size": 28, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
    special = {"boi_token_index": 1, "eoi_token_index": 2, "image_token_index": 3}
    config = Llama4Config(text_config=text.to_dict(), vision_config=vision | sizes, **special)
    model = Llama4ForConditionalGeneration(config).float().eval().requires_grad_(False)
    randomize(model.language_model, seed=3)
    model.save_pretrained(tmp_path / "target")
    names = load_file(tmp_path / "target" / "model.safetensors")
    assert "language_model.model.layers.1.feed_forward.experts.gate_up_proj" in names
    assert json.loads((tmp_path / "target" / "config.json").read_text())["model_type"] == "llama4"
    plan = planned(tmp_path / "target", "llama4-maverick")
    assert preflight(plan, Progress())["target"]["tokens"] > 2 * 24
    assert plan.sliding_window == 24
    without_images(model.language_model)  # transformers 5.24.0 raises an error without this field
    torch.testing.assert_close(logits(plan), model(TOKENS).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Step3p7Experts, "do not say how their weights lie"), (MuseSparkExperts, "have a norm of their own")],
)
def test_an_unsupported_kind_of_experts_is_named(kind, reason):
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "moe_latent_size": None, "hidden_act": "silu"}
    sizes |= {"num_local_experts": 4, "moe_hidden_size": 64, "post_norm_eps": 1e-6}
    model = nn.ModuleDict({"experts": kind(SimpleNamespace(**sizes))})
    with pytest.raises(ValueError, match=rf"its experts \({kind.__name__}\) {reason}: not supported"):
        use_experts(model)


def test_mxfp4_experts_are_dequantized_as_by_transformers(tmp_path):
    mxfp4_checkpoint(tmp_path / "target")
    plan = planned(tmp_path / "target", "gpt-oss-20b")
    expected = GptOssForCausalLM.from_pretrained(
        tmp_path / "target", quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    )
    dequantized = expected.state_dict()
    for name, tensor in open_source(tmp_path / "target").tensors():
        assert torch.equal(tensor, dequantized[name]), name
    found = preflight(plan, Progress())
    assert found["target"]["layers"] == 2
    torch.testing.assert_close(logits(plan), expected.float()(TOKENS).logits, atol=1e-3, rtol=1e-3)


def test_mxfp4_blocks_without_scales_are_named(tmp_path):
    mxfp4_checkpoint(tmp_path / "target")
    edited(tmp_path / "target", lambda tensors: tensors.pop("model.layers.0.mlp.experts.down_proj_scales"))
    with pytest.raises(ValueError, match="but model.layers.0.mlp.experts.down_proj_scales is not there"):
        planned(tmp_path / "target", "gpt-oss-20b")
