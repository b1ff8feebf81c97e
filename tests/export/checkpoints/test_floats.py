"""Checkpoints in NVFP4 and FP8 of llm-compressor and Model Optimizer give the weights that these tools dequantize, or
are refused."""

import json
import shutil

import pytest
import torch
from places import GOLDEN
from random_checkpoints import save_random_draft
from safetensors.torch import load_file, save_file
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from transformers import Qwen3Config, Qwen3ForCausalLM

from eagle3.export.checkpoints import open_source
from eagle3.export.checkpoints.float_folder import FloatFolder
from eagle3.export.configuration.config import ExportConfig
from eagle3.export.lowering.xnnpack.backend import BACKEND as xnnpack
from eagle3.export.pipeline import load_speculator
from eagle3.export.planning.plan import make_plan
from eagle3.export.twin.randomize import randomize
from eagle3.targets.attention import EagerAttention

FLOATS = GOLDEN / "floats"
WEIGHT = "model.proj.weight"
SIZE = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16}


@pytest.mark.parametrize("case", ["nvfp4", "modelopt_nvfp4", "fp8_tensor", "fp8_row", "fp8_block"])
def test_weights_are_those_that_the_tool_dequantizes(case):
    source, expected = open_source(FLOATS / case), load_file(FLOATS / case / "dense.safetensors")[WEIGHT]
    found = dict(source.tensors())
    assert found.keys() == source.headers().keys() == {WEIGHT}
    assert source.headers()[WEIGHT].shape == tuple(expected.shape)
    assert source.headers()[WEIGHT].dtype == "F32"
    assert found[WEIGHT].dtype == torch.float32
    # compressed-tensors rounds NVFP4 to bfloat16
    assert torch.equal(found[WEIGHT].to(expected.dtype), expected)
    assert torch.equal(source.tensor(WEIGHT), found[WEIGHT])


def stored(linear: str, weight: torch.Tensor, kind: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the parts of a weight as Model Optimizer stores it, and its value by torchao."""
    if kind == "FP8":
        scale = weight.abs().max() / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        return {f"{linear}.weight": codes, f"{linear}.weight_scale": scale}, codes.float() * scale
    made = NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=per_tensor_amax_to_scale(weight.abs().max()))
    parts = {"weight": made.qdata, "weight_scale": made.scale, "weight_scale_2": made.per_tensor_scale}
    return {f"{linear}.{name}": value for name, value in parts.items()}, made.dequantize(torch.float32)


def test_a_target_in_nvfp4_and_fp8_has_the_logits_of_transformers(tmp_path):
    config = Qwen3Config(**SIZE, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    model = Qwen3ForCausalLM(config).eval().requires_grad_(False)
    randomize(model, 0)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        linear = name.removesuffix(".weight")
        parts, dense = stored(linear, tensors.pop(name), "FP8" if "self_attn" in name else "NVFP4")
        parts |= {f"{linear}.input_scale": torch.tensor(0.1)}
        parts |= {f"{linear}.k_scale": torch.tensor(1.0)} if linear.endswith("k_proj") else {}
        tensors |= parts
        model.get_submodule(linear).weight.copy_(dense)
    save_file({name: value.contiguous() for name, value in tensors.items()}, tmp_path / "model.safetensors")
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    draft = save_random_draft(tmp_path / "draft", config, (0, 1, 2))
    plan = make_plan(ExportConfig("auto", None, tmp_path, draft, backend="xnnpack", max_seq_len=64))
    (line,) = (line for line in plan.warnings if "dequantized as they are read" in line)
    assert line.startswith("21 weights are in FP8 and NVFP4") and "keys and values" in line
    target = load_speculator(plan, EagerAttention, torch.float32, xnnpack.conversion(plan)).target
    tokens = torch.arange(5, 45)[None]
    state, _ = target(tokens, torch.arange(40), ())
    torch.testing.assert_close(target.logits(state), model(tokens).logits, rtol=1e-4, atol=1e-4)


def changed(tmp_path, case, change) -> FloatFolder:
    """Return a case's folder with tensors that ``change`` rewrites."""
    shutil.copy(FLOATS / case / "config.json", tmp_path)
    tensors = load_file(FLOATS / case / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    return FloatFolder(tmp_path)


def drop(part):
    return lambda tensors: tensors.pop(f"model.proj.{part}")


def cut(part):
    return lambda tensors: tensors.update({f"model.proj.{part}": tensors[f"model.proj.{part}"][:, :-1].contiguous()})


def cast(part, dtype):
    return lambda tensors: tensors.update({f"model.proj.{part}": tensors[f"model.proj.{part}"].to(dtype)})


@pytest.mark.parametrize(
    ("case", "change", "says"),
    [
        ("nvfp4", drop("weight_scale"), "has model.proj.weight_packed, but model.proj.weight_scale is not there"),
        ("modelopt_nvfp4", drop("weight_scale_2"), "model.proj.weight_scale_2 is not there"),
        ("nvfp4", cut("weight_scale"), r"is U8 \[12, 48\] with scales F8_E4M3 \[12, 5\], which is neither"),
        ("fp8_row", cast("weight_scale", torch.float8_e4m3fn), "which is neither NVFP4 nor FP8"),
        ("fp8_row", cast("weight", torch.float8_e5m2), r"is F8_E5M2 \[12, 96\]"),
    ],
)
def test_parts_that_do_not_fit_are_refused(case, change, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        changed(tmp_path, case, change).headers()


@pytest.mark.parametrize(
    ("field", "says"), [("transform_config", "rotates"), ("sparsity_config", "without their zeros")]
)
def test_a_computation_that_the_export_lacks_is_refused(field, says, tmp_path):
    fields = json.loads((FLOATS / "nvfp4" / "config.json").read_text())
    fields["quantization_config"][field] = {"config_groups": {"u": {}}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    shutil.copy(FLOATS / "nvfp4" / "model.safetensors", tmp_path)
    with pytest.raises(ValueError, match=f"{field}, which .*{says}"):
        open_source(tmp_path)


def folder_of(path, shape: tuple[int, int], name: str, form, **fields) -> tuple[FloatFolder, torch.Tensor]:
    """Write a weight in FP8 with a scale for each block of 128 x 128, which ``form`` reshapes. Return it and what it
    means."""
    torch.manual_seed(0)
    codes = torch.randn(shape).to(torch.float8_e4m3fn)
    scales = 2.0 ** torch.randint(-8, 3, [-(-size // 128) for size in shape])
    spread = scales.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    save_file({WEIGHT: codes, f"model.proj.{name}": form(scales).contiguous()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": fields}))
    return FloatFolder(path), codes.float() * spread


BLOCKS = {"quant_method": "compressed-tensors", "format": "float-quantized"}
BLOCKS |= {"config_groups": {"g": {"weights": {"num_bits": 8, "strategy": "block", "block_structure": [128, 128]}}}}


@pytest.mark.parametrize(
    ("shape", "name", "form", "fields"),
    [
        ((384, 320), "weight_scale", lambda s: s[:, None, :, None], {"quant_method": "modelopt"}),
        ((6, 700), "weight_scale", lambda s: s, {"quant_method": "modelopt"}),  # as many blocks as rows
        ((384, 320), "weight_scale_inv", lambda s: s, {"quant_method": "modelopt", "quant_algo": "FP8_BLOCK_SCALES"}),
        ((384, 128), "weight_scale", lambda s: s.to(torch.float8_e8m0fnu), BLOCKS),
    ],
)
def test_blocks_are_told_by_the_shape_of_their_scales(shape, name, form, fields, tmp_path):
    source, expected = folder_of(tmp_path, shape, name, form, **fields)
    assert torch.equal(source.tensor(WEIGHT), expected)
    assert source.headers().keys() == {WEIGHT}


def test_scales_that_two_block_sizes_explain_are_refused(tmp_path):
    groups = {str(rows): {"weights": {"block_structure": [rows, 128]}} for rows in (128, 110)}  # 3 blocks of 300 rows
    fields = BLOCKS | {"config_groups": groups}
    source, _ = folder_of(tmp_path, (300, 128), "weight_scale", lambda scales: scales, **fields)
    with pytest.raises(ValueError, match=r"blocks of \(128, 128\) and \(110, 128\)"):
        source.headers()


def test_two_scales_of_one_weight_are_refused(tmp_path):
    with pytest.raises(ValueError, match="weight_scale and model.proj.weight_scale_inv: which one is meant"):
        changed(tmp_path, "fp8_row", lambda t: t.update({"model.proj.weight_scale_inv": torch.ones(1)})).headers()
