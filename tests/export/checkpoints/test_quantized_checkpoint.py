"""A checkpoint written by ExecuTorch's ``quantize_and_save`` is not quantized again."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import fail_command
from executorch.examples.models.gemma4_31b.model import _hf_to_model_key
from executorch.extension.llm.export.load import iter_checkpoint
from executorch.extension.llm.export.quant import dequantize_weight, identity, quantize_stream
from safetensors.torch import save_file
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.utils import TorchAOBaseTensor
from transformers import AutoConfig

from eagle3.export.cli import main as export_main
from eagle3.export.configuration.config import ExportConfig
from eagle3.export.lowering.cuda.backend import BACKEND as cuda
from eagle3.export.lowering.cuda.weights.quantization import fitted_recipe
from eagle3.export.lowering.xnnpack.backend import BACKEND as xnnpack
from eagle3.export.pipeline import load_speculator
from eagle3.export.planning.plan import make_plan
from eagle3.export.report import plan_text
from eagle3.targets import TARGETS
from eagle3.targets.attention import EagerAttention

TINY = TARGETS["gemma4-tiny"]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory) -> Path:
    """The folder of gemma4-tiny's target, quantized and saved as ExecuTorch's script does it."""
    folder = tmp_path_factory.mktemp("quantized")
    tied = {"embed_tokens.weight": ("lm_head.weight", True)}
    pairs = iter_checkpoint(str(TINY.checkpoint), key_map=_hf_to_model_key, convert=identity, tie_map=tied)
    recipe = fitted_recipe("default", AutoConfig.from_pretrained(TINY.checkpoint))
    tensors, metadata = flatten_tensor_state_dict(dict(quantize_stream(pairs, recipe, dtype=torch.bfloat16)))
    save_file(tensors, folder / "model.safetensors", metadata=metadata)
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        if (TINY.checkpoint / name).is_file():
            shutil.copy(TINY.checkpoint / name, folder)
    return folder


def prepared(checkpoint: Path | None):
    arch = None if torch.cuda.is_available() else "sm_90"
    plan = make_plan(ExportConfig("gemma4-tiny", output_dir=None, checkpoint=checkpoint, cuda_arch=arch))
    speculator = load_speculator(plan, EagerAttention, cuda.dtype, cuda.conversion(plan))
    cuda.prepare(speculator, plan)
    return plan, speculator


def test_a_quantized_checkpoint_has_the_weights_of_quantizing_at_export(quantized):
    plan, loaded = prepared(quantized)
    here, made = prepared(None)
    assert (plan.qlinear, here.qlinear) == ("checkpoint", "default")
    expected = made.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, value in loaded.state_dict().items():
        assert type(value) is type(expected[name]), name
        parts = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else []
        for a, b in [(getattr(value, p), getattr(expected[name], p)) for p in parts] or [(value, expected[name])]:
            assert torch.equal(a, b), name


def test_the_weights_of_a_quantized_checkpoint_stay_memory_mapped(quantized):
    _, speculator = prepared(quantized)
    codes = speculator.target.model.layers[0].mlp.up_proj.weight.qdata
    maps = Path("/proc/self/maps").read_text().splitlines()
    spans = [[int(edge, 16) for edge in line.split()[0].split("-")] for line in maps if str(quantized) in line]
    assert any(start <= codes.data_ptr() < end for start, end in spans)


def fails(tmp_path, *args) -> str:
    output = ("--target-model", "gemma4-tiny", "--output-dir", tmp_path / "out")
    code, line = fail_command(export_main, *output, *args)
    assert code == 1 and not (tmp_path / "out").exists()
    return line


CUDA = () if torch.cuda.is_available() else ("--cuda-arch", "sm_90")


def test_a_quantized_checkpoint_is_not_quantized_twice(quantized, tmp_path):
    line = fails(tmp_path, "--checkpoint", quantized, "--qlinear", "default", *CUDA)
    assert "quantized already: leave --qlinear default out" in line


def test_the_cpu_dequantizes_a_quantized_checkpoint_exactly(quantized):
    plan = make_plan(ExportConfig("gemma4-tiny", output_dir=None, checkpoint=quantized, backend="xnnpack"))
    assert "dequantized to float32 as they load" in plan_text(plan)
    assert "then the embedding is quantized" not in plan_text(plan)
    in_8_bits = replace(plan, config=replace(plan.config, qembedding="8w"))
    assert "then the embedding is quantized to 8 bits" in plan_text(in_8_bits)
    convert = xnnpack.conversion(plan)
    found = load_speculator(plan, EagerAttention, xnnpack.dtype, convert).target.model.state_dict()
    dense = {name: value for name, value in plan.target_source.tensors() if isinstance(value, TorchAOBaseTensor)}
    assert convert.record() == {"dequantized": len(dense)}
    for name, value in dense.items():
        assert torch.equal(found[name], dequantize_weight(value, torch.float32)), name


def test_a_width_without_a_layout_is_refused_before_weights_load(quantized, tmp_path):
    narrow = Path(shutil.copytree(TINY.checkpoint, tmp_path / "narrow"))
    config = json.loads((narrow / "config.json").read_text())
    (narrow / "config.json").write_text(json.dumps(config | {"intermediate_size": 720}))
    from safetensors.torch import load_file

    tensors = load_file(narrow / "model.safetensors")
    for name, value in tensors.items():
        if "gate_proj" in name or "up_proj" in name:
            tensors[name] = value[:720].contiguous()
        elif "down_proj" in name:
            tensors[name] = value[:, :720].contiguous()
    save_file(tensors, narrow / "model.safetensors")
    line = fails(tmp_path, "--checkpoint", narrow, *CUDA)
    assert "down_proj takes 720 inputs" in line and "type --qlinear none" in line
