"""GGUF files of models with recurrent layers and short convolutions, held against those of llama.cpp's converter."""

import shutil
from pathlib import Path

import pytest
import torch
from gguf_files import as_read, qwen35_stored, transformers_gguf, write_gguf
from places import GOLDEN
from random_checkpoints import save_random_draft
from safetensors.torch import load_file
from transformers import AutoConfig, Lfm2ForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from eagle3.export.checkpoints.gguf_file import GGUFFile
from eagle3.export.configuration.config import ExportConfig
from eagle3.export.lowering.xnnpack.backend import BACKEND as xnnpack
from eagle3.export.pipeline import load_speculator
from eagle3.export.planning.plan import make_plan
from eagle3.export.twin.randomize import randomize
from eagle3.targets.attention import EagerAttention
from eagle3.targets.input_order import INPUT_ORDER
from eagle3.targets.loading import is_plain
from eagle3.targets.state_mixers import token_by_token

CASES = {"qwen35": Qwen3_5ForCausalLM, "lfm2": Lfm2ForCausalLM}
SIZE = {"vocab_size": 96, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "head_dim": 64}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 128,
}
KINDS = {"ssm_out.weight": "Q4_K", "attn_qkv.weight": "Q6_K", "attn_gate.weight": "Q5_K"}
KINDS |= {"ssm_alpha.weight": "Q8_0", "ffn_down.weight": "Q4_K"}


def in_order(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights with the columns of those that have an input order back in the input's order."""
    weights = {}
    for name, value in tensors.items():
        order = tensors.get(name.removesuffix("weight") + INPUT_ORDER)
        weights[name] = value if order is None else value[:, order.argsort()]
    return {name: value for name, value in weights.items() if not name.endswith(INPUT_ORDER)}


@pytest.mark.parametrize("case", CASES)
def test_tensors_of_llama_cpps_converter_become_those_of_the_checkpoint(case):
    file = GGUFFile(GOLDEN / "gguf" / case / "model.gguf")
    found, own = in_order(dict(file.tensors())), load_file(GOLDEN / "gguf" / case / "model.safetensors")
    assert found.keys() == own.keys()
    for name, value in own.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6, msg=name)
        assert file.headers()[name].shape == tuple(value.shape), name


@pytest.mark.parametrize("case", CASES)
def test_the_helper_of_these_tests_stores_tensors_as_llama_cpps_converter(case, tmp_path):
    golden = GOLDEN / "gguf" / case
    model = CASES[case].from_pretrained(golden)
    file = GGUFFile(golden / "model.gguf")
    ours = GGUFFile(transformers_gguf(tmp_path / "ours.gguf", model, case, {}))
    for name in (tensor.name for tensor in ours._readers[0].tensors):
        assert torch.equal(ours.by_own_name(name), file.by_own_name(name)), name


@pytest.mark.parametrize("case", CASES)
def test_metadata_of_llama_cpps_converter_agrees_with_the_configuration(case, tmp_path):
    golden = GOLDEN / "gguf" / case
    config = AutoConfig.from_pretrained(golden)
    flags = {"backend": "xnnpack", "max_seq_len": 64, "config_folder": golden}
    draft = save_random_draft(tmp_path / "draft", config, (1, 2, 3), draft_vocab=24)
    plan = make_plan(ExportConfig("auto", None, golden / "model.gguf", draft, **flags))
    assert {header.dtype for name, header in plan.target_headers.items() if "layers.0" in name} <= {"F32", INPUT_ORDER}


@pytest.mark.parametrize(
    ("case", "key", "value"),
    [
        ("qwen35", "ssm.group_count", 3),
        ("qwen35", "ssm.state_size", 16),
        ("qwen35", "ssm.inner_size", 96),
        ("qwen35", "ssm.conv_kernel", 3),
        ("qwen35", "attention.recurrent_layers", [True, True, True, False, False]),
        ("qwen35", "nextn_predict_layers", 0),
        ("qwen35", "rope.dimension_sections", [8, 8, 0, 0]),
        ("lfm2", "shortconv.l_cache", 4),
        ("lfm2", "attention.head_count_kv", [2, 2, 0, 2]),
        ("lfm2", "feed_forward_length", 48),
    ],
)
def test_metadata_of_another_model_is_refused(case, key, value, tmp_path):
    golden = GOLDEN / "gguf" / case
    file = GGUFFile(golden / "model.gguf")
    tensors = {tensor.name: (file.by_own_name(tensor.name), "F32") for tensor in file._readers[0].tensors}
    changed = write_gguf(tmp_path / "other.gguf", case, file.own_fields() | {key: value}, tensors)
    draft = save_random_draft(tmp_path / "draft", AutoConfig.from_pretrained(golden), (1, 2, 3), draft_vocab=24)
    flags = {"backend": "xnnpack", "max_seq_len": 64, "config_folder": golden}
    with pytest.raises(ValueError, match=key):
        make_plan(ExportConfig("auto", None, changed, draft, **flags))


def made(folder: Path):
    """Return a random Qwen3.5 and its GGUF file of quantized blocks."""
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZE | DELTA, num_attention_heads=4, layer_types=kinds)).eval()
    randomize(model, 0)
    model.config.save_pretrained(folder)
    return model.requires_grad_(False), transformers_gguf(folder / "model.gguf", model, "qwen35", KINDS)


def test_blocks_stay_whole_where_value_heads_are_reordered(tmp_path):
    model, file = made(tmp_path)
    tensors = {name: value for name, value in GGUFFile(file).tensors() if "layers.0.linear_attn" in name}
    own = model.model.layers[0].linear_attn
    for part, kind in (("in_proj_qkv", "Q6_K"), ("in_proj_z", "Q5_K"), ("out_proj", "Q4_K")):
        name = f"model.layers.0.linear_attn.{part}.weight"
        assert tensors[name].ggml_type == kind.lower()
        weight = own.get_submodule(part).weight
        if part == "out_proj":  # whose columns stay in the file's order
            weight = qwen35_stored(name, weight, model.config)[1]
        assert torch.equal(tensors[name].dequantize(torch.float32), as_read(weight.contiguous(), kind)), part


def test_a_target_of_quantized_blocks_equals_transformers_with_the_same_weights(tmp_path):
    model, file = made(tmp_path)
    draft = save_random_draft(tmp_path / "draft", model.config, (1, 2, 3))
    flags = {"backend": "xnnpack", "max_seq_len": 64, "config_folder": tmp_path}
    plan = make_plan(ExportConfig("auto", None, file, draft, **flags))
    target = load_speculator(plan, EagerAttention, torch.float32, xnnpack.conversion(plan)).target
    read = dict(GGUFFile(file).tensors())
    dense = in_order({name: v if is_plain(v) else v.dequantize(torch.float32) for name, v in read.items()})
    assert not any(torch.equal(dense[name], value) for name, value in model.state_dict().items() if "out_proj" in name)
    model.load_state_dict(dense, strict=False)
    tokens = torch.randint(0, SIZE["vocab_size"], (1, 40))
    with token_by_token(model):
        expected = model(tokens, use_cache=False).logits
    state, _ = target(tokens, torch.arange(40), (1,))
    torch.testing.assert_close(target.logits(state), expected, rtol=1e-4, atol=1e-4)


def test_an_mtp_layer_in_the_file_is_the_checkpoints(tmp_path):
    golden = GOLDEN / "gguf" / "qwen35"
    for file in ("model.safetensors", "config.json"):
        shutil.copy(golden / file, tmp_path / file)
    heads = []
    for checkpoint, config in ((tmp_path, None), (golden / "model.gguf", golden)):
        flags = {"backend": "xnnpack", "max_seq_len": 64, "config_folder": config}
        plan = make_plan(ExportConfig("auto", None, checkpoint, Path("mtp"), **flags))
        heads.append(load_speculator(plan, EagerAttention, torch.float32, xnnpack.conversion(plan)).draft.state_dict())
    assert heads[0].keys() == heads[1].keys()
    for name, value in heads[0].items():
        torch.testing.assert_close(heads[1][name], value, rtol=1e-6, atol=1e-6)
