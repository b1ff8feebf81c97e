"""GGUF files of models with recurrent layers, short convolutions and experts, held against those of llama.cpp's
converter."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.extension.llm.export.gguf import ExportableGGUFTensor
from gguf_files import as_read, blocks_of, qwen35_stored, transformers_gguf, write_gguf
from places import GOLDEN
from random_checkpoints import save_random_draft
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from eagle3.export.checkpoints.gguf_file import GGUFFile
from eagle3.export.checkpoints.gguf_joined import MLP
from eagle3.export.configuration.config import ExportConfig
from eagle3.export.lowering.cuda.weights.quantization import check_quantized_headers
from eagle3.export.lowering.xnnpack.backend import BACKEND as xnnpack
from eagle3.export.pipeline import load_speculator
from eagle3.export.planning.plan import make_plan
from eagle3.export.twin.randomize import randomize
from eagle3.targets.attention import EagerAttention
from eagle3.targets.input_order import INPUT_ORDER
from eagle3.targets.loading import dequantized, is_plain
from eagle3.targets.state_mixers import token_by_token

HYBRIDS = ("qwen35", "lfm2")
CASES = (*HYBRIDS, "lfm2moe", "granitehybrid", "granitehybrid-dense", "nemotron_h", "nemotron_h_moe", "gemma4-moe")
CASES += ("qwen3moe", "qwen35moe", "qwen3next")
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


def rewritten(path: Path, case: str, change=lambda _tensors: None, fields: dict[str, Any] | None = None) -> Path:
    """Write the file of a case once more. ``change`` gets its tensors and their types by name, and changes them;
    ``fields`` replace some of its metadata."""
    file = GGUFFile(GOLDEN / "gguf" / case / "model.gguf")
    tensors = {tensor.name: (file.by_own_name(tensor.name), "F32") for tensor in file._readers[0].tensors}
    change(tensors)
    return write_gguf(path, file.field("general.architecture"), file.own_fields() | (fields or {}), tensors)


@pytest.mark.parametrize("case", CASES)
def test_tensors_of_llama_cpps_converter_become_those_of_the_checkpoint(case):
    """MTP layers are no part of transformers' models. Names of Gemma 4 are ExecuTorch's."""
    file = GGUFFile(GOLDEN / "gguf" / case / "model.gguf")
    found, headers = in_order(dict(file.tensors())), file.headers()
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / "gguf" / case)
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    own = {name: value for name, value in own.items() if name in model.state_dict()}
    if case == "gemma4-moe":
        own = {name.removeprefix("model."): value for name, value in own.items()}
    assert {name for name in found if not name.startswith("mtp.")} == own.keys()
    for name, value in own.items():
        torch.testing.assert_close(found[name], value.detach(), rtol=1e-6, atol=1e-6, msg=name)
        assert headers[name].shape == tuple(value.shape), name


@pytest.mark.first(2)
@pytest.mark.parametrize("case", CASES)
def test_a_target_of_llama_cpps_converter_equals_transformers(case, tmp_path):
    golden = GOLDEN / "gguf" / case
    config = AutoConfig.from_pretrained(golden)
    flags = {"backend": "xnnpack", "max_seq_len": 64, "config_folder": golden}
    draft = save_random_draft(tmp_path / "draft", config, (1, 2, 3), draft_vocab=24)
    plan = make_plan(ExportConfig("auto", None, golden / "model.gguf", draft, **flags))
    assert {header.dtype for name, header in plan.target_headers.items() if "layers.0" in name} <= {"F32", INPUT_ORDER}
    target = load_speculator(plan, EagerAttention, torch.float32, xnnpack.conversion(plan)).target
    model = AutoModelForCausalLM.from_pretrained(golden).eval()
    tokens = torch.randint(0, 48, (1, 40))
    with token_by_token(model):
        expected = model(tokens, use_cache=False).logits
    state, _ = target(tokens, torch.arange(40), (1,))
    torch.testing.assert_close(target.logits(state), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("case", "said", "fields"),
    [
        ("nemotron_h_moe", {}, {"rope.dimension_count": 12, "rope.freq_base": 5e5}),
        ("nemotron_h", {}, {"expert_used_count": 2, "expert_weights_scale": 2.5, "expert_group_count": 1}),
        ("granitehybrid", {"position_embedding_type": None}, {"rope.dimension_count": 4, "rope.freq_base": 5e5}),
        ("granitehybrid-dense", {"num_experts_per_tok": 4}, {"expert_used_count": 2}),
    ],
)
def test_what_the_model_does_not_use_is_not_compared(case, said, fields, tmp_path):
    golden = GOLDEN / "gguf" / case
    config = json.loads((golden / "config.json").read_text()) | said
    (tmp_path / "config.json").write_text(json.dumps(config))
    draft = save_random_draft(tmp_path / "draft", AutoConfig.from_pretrained(golden), (1, 2, 3), draft_vocab=24)
    flags = {"backend": "xnnpack", "max_seq_len": 64, "config_folder": tmp_path}
    file = rewritten(tmp_path / "model.gguf", case, fields=fields)
    assert make_plan(ExportConfig("auto", None, file, draft, **flags)).target_headers


def test_a_hybrid_that_rotates_is_held_to_its_rope(tmp_path):
    golden = GOLDEN / "gguf" / "granitehybrid"
    config = json.loads((golden / "config.json").read_text()) | {"position_embedding_type": "rope"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = rewritten(tmp_path / "model.gguf", "granitehybrid", fields={"rope.dimension_count": 4})
    flags = {"backend": "xnnpack", "max_seq_len": 64, "config_folder": tmp_path}
    with pytest.raises(ValueError, match=r"(context_length|rope.dimension_count) is"):
        make_plan(ExportConfig("auto", None, file, Path("none"), **flags))


@pytest.mark.parametrize(
    ("case", "key", "value"),
    [
        ("qwen35", "ssm.group_count", 3),
        ("qwen35", "attention.recurrent_layers", [True, True, True, False, False]),
        ("qwen35", "nextn_predict_layers", 0),
        ("qwen35", "rope.dimension_sections", [8, 8, 0, 0]),
        ("qwen35moe", "expert_shared_feed_forward_length", 24),
        ("qwen3moe", "expert_count", 8),
        ("granitehybrid", "ssm.time_step_rank", 8),
        ("granitehybrid", "attention.head_count_kv", [2, 2, 0, 0]),
        ("nemotron_h", "feed_forward_length", [0, 48, 48, 0]),
        ("nemotron_h", "attention.layer_norm_epsilon", 1e-6),
        ("nemotron_h_moe", "expert_weights_scale", 1.0),
        ("nemotron_h_moe", "attention.head_count_kv", [0, 2, 2, 0]),
        ("lfm2moe", "leading_dense_block_count", 2),
        ("lfm2moe", "expert_gating_func", 1),
        ("lfm2", "shortconv.l_cache", 4),
    ],
)
def test_metadata_of_another_model_is_refused(case, key, value, tmp_path):
    golden = GOLDEN / "gguf" / case
    changed = rewritten(tmp_path / "other.gguf", case, fields={key: value})
    draft = save_random_draft(tmp_path / "draft", AutoConfig.from_pretrained(golden), (1, 2, 3), draft_vocab=24)
    flags = {"backend": "xnnpack", "max_seq_len": 64, "config_folder": golden}
    with pytest.raises(ValueError, match=key):
        make_plan(ExportConfig("auto", None, changed, draft, **flags))


def test_experts_that_the_converter_fused_are_the_same(tmp_path):
    def fuse(tensors):
        for name in [name for name in tensors if name.endswith("ffn_gate_exps.weight")]:
            parts = [tensors.pop(name.replace("gate", part))[0] for part in ("gate", "up")]
            tensors[name.replace("gate", "gate_up")] = torch.cat(parts, 1), "F32"

    fused = GGUFFile(rewritten(tmp_path / "model.gguf", "qwen35moe", fuse))
    found, own = dict(fused.tensors()), dict(GGUFFile(GOLDEN / "gguf" / "qwen35moe" / "model.gguf").tensors())
    assert found.keys() == own.keys()
    assert all(torch.equal(found[name], value) for name, value in own.items())


def quantized_experts(tensors):
    for end, kind in (("ffn_gate_exps.weight", "Q8_0"), ("ffn_up_exps.weight", "Q5_0")):
        tensors |= {name: (value, kind) for name, (value, _) in tensors.items() if name.endswith(end)}


def plan_of(file: Path, case: str, backend: str):
    flags = {"backend": backend, "max_seq_len": 64, "config_folder": GOLDEN / "gguf" / case}
    return make_plan(ExportConfig("auto", None, file, Path("none"), **flags))


def test_quantized_experts_are_dequantized_on_the_cpu(tmp_path):
    file = rewritten(tmp_path / "model.gguf", "qwen3moe", quantized_experts)
    plan = plan_of(file, "qwen3moe", "xnnpack")
    header = plan.target_headers["model.layers.0.mlp.experts.gate_up_proj"]
    assert header.quantized and header.shape == (4, 24, 32)
    found = dict(GGUFFile(file).tensors())["model.layers.0.mlp.experts.gate_up_proj"]
    own = dict(GGUFFile(GOLDEN / "gguf" / "qwen3moe" / "model.gguf").tensors())
    gate, up = own["model.layers.0.mlp.experts.gate_up_proj"].chunk(2, 1)
    for got, dense, kind in ((found[:, :12], gate, "Q8_0"), (found[:, 12:], up, "Q5_0")):
        assert torch.equal(got.flatten(0, 1), as_read(dense.flatten(0, 1), kind))


def test_quantized_experts_are_refused_on_cuda(tmp_path):
    file = rewritten(tmp_path / "model.gguf", "qwen3moe", quantized_experts)
    plan = plan_of(file, "qwen3moe", "cuda")
    with pytest.raises(ValueError, match=r"gate_up_proj is Q5_0, but CUDA has no kernel for experts in GGUF's blocks"):
        check_quantized_headers(plan.target_headers, plan.skeleton)


@pytest.mark.parametrize("kinds", [("Q4_K", "Q4_K"), ("Q4_K", "Q6_K")])
def test_parts_of_one_quantized_type_stay_quantized(kinds):
    parts = [torch.randn(6, 256), torch.randn(4, 256)]
    values = [
        ExportableGGUFTensor(torch.from_numpy(blocks_of(part, kind)), kind.lower(), torch.float32)
        for part, kind in zip(parts, kinds, strict=True)
    ]
    joined = MLP(values, lambda key: 0)
    assert is_plain(joined) == (kinds[0] != kinds[1])
    dense = joined if is_plain(joined) else joined.dequantize(torch.float32)
    assert torch.equal(dense, torch.cat([as_read(part, kind) for part, kind in zip(parts, kinds, strict=True)]))


def test_a_file_with_two_tensors_of_one_name_is_refused(tmp_path):
    def repeat(tensors):
        tensors["blk.0.ffn_down.weight"] = tensors["blk.0.ffn_down_shexp.weight"]

    twice = rewritten(tmp_path / "model.gguf", "granitehybrid", repeat)
    with pytest.raises(ValueError, match=r"output_linear.weight is blk.0.ffn_down_shexp.weight and blk.0.ffn_down"):
        GGUFFile(twice).headers()


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
    dense = in_order({name: dequantized(name, value) for name, value in read.items()})
    assert not any(torch.equal(dense[name], value) for name, value in model.state_dict().items() if "out_proj" in name)
    model.load_state_dict(dense, strict=False)
    tokens = torch.randint(0, SIZE["vocab_size"], (1, 40))
    with token_by_token(model):
        expected = model(tokens, use_cache=False).logits
    state, _ = target(tokens, torch.arange(40), (1,))
    torch.testing.assert_close(target.logits(state), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["qwen35moe", "qwen3next"])
def test_an_mtp_layer_in_the_file_is_the_checkpoints(case, tmp_path):
    golden = GOLDEN / "gguf" / case
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


def test_merged_experts_of_another_shape_in_an_mtp_layer_are_refused(tmp_path):
    golden = GOLDEN / "gguf" / "qwen35moe"

    def cut(tensors):
        for name in ("blk.4.ffn_gate_exps.weight", "blk.4.ffn_up_exps.weight"):
            tensors[name] = tensors[name][0][:3].contiguous(), "F32"

    changed = rewritten(tmp_path / "model.gguf", "qwen35moe", cut)
    flags = {"backend": "xnnpack", "max_seq_len": 64, "config_folder": golden}
    with pytest.raises(ValueError, match=r"layers.0.mlp.experts.gate_up_proj of its MTP layer is \[3, 24, 32\]"):
        make_plan(ExportConfig("auto", None, changed, Path("mtp"), **flags))
