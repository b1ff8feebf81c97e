"""Checkpoints that other tools quantized: their codes, scales and zero points, taken over as they are."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from executorch.extension.llm.export.quant import dequantize_weight
from packed_checkpoints import (
    FORMATS,
    change_config,
    compressed_tensors,
    compressed_tensors_config,
    linears,
    save_packed,
)
from random_checkpoints import save_random_draft
from safetensors.torch import load_file, save_file
from torchao.utils import TorchAOBaseTensor

from eagle3.export.backends import BACKENDS
from eagle3.export.checkpoints import open_source
from eagle3.export.config import ExportConfig
from eagle3.export.lowering.cuda import backend as cuda
from eagle3.export.lowering.cuda.graph_check import check_linears
from eagle3.export.lowering.xnnpack import backend as xnnpack
from eagle3.export.pipeline import load_speculator, make_metadata, trace
from eagle3.export.plan import make_plan
from eagle3.export.preflight import preflight
from eagle3.export.progress import Progress
from eagle3.export.report import plan_text
from eagle3.runner.loop import complete
from eagle3.runner.session import EagerSession
from eagle3.targets.attention import EagerAttention

GOLDEN = Path(__file__).parent / "golden_quantized"
CASES = sorted(str(path.parent.relative_to(GOLDEN)) for path in GOLDEN.glob("*/*/config.json"))
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 8}


def golden(case: str) -> tuple[TorchAOBaseTensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Our weight, the tool's own dense one, and the parts that it packed."""
    source = open_source(GOLDEN / case)
    ((name, weight),) = source.tensors()
    expected = load_file(GOLDEN / case / "dense.safetensors")
    assert source.headers()[name].shape == weight.shape == expected[name].shape
    parts = load_file(GOLDEN / case / "model.safetensors")
    return weight, expected[name], {key.removeprefix("model.proj."): value for key, value in parts.items()}


@pytest.mark.parametrize("case", CASES)
def test_dense_weights_are_those_of_the_tool_that_packed_them(case):
    weight, expected, _ = golden(case)
    assert torch.equal(dequantize_weight(weight, torch.float32).to(expected.dtype), expected)


def codes_of(weight: TorchAOBaseTensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [N, K], scales and zero points [N, groups], unsigned."""
    if weight.qdata.dtype == torch.int8:
        return weight.qdata.long() + 128, weight.scale, weight.zero_point.long() + 128
    codes = torch.stack((weight.qdata & 15, weight.qdata >> 4), -1).flatten(1)
    return codes.long(), weight.scale.t(), weight.zero_point.t().long()


@pytest.mark.parametrize("case", CASES)
def test_the_tests_pack_as_the_tool_does(case):
    weight, _, parts = golden(case)
    codes, scale, zero = codes_of(weight)
    bits = 8 if weight.qdata.dtype == torch.int8 else 4
    mine = compressed_tensors(codes, scale, zero if "weight_zero_point" in parts else None, bits)
    assert mine.keys() == parts.keys()
    for part, value in parts.items():
        assert value.dtype == mine[part].dtype and torch.equal(value, mine[part]), part


def planned(folder: Path, model, backend: str):
    arch = "sm_90" if backend == "cuda" and not torch.cuda.is_available() else None
    draft = save_random_draft(folder / "draft", model.config, aux_layers=(0, 1, 2))
    folders = {"checkpoint": folder / "target", "draft": draft}
    config = ExportConfig("auto", output_dir=None, backend=backend, cuda_arch=arch, max_seq_len=64, **folders)
    return make_plan(config)


SCHEMES = [(4, 32, True), (4, 64, False), (4, 128, True), (4, -1, True), (8, 128, False), (8, -1, True)]


@pytest.mark.parametrize(("bits", "group", "symmetric"), SCHEMES)
@pytest.mark.parametrize("name", FORMATS)
def test_on_the_cpu_tokens_are_transformers_with_the_dequantized_weights(name, bits, group, symmetric, tmp_path):
    model = save_packed(tmp_path / "target", name, bits, group, symmetric, **WIDE)
    plan = planned(tmp_path, model, "xnnpack")
    preflight(plan, Progress())
    assert "dequantized to float32 as they load" in plan_text(plan)
    convert = xnnpack.conversion(plan)
    speculator = load_speculator(plan, EagerAttention, torch.float32, convert)
    expected = model.state_dict()
    for key, value in speculator.target.causal_lm.state_dict().items():
        if "kv_cache" not in key:
            assert torch.equal(value, expected[key]), key
    assert convert.record() == {"dequantized": len(linears(model))}
    session = EagerSession(speculator, make_metadata(plan, {}))
    tokens = torch.randint(96, (20,), generator=torch.Generator().manual_seed(3)).tolist()
    result = complete(session, tokens, max_new_tokens=12, stop_ids=[]).token_ids
    with torch.no_grad():
        for _ in range(12):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert result == tokens[20:]


@pytest.mark.parametrize(("bits", "group", "symmetric"), SCHEMES)
@pytest.mark.parametrize("name", FORMATS)
def test_on_cuda_every_packed_linear_keeps_its_codes_and_verifies_on_the_small_m_path(
    name, bits, group, symmetric, tmp_path
):
    model = save_packed(tmp_path / "target", name, bits, group, symmetric, **WIDE)
    plan = planned(tmp_path, model, "cuda")
    assert plan.qlinear == "checkpoint" and "stay as they are" in plan_text(plan)
    convert = cuda.conversion(plan)
    speculator = load_speculator(plan, cuda.attention, cuda.DTYPE, convert)
    cuda.prepare(speculator, plan)
    given = {key: value for key, value in plan.target_source.tensors() if isinstance(value, TorchAOBaseTensor)}
    for linear, module in linears(speculator.target.causal_lm):
        before, after = given[f"{linear}.weight"], module.weight
        assert torch.equal(before.qdata, after.qdata)
        if bits == 4:
            _, scale, zero = codes_of(before)
            repeats = after.scale.shape[1] // scale.shape[1]
            steps = after.scale_step.float().repeat_interleave(256 // after.block_size[1], 1)
            held, scale = after.scale.float() * steps, scale.float().repeat_interleave(repeats, 1)
            assert ((held - scale).abs() <= convert.rounding[f"{linear}.weight"] * scale * (1 + 1e-6)).all()
            assert torch.equal(after.zero_point.long(), zero.repeat_interleave(repeats, 1))
            assert (after.zero_point_step == 1).all()
    rounded = convert.record()["scales"]
    assert rounded["weights"] == len(given) and rounded["largest_rounding"] <= 2**-8
    with cuda.tracing(speculator, plan):
        program = trace(speculator, plan.method("target_verify"), plan.draft.hidden_size, cuda.DTYPE)
    assert check_linears("target_verify", program) == {"small_m": len(given), "dequantize": 0}
    assert len(given) == 7 * 2


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """An asymmetric w4a16 with its model."""
    folder = tmp_path_factory.mktemp("packed")
    return folder, save_packed(folder / "target", "compressed-tensors", 4, 64, False, **WIDE)


def refusal(packed, tmp_path, backend="xnnpack", change=lambda tensors: None, **fields) -> str:
    """The line for a copy whose tensors and config.json's fields are changed."""
    folder, model = packed
    shutil.copytree(folder / "target", tmp_path / "target")
    tensors = load_file(tmp_path / "target" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "target" / "model.safetensors")
    change_config(tmp_path / "target", **fields)
    with pytest.raises((ValueError, FileNotFoundError)) as refused:
        plan = planned(tmp_path, model, backend)
        BACKENDS[backend].load().check(plan)
    assert "\n" not in str(refused.value)
    return str(refused.value)


DOWN = "model.layers.1.mlp.down_proj"


def without(part: str):
    return lambda tensors: tensors.pop(f"{DOWN}.{part}")


def with_part(part: str, value):
    return lambda tensors: tensors.update({f"{DOWN}.{part}": value})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without("weight_scale"), f"{DOWN}.weight_scale is not there: is a shard missing?"),
        (without("weight_packed"), f"{DOWN}.weight_packed is not there: is a shard missing?"),
        (without("weight_zero_point"), "has no weight_zero_point, but quantization_config says symmetric: false"),
        (with_part("weight_scale", torch.ones(256, 4)), "weight_scale is F32 [256, 4], but .* implies .* [256, 8]"),
        (with_part("weight_zero_point", torch.ones(256, 8).char()), "is I8 [256, 8], but .* implies I32 [32, 8]"),
        (with_part("weight_shape", torch.tensor([256, 500])), "says 256 x 500, which .* groups of 64"),
        (with_part("weight_shape", torch.tensor([256, 1024])), "is I32 [256, 64], but .* implies I32 [256, 128]"),
        (with_part("weight_g_idx", torch.arange(512) % 8), "puts column 1 into group 1, not 0: .* without it"),
        (with_part("weight", torch.ones(256, 512)), "down_proj.weight and .*: which one is meant?"),
        (with_part("k_scale", torch.ones(1)), "k_scale, which a model of its config.json has no place for"),
    ],
)
def test_parts_that_do_not_go_together_are_named(packed, tmp_path, change, says):
    line = refusal(packed, tmp_path, change=change)
    assert re.search(re.escape(says).replace(r"\.\*", ".*"), line), line


def scheme(**weights):
    stored = compressed_tensors_config(4, 64, False)
    stored["config_groups"]["group_0"]["weights"] |= weights
    return stored


@pytest.mark.parametrize(
    ("stored", "says"),
    [
        ({"quant_method": "fp8"}, "quant_method fp8, which is not read: name the original checkpoint, or one of"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method bitsandbytes"),
        (scheme(num_bits=3), "group_0 of config_groups has num_bits 3, but 4 and 8 is what is read"),
        (scheme(type="float"), 'type "float", but "int"'),
        (scheme(strategy="tensor_group", group_size=16), 'strategy "tensor_group"'),
        (scheme(group_size=0), "group_size 0"),
        (scheme(group_size=128), "weight_scale is F16 .* implies F16/BF16/F32"),
        (scheme(symmetric=True), "has weight_zero_point, but quantization_config says symmetric: true"),
        (scheme() | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme, which quantizes the KV cache"),
        (scheme() | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config, which rotates"),
        (scheme() | {"format": "nvfp4-pack-quantized"}, 'format "nvfp4-pack-quantized", but pack-quantized'),
        (scheme() | {"config_groups": {}}, "no config_groups"),
        (
            scheme() | {"config_groups": {"a": {"weights": {"num_bits": 4}, "input_activations": {"num_bits": 8}}}},
            "a of config_groups has input_activations",
        ),
    ],
)
def test_schemes_that_are_not_computed_are_refused_by_name(packed, tmp_path, stored, says):
    line = refusal(packed, tmp_path, quantization_config=stored)
    assert re.search(re.escape(says).replace(r"\.\*", ".*"), line), line


def test_groups_are_found_by_name_then_pattern_then_class(packed, tmp_path):
    stored = scheme(num_bits=8)
    right = scheme()["config_groups"]["group_0"]
    stored["config_groups"] |= {"of_mlp": right | {"targets": ["re:.*mlp.*", DOWN]}}
    assert "self_attn" in refusal(packed, tmp_path, quantization_config=stored)
    stored["config_groups"]["group_0"]["weights"] |= {"num_bits": 4}
    assert stored["config_groups"]["of_mlp"]["weights"] == stored["config_groups"]["group_0"]["weights"]
    stored["config_groups"] = {"of_mlp": right | {"targets": ["re:.*mlp.*"]}}
    shutil.rmtree(tmp_path / "target")
    assert "no group of quantization_config is for it" in refusal(packed, tmp_path, quantization_config=stored)


def test_what_cuda_has_no_layout_for_is_refused_before_weights_load(tmp_path):
    model = save_packed(tmp_path / "target", "compressed-tensors", 4, 16, True, **WIDE)
    with pytest.raises(ValueError, match="proj.weight has scales for groups of 16 columns, but 32, 64, 128"):
        cuda.check(planned(tmp_path, model, "cuda"))
