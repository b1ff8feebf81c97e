"""Checkpoints in FP8 with a scale for each block give the weights that transformers dequantizes, or are refused."""

import json

import pytest
import torch
from random_checkpoints import save_random_draft
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from eagle3.export.checkpoints import open_source
from eagle3.export.checkpoints.fp8_folder import Fp8Folder
from eagle3.export.configuration.config import ExportConfig
from eagle3.export.lowering.xnnpack.backend import BACKEND as xnnpack
from eagle3.export.pipeline import load_speculator
from eagle3.export.planning.plan import make_plan
from eagle3.export.twin.randomize import randomize
from eagle3.targets.attention import EagerAttention
from eagle3.targets.state_mixers import token_by_token

SIZE = {"vocab_size": 96, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "head_dim": 64}
SIZE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None}
SIZE |= {"eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
DELTA |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
FAMILIES = {"qwen3": {}, "qwen3_5_text": DELTA}
BLOCK = 64
DENSE = ("embed_tokens", "lm_head", "in_proj_a", "in_proj_b", "conv1d")  # published checkpoints leave these out, too


def coded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of random numbers as large as ``weight``'s; the last blocks may be narrower."""
    blocks = [-(-size // BLOCK) for size in weight.shape[-2:]]
    scales = torch.rand(*weight.shape[:-2], *blocks) * 0.02 + 0.001
    return torch.randn_like(weight).mul(3).to(torch.float8_e4m3fn), scales


def fp8_checkpoint(folder, family: str):
    """Write a random model whose linears are in FP8. Return the model with the weights that transformers makes of
    them."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZE | FAMILIES[family])).eval()
    randomize(model, 0)
    model.save_pretrained(folder)
    tensors, decode, dense = load_file(folder / "model.safetensors"), Fp8Dequantize(None), {}
    for name, value in list(tensors.items()):
        if value.ndim == 2 and not any(part in name for part in DENSE):
            codes, scales = coded(value)
            tensors[name], tensors[f"{name}_scale_inv"] = codes, scales
            dense[name] = decode._dequantize_one(codes, scales, torch.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    fields["quantization_config"] |= {"weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(fields))
    model.load_state_dict(dense, strict=False)
    return model


@pytest.mark.first(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_in_fp8_has_the_weights_and_the_logits_of_transformers(family, tmp_path):
    model = fp8_checkpoint(tmp_path / "target", family)
    own, found = model.state_dict(), dict(open_source(tmp_path / "target").tensors())
    assert found.keys() == own.keys()
    assert all(torch.equal(found[name], value) for name, value in own.items())
    draft = save_random_draft(tmp_path / "draft", model.config, (0, 1, 2))
    flags = {"backend": "xnnpack", "max_seq_len": 64, "checkpoint": tmp_path / "target", "draft": draft}
    plan = make_plan(ExportConfig("auto", None, **flags))
    assert any("weights are in FP8 and are dequantized" in line for line in plan.warnings)
    target = load_speculator(plan, EagerAttention, torch.float32, xnnpack.conversion(plan)).target
    tokens = torch.arange(5, 45)[None]
    with token_by_token(model), torch.no_grad():
        expected = model(tokens, use_cache=False).logits
    state, _ = target(tokens, torch.arange(40), ())
    torch.testing.assert_close(target.logits(state), expected, rtol=1e-4, atol=1e-4)


def folder_of(path, tensors, **fields) -> Fp8Folder:
    said = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]} | fields
    path.joinpath("config.json").write_text(json.dumps({"text_config": {"quantization_config": said}}))
    save_file(tensors, path / "model.safetensors")
    source = open_source(path)
    assert isinstance(source, Fp8Folder)
    return source


def test_narrow_blocks_at_the_ends_and_experts_have_their_own_scales(tmp_path):
    codes, scales = coded(torch.empty(3, 100, 70))
    source = folder_of(tmp_path, {"experts.up_proj": codes, "experts.up_proj_scale_inv": scales.bfloat16()})
    found = source.tensor("experts.up_proj")
    for expert, row, column in ((0, 0, 0), (1, 63, 64), (2, 64, 63), (2, 99, 69)):
        scale = scales.bfloat16()[expert, row // BLOCK, column // BLOCK].float()
        assert found[expert, row, column] == codes[expert, row, column].float() * scale
    assert source.headers()["experts.up_proj"].shape == (3, 100, 70)
    assert list(source.headers()) == ["experts.up_proj"]


def test_scales_that_are_powers_of_two_may_be_stored_as_such(tmp_path):
    codes, scales = coded(torch.empty(100, 70))
    scales = scales.to(torch.float8_e8m0fnu)
    source = folder_of(tmp_path, {"a.weight": codes, "a.weight_scale_inv": scales})
    expected = Fp8Dequantize(None)._dequantize_one(codes[:64, :64], scales[:1, :1].float(), torch.float32)
    assert torch.equal(source.tensor("a.weight")[:64, :64], expected)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda codes, scales: {"a.weight": codes}, "a.weight_scale_inv is not there: is a shard missing"),
        (lambda codes, scales: {"a.weight": codes, "a.weight_scale": scales}, "has a.weight_scale, a form that is not"),
        (lambda codes, scales: {"a.weight": codes.float(), "a.weight_scale_inv": scales}, "is F32"),
        (lambda codes, scales: {"a.weight": codes, "a.weight_scale_inv": scales[:1]}, r"scales F32 \[1, 2\]"),
        (
            lambda codes, scales: {"a.weight": codes.float().to(torch.float8_e5m2), "a.weight_scale_inv": scales},
            "F8_E5M2",
        ),
    ],
)
def test_codes_and_scales_that_do_not_fit_are_refused(change, says, tmp_path):
    source = folder_of(tmp_path, change(*coded(torch.empty(128, 128))))
    with pytest.raises(ValueError, match=says):
        source.headers()
