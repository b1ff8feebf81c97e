"""Packed checkpoints that are damaged, inconsistent or unsupported are refused in one line with the fault and what to
do."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from packed_checkpoints import (
    WIDE,
    auto_round_config,
    awq_config,
    change_config,
    compressed_tensors_config,
    gptq_config,
    planned,
    save_packed,
)
from safetensors.torch import load_file, save_file

from eagle3.export.checkpoints import open_source
from eagle3.export.checkpoints.awq import Awq
from eagle3.export.lowering.cuda.backend import BACKEND as cuda


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A function that maps a format to the folder of an asymmetric 4-bit checkpoint and its model."""
    made = {}

    def make(name: str):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = folder, save_packed(folder / "target", name, 4, 64, False, **WIDE)
        return made[name]

    return make


def refusal(packed, tmp_path, name="compressed-tensors", change=lambda tensors: None, **fields) -> str:
    """Return the error line for a copy with changed tensors and changed fields of config.json."""
    folder, model = packed(name)
    shutil.copytree(folder / "target", tmp_path / "target")
    tensors = load_file(tmp_path / "target" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "target" / "model.safetensors")
    change_config(tmp_path / "target", **fields)
    with pytest.raises((ValueError, FileNotFoundError)) as refused:
        planned(tmp_path, model, "xnnpack")
    assert "\n" not in str(refused.value)
    return str(refused.value)


MLX = {"group_size": 64, "bits": 4}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"quantization_config": MLX, "quantization": MLX},
            'has quantization {"group_size": 64, "bits": 4}, MLX\'s packing',
        ),
        ({"quantization_config": None, "quantization": MLX | {"mode": "affine"}}, "MLX's packing, which is not read"),
        (
            {"compression_config": {"quant_method": "x"}},
            "describes its weights twice and differently (quantization_config and compression_config,",
        ),
        (
            {"quantization_config": None, "compression_config": {"quant_method": "x"}},
            "compression_config has quant_method x",
        ),
    ],
)
def test_a_packing_is_refused_by_the_key_that_describes_it(packed, tmp_path, fields, says):
    assert is_in(says, refusal(packed, tmp_path, **fields))


DOWN = "model.layers.1.mlp.down_proj"


def without(part: str):
    return lambda tensors: tensors.pop(f"{DOWN}.{part}")


def with_part(part: str, value):
    return lambda tensors: tensors.update({f"{DOWN}.{part}": value})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without("weight_scale"), f"{DOWN}.weight_scale is not there: is a shard missing?"),
        (without("weight_zero_point"), "has no weight_zero_point, but quantization_config says symmetric: false"),
        (with_part("weight_zero_point", torch.ones(256, 8).char()), "is I8 [256, 8], but .* implies I32 [32, 8]"),
        (with_part("weight_shape", torch.tensor([256, 500])), "says 256 x 500, which .* groups of 64"),
        (with_part("weight_g_idx", torch.arange(512) % 7), "puts 74 columns into group 0, .* says 64"),
        (with_part("weight_g_idx", torch.arange(511, -1, -1) // 64), "has weight_g_idx, but .* actorder is not group"),
        (with_part("weight", torch.ones(256, 512)), "down_proj.weight and .*: which one is meant?"),
    ],
)
def test_packed_parts_that_do_not_match_are_named(packed, tmp_path, change, says):
    assert is_in(says, refusal(packed, tmp_path, change=change))


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("gptq", without("qzeros"), f"{DOWN}.qzeros is not there: is a shard missing?"),
        ("gptq", with_part("qzeros", torch.zeros(4, 32).int()), "qzeros is I32 [4, 32], but .* implies I32 [8, 32]"),
        ("gptq", with_part("g_idx", torch.arange(512).int() // 60), "puts 60 columns into group 0, .* says 64"),
        ("gptq", with_part("qzeros", torch.full((8, 32), 0x10F00).int()), "stores a zero point of 15 .* gptq_v2"),
        ("awq", with_part("qweight", torch.zeros(500, 32).int()), "qweight is 500 x 32, .* groups of 64"),
        ("awq", with_part("qweight", torch.zeros(()).int()), "qweight is [], but packed weights are matrices"),
        ("gptq", with_part("bias", torch.ones(256).half() / 8), "down_proj.bias, which is a bias that config.json"),
        ("gptq", with_part("g_idx", torch.arange(511, -1, -1).int() // 64), "out of their order, .* desc_act: false"),
        ("gptq", with_part("g_idx", torch.zeros(0).int()), "of 256 x 0 with 4 bits"),
    ],
)
def test_gptq_and_awq_parts_that_do_not_match_are_named(packed, tmp_path, name, change, says):
    assert is_in(says, refusal(packed, tmp_path, name, change))


def is_in(says: str, line: str) -> bool:
    assert re.search(re.escape(says).replace(r"\.\*", ".*"), line), line
    return True


def scheme(**weights):
    stored = compressed_tensors_config(4, 64, False)
    stored["config_groups"]["group_0"]["weights"] |= weights
    return stored


@pytest.mark.parametrize(
    ("stored", "says"),
    [
        ({"quant_method": "fp8"}, "weight_block_size None, but fp8 is read in blocks alone, such as [128, 128]"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method bitsandbytes"),
        ([4], "quantization_config is [4], from which transformers cannot build a model"),
        (scheme() | {"config_groups": {"a": scheme()["config_groups"]["group_0"] | {"targets": ["re:("]}}}, '["re:("]'),
        (scheme(num_bits=3), "group_0 of config_groups has num_bits 3, but must have 4 or 8 to be read"),
        (scheme(strategy="tensor_group", group_size=16), 'strategy "tensor_group"'),
        (scheme(strategy="channel"), "has group_size 64 and strategy channel, which compressed-tensors refuses"),
        (scheme(actorder="group"), "has no weight_g_idx, but quantization_config's actorder is group"),
        (scheme(group_size=128), "weight_scale is F16 .* implies F16/BF16/F32"),
        (scheme() | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme, which quantizes the KV cache"),
        (scheme() | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config, which rotates"),
        (scheme() | {"format": "int-quantized"}, 'format "int-quantized", but only pack-quantized'),
        (
            scheme() | {"config_groups": {"a": {"weights": {"num_bits": 4}, "input_activations": {"num_bits": 8}}}},
            "a of config_groups has input_activations",
        ),
    ],
)
def test_unsupported_quantization_schemes_are_refused_by_name(packed, tmp_path, stored, says):
    assert is_in(says, refusal(packed, tmp_path, quantization_config=stored))


@pytest.mark.parametrize(
    ("stored", "says"),
    [
        (gptq_config(3, 64, False), "bits 3, but must have 4 or 8"),
        (gptq_config(8, 64, False), "qweight is I32 [64, 256], but .* with 8 bits .* implies I32 [128, 256]"),
        (gptq_config(4, 64, False, "gptq_p"), "the format gptq_p, but only gptq and gptq_v2"),
        (auto_round_config(4, 64, False, "auto_round"), "packing_format auto_round, but only auto_round:auto_gptq and"),
        (auto_round_config(4, 64, False) | {"data_type": "mx_fp"}, "data_type mx_fp, but only int"),
        (gptq_config(4, 64, True), "_proj.qzeros has a zero point of .*, but .* sym: true, which implies 8"),
        (gptq_config(4, 64, False) | {"dynamic": {"+:.*down": {"sym": True}}}, "down_proj.qzeros has a zero point of"),
        (gptq_config(4, 64, False) | {"format": "gptq_v2"}, "checkpoint_format gptq and format gptq_v2, but they mean"),
        (auto_round_config(4, 64, False) | {"backend": "auto_round:awq"}, "backend auto_round:awq, which are of diff"),
        (awq_config(4, 64, True), "_proj.qzeros has a zero point of .*, but .* zero_point: false, which implies 8"),
        (awq_config(4, 64, False) | {"w_bit": 8}, "has bits 4 and w_bit 8, but they mean the same"),
        (awq_config(4, 64, False) | {"version": "gemv_fast"}, "the version gemv_fast, but only gemm"),
    ],
)
def test_unsupported_gptq_and_awq_schemes_are_refused_by_name(packed, tmp_path, stored, says):
    assert is_in(
        says,
        refusal(packed, tmp_path, stored["quant_method"].replace("auto-round", "gptq"), quantization_config=stored),
    )


def test_the_two_names_of_awqs_version_agree_in_capitals_too():
    config = awq_config(4, 64, False) | {"version": "GEMM"}
    assert Awq(Path("config.json"), config | {"format": "gemm"}).group == 64
    with pytest.raises(ValueError, match="version gemm and format gemv, but they mean the same"):
        Awq(Path("config.json"), config | {"format": "gemv"})


def test_linears_with_other_bits_by_gptqmodel_are_read_from_their_parts(packed, tmp_path):
    """GPTQModel's ``dynamic`` gives single linears other bits and groups."""
    folder, _ = packed("gptq")
    shutil.copytree(folder / "target", tmp_path / "target")
    change_config(tmp_path / "target", quantization_config=gptq_config(8, 128, False) | {"dynamic": {".*": {}}})
    assert open_source(tmp_path / "target").headers() == open_source(folder / "target").headers()


def test_config_groups_are_matched_by_name_then_pattern_then_class(packed, tmp_path):
    stored = scheme(num_bits=8)
    right = scheme()["config_groups"]["group_0"]
    stored["config_groups"] |= {"of_mlp": right | {"targets": ["re:.*mlp.*", DOWN]}}
    assert "self_attn" in refusal(packed, tmp_path, quantization_config=stored)
    stored["config_groups"]["group_0"]["weights"] |= {"num_bits": 4}
    assert stored["config_groups"]["of_mlp"]["weights"] == stored["config_groups"]["group_0"]["weights"]
    stored["config_groups"] = {"of_mlp": right | {"targets": ["re:.*mlp.*"]}}
    shutil.rmtree(tmp_path / "target")
    assert "no group of quantization_config is for it" in refusal(packed, tmp_path, quantization_config=stored)


def test_packed_weights_without_a_cuda_layout_are_refused_before_loading(tmp_path):
    model = save_packed(tmp_path / "target", "compressed-tensors", 4, 16, True, **WIDE)
    line = "proj.weight has scales for groups of 16 columns, but the kernels take 32, 64, 128"
    with pytest.raises(ValueError, match=line):
        cuda.check(planned(tmp_path, model, "cuda"))
