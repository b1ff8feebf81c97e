"""Checkpoints that other tools quantized keep their codes, scales and zero points in an export."""

import json
from pathlib import Path

import pytest
import torch
from eager import eager_session, eager_speculator
from executorch.extension.llm.export.quant import dequantize_weight
from packed_checkpoints import (
    WIDE,
    dense,
    gptq,
    gptq_config,
    linears,
    planned,
    save_packed,
)
from places import TESTS
from safetensors.torch import load_file, save_file
from torchao.utils import TorchAOBaseTensor

from eagle3.export.checkpoints import open_source
from eagle3.export.checks.preflight import preflight
from eagle3.export.lowering.cuda.backend import BACKEND as cuda
from eagle3.export.lowering.cuda.graph.check import check_linears
from eagle3.export.lowering.xnnpack.backend import BACKEND as xnnpack
from eagle3.export.output.progress import Progress
from eagle3.export.pipeline import load_speculator, trace
from eagle3.export.report import plan_text
from eagle3.runner.loop.generation import complete
from eagle3.targets.attention import EagerAttention

GOLDEN = TESTS / "golden" / "quantized"
SCATTERED = "gptq/v2_g64_scattered"
CASES = sorted({str(path.parent.relative_to(GOLDEN)) for path in GOLDEN.glob("*/*/config.json")} - {SCATTERED})


def golden(case: str) -> tuple[TorchAOBaseTensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the weight as it is read here, the tool's own dense weight, and the parts that the tool packed."""
    source = open_source(GOLDEN / case)
    ((name, weight),) = source.tensors()
    expected = load_file(GOLDEN / case / "dense.safetensors")
    assert source.headers()[name].shape == weight.shape == expected[name].shape
    parts = load_file(GOLDEN / case / "model.safetensors")
    return weight, expected[name], {key.removeprefix("model.proj."): value for key, value in parts.items()}


@pytest.mark.parametrize("case", CASES)
def test_dequantized_weights_equal_those_of_the_tool_that_packed_them(case):
    weight, expected, _ = golden(case)
    assert torch.equal(dequantize_weight(weight, torch.float32).to(expected.dtype), expected)


def test_columns_with_desc_act_are_sorted_by_groups():
    source = open_source(GOLDEN / SCATTERED)
    (name, order), (_, weight) = source.tensors()
    assert name == "model.proj.input_order" and sorted(order.tolist()) == list(range(256)) != order.tolist()
    expected = load_file(GOLDEN / SCATTERED / "dense.safetensors")["model.proj.weight"]
    found = dequantize_weight(weight, torch.float32)[:, order.argsort()]
    assert torch.equal(found.to(expected.dtype), expected)


def codes_of(weight: TorchAOBaseTensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return unsigned codes [N, K], and scales and zero points [N, groups]."""
    if weight.qdata.dtype == torch.int8:
        return weight.qdata.long() + 128, weight.scale, weight.zero_point.long() + 128
    codes = torch.stack((weight.qdata & 15, weight.qdata >> 4), -1).flatten(1)
    return codes.long(), weight.scale.t(), weight.zero_point.t().long()


SCHEMES = [
    ("compressed-tensors", 4, 64, False),
    ("compressed-tensors", 4, -1, True),
    ("gptq", 4, 128, True),
    ("gptq_v2", 8, 32, False),
    ("awq", 4, 128, False),
    ("gptq desc_act", 4, 128, False),
    ("gptq zero biases", 4, 128, True),
    ("auto-round awq", 4, 128, False),
]


@pytest.mark.first(1)
@pytest.mark.parametrize(("name", "bits", "group", "symmetric"), SCHEMES)
def test_on_the_cpu_packed_checkpoints_give_transformers_tokens(name, bits, group, symmetric, tmp_path):
    model = save_packed(tmp_path / "target", name, bits, group, symmetric, **WIDE)
    plan = planned(tmp_path, model, "xnnpack")
    preflight(plan, Progress())
    assert "dequantized to float32 as they load" in plan_text(plan)
    convert = xnnpack.conversion(plan)
    speculator = eager_speculator(plan, convert)
    expected = model.state_dict()
    for key, value in speculator.target.causal_lm.state_dict().items():
        if "kv_cache" not in key:
            assert torch.equal(value, expected[key]), key
    assert convert.record() == {"dequantized": len(linears(model))}
    session = eager_session(plan, speculator)
    tokens = torch.randint(96, (20,), generator=torch.Generator().manual_seed(3)).tolist()
    result = complete(session, tokens, max_new_tokens=12, stop_ids=[]).token_ids
    with torch.no_grad():
        for _ in range(12):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert result == tokens[20:]


@pytest.mark.parametrize(("kind", "less", "bits"), [("gptq", 0, 4), ("gptq", 1, 8), ("gptq_v2", 1, 4)])
def test_symmetric_gptq_has_the_middle_code_for_zero_whatever_is_stored(kind, less, bits, tmp_path):
    torch.manual_seed(bits)
    codes, scale = torch.randint(1 << bits, (32, 128)), torch.rand(32, 4).half()
    parts = {f"a.{name}": value.contiguous() for name, value in gptq(codes, scale, None, bits, less).items()}
    save_file(parts, tmp_path / "model.safetensors")
    stored = {"quantization_config": gptq_config(bits, 32, True, kind)}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    found = open_source(tmp_path).tensor("a.weight")
    torch.testing.assert_close(
        dequantize_weight(found, torch.float32), dense(codes, scale, None, bits), rtol=2e-3, atol=0
    )


def test_the_old_key_of_compressed_tensors_is_read_as_the_new_one(tmp_path):
    model = save_packed(tmp_path / "target", "compressed-tensors", 4, 32, True, **WIDE)
    expected = planned(tmp_path, model, "xnnpack").target_headers
    file = tmp_path / "target" / "config.json"
    fields = json.loads(file.read_text())
    file.write_text(
        json.dumps(fields | {"compression_config": fields["quantization_config"], "quantization_config": None})
    )
    plan = planned(tmp_path, model, "xnnpack")
    preflight(plan, Progress())
    assert plan.target_headers == expected and len(plan.quantized_headers) == len(linears(model))


def test_codes_by_compressed_tensors_stay_memory_mapped(tmp_path):
    model = save_packed(tmp_path / "target", "compressed-tensors", 4, 128, True, **WIDE)
    plan = planned(tmp_path, model, "cuda")
    target = load_speculator(plan, EagerAttention, cuda.dtype, cuda.conversion(plan)).target
    maps = Path("/proc/self/maps").read_text().splitlines()
    spans = [[int(edge, 16) for edge in line.split()[0].split("-")] for line in maps if str(tmp_path) in line]
    for _, module in linears(target.causal_lm):
        assert any(start <= module.weight.qdata.data_ptr() < end for start, end in spans)


@pytest.mark.first(1)
@pytest.mark.parametrize(("name", "bits", "group", "symmetric"), [SCHEMES[i] for i in (0, 3, 5)])
def test_on_cuda_every_packed_linear_keeps_its_codes_and_verifies_on_the_small_m_path(
    name, bits, group, symmetric, tmp_path
):
    model = save_packed(tmp_path / "target", name, bits, group, symmetric, **WIDE)
    plan = planned(tmp_path, model, "cuda")
    assert plan.qlinear == "checkpoint" and "keep their codes" in plan_text(plan)
    convert = cuda.conversion(plan)
    speculator = load_speculator(plan, cuda.attention, cuda.dtype, convert)
    cuda.prepare(speculator, plan)
    given = {key: value for key, value in plan.target_source.tensors() if isinstance(value, TorchAOBaseTensor)}
    for linear, module in linears(speculator.target.causal_lm):
        before, after = given[f"{linear}.weight"], module.weight
        assert torch.equal(before.qdata, after.qdata)
        if bits == 4:
            (after,), (_, scale, zero) = after.coalesced(), codes_of(before)
            repeats = after.scale.shape[1] // scale.shape[1]
            steps = after.scale_step.float().repeat_interleave(256 // after.block_size[1], 1)
            held, scale = after.scale.float() * steps, scale.float().repeat_interleave(repeats, 1)
            assert ((held - scale).abs() <= convert.rounding[f"{linear}.weight"] * scale * (1 + 1e-6)).all()
            assert torch.equal(after.zero_point.long(), zero.repeat_interleave(repeats, 1))
            assert (after.zero_point_step == 1).all()
    rounded = convert.record()["scales"]
    assert rounded["weights"] == len(given) and rounded["largest_rounding"] <= 2**-8
    for linear, module in linears(speculator.target.causal_lm):
        x = torch.randn(3, module.in_features, dtype=cuda.dtype)
        with cuda.tracing(speculator, plan):
            found, expected = module(x).float(), x.float() @ model.get_parameter(f"{linear}.weight").T
        assert (found - expected).norm() <= 2**-7 * expected.norm(), linear
    with cuda.tracing(speculator, plan):
        program = trace(speculator, plan.method("target_verify"), plan.draft.hidden_size, cuda.dtype)
    assert check_linears("target_verify", program) == {"small_m": len(given), "large_m": 0, "dequantize": 0}
    assert len(given) == 7 * 2
