"""Gemma 4 E2B, E4B and 26B-A4B equal transformers, with shared keys, per-layer inputs and experts, in published and in
small shapes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gemma4_sizes import config_of
from gguf_files import gemma4_gguf
from random_checkpoints import random_model, save_random_draft
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Gemma4Config, Gemma4ForCausalLM, Gemma4TextConfig

from eagle3.export import ExportConfig, prepare
from eagle3.export.checkpoints.target_config import read_target_config
from eagle3.export.lowering.cuda.gpu_memory import gpu_memory, module_bytes
from eagle3.export.lowering.cuda.weights.quantization import fitted_recipe
from eagle3.export.lowering.xnnpack.forms import ProductRMSNorm, use_product_norms
from eagle3.export.lowering.xnnpack.recipe import recipes
from eagle3.export.pipeline import load_speculator
from eagle3.export.planning.memory import cache_bytes, target_caches
from eagle3.export.planning.plan import make_plan
from eagle3.export.random_weights import random_weights
from eagle3.export.twin.comparison import TOLERANCE
from eagle3.export.twin.randomize import randomize
from eagle3.export.twin.target import check_target
from eagle3.targets import TARGETS, gemma4, spec_for
from eagle3.targets.attention import EagerAttention
from eagle3.targets.experts import Router

SMALL = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "global_head_dim": 32, "sliding_window": 16}
SMALL |= {"vocab_size": 96, "vocab_size_per_layer_input": 96, "max_position_embeddings": 256}
STORED = {"gemma4-E2B": (13, 14), "gemma4-E4B": (22, 23)}  # the last sliding and the last full layer with keys


def small_config(name: str) -> Gemma4TextConfig:
    """Return a configuration with all layers of the published one, each of them small."""
    return config_of(name, **SMALL, **({} if "26B" in name else {"hidden_size_per_layer_input": 8}))


def loaded(model, folder: Path):
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors").items()
    return gemma4.load(weights, model.config, 128, torch.float32, EagerAttention)


def test_all_gemma4_layers_equal_transformers_in_chunks_windows_steps_and_rollbacks(tmp_path):
    config = small_config("gemma4-E2B")
    model = Gemma4ForCausalLM(config).eval().requires_grad_(False)
    randomize(model, seed=3)
    target = loaded(model, tmp_path)
    tokens, wrong = torch.randint(0, 96, (2, 1, 64), generator=torch.Generator().manual_seed(1))
    expected = model(tokens, use_cache=False).logits
    walk = [
        (0, 16),
        (16, 32),
        (32, 41),
        *((at, at + 4) for at in range(41, 57, 4)),
        *((at, at + 1) for at in range(57, 64)),
    ]
    for start, end in walk:
        rejected = torch.arange(start, min(start + 4, 64))
        target(wrong[:, rejected], rejected, ())
        rows = torch.arange(start, end)
        found = target.logits(target(tokens[:, rows], rows, ())[0])
        assert (found - expected[:, start:end]).abs().max() < 1e-4 * expected.std(), (start, end)


@pytest.mark.parametrize("name", STORED)
def test_layers_that_share_keys_have_no_cache(name, tmp_path):
    config, shapes = small_config(name), []
    own = config.num_hidden_layers - config.num_kv_shared_layers

    def note(shape):
        shapes.append(shape)
        return EagerAttention(shape)

    target = gemma4.Target(gemma4.skeleton(config, 128).model, 128, note, torch.float32)
    assert [shape.window for shape in shapes] == [16 if "sliding" in kind else 0 for kind in config.layer_types[:own]]
    assert sum(shape.bytes for shape in shapes) == cache_bytes(target_caches(TARGETS[name], config, 128, torch.float32))
    for kind, index in zip(("sliding_attention", "full_attention"), STORED[name], strict=True):
        assert target.kept(kind) is target.layers[index].self_attn.kv_attention
        sharing = [at for at in range(own, config.num_hidden_layers) if config.layer_types[at] == kind]
        assert all(target.layers[at].self_attn.kept == [target.kept(kind)] for at in sharing) and sharing
    assert len([name for name, _ in target.named_modules() if name.endswith("kv_attention")]) == own


def test_full_layers_of_gemma4_with_experts_have_their_own_number_of_kv_heads():
    shapes = []
    family = TARGETS["gemma4-26B-A4B"].module()
    model = family.skeleton(config_of("gemma4-26B-A4B"), 4096).model
    family.Target(model, 4096, lambda shape: shapes.append(shape) or nn.Module(), torch.bfloat16)
    assert {(shape.kv_heads, shape.head_dim, shape.window) for shape in shapes} == {(8, 256, 1024), (2, 512, 0)}


# --- checkpoints


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("name", "kind"),
    [("gemma4-E2B", "Gemma4ForConditionalGeneration"), ("gemma4-26B-A4B", "Gemma4ForCausalLM")],
)
def test_a_gemma4_checkpoint_is_read_as_the_class_that_its_file_names(name, kind, tmp_path):
    config = Gemma4Config(text_config=random_model(name).config.to_dict())
    config.architectures = [kind]
    config.save_pretrained(tmp_path)
    text = read_target_config(tmp_path, "auto")
    spec = spec_for("auto", text.model_type)
    assert check_target(spec, "auto", tmp_path, text)["logits"] <= TOLERANCE


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory):
    """A checkpoint of E2B's text part under the names of ``Gemma4ForConditionalGeneration``, and a head. Like published
    files, it also has key and value weights of the layers that share keys, which transformers ignores."""
    folder = tmp_path_factory.mktemp("multimodal")
    model = random_model("gemma4-E2B")
    config = Gemma4Config(text_config=model.config.to_dict(), architectures=["Gemma4ForConditionalGeneration"])
    config.save_pretrained(folder / "target")
    tensors = {f"model.language_model.{name}": value for name, value in model.model.state_dict().items()}
    layer = "model.language_model.layers.5.self_attn"
    tensors |= {f"{layer}.{name}.weight": torch.ones(64, 64) for name in ("k_proj", "v_proj", "k_norm")}
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "target" / "model.safetensors")
    save_random_draft(folder / "draft", model.config, aux_layers=(0, 3, 6))
    return model, folder


def flags(folder: Path, **others) -> ExportConfig:
    given = {"checkpoint": folder / "target", "draft": folder / "draft", "max_seq_len": 128, "output_dir": None}
    return ExportConfig("gemma4-E2B", **given | {"backend": "xnnpack"} | others)


def test_a_multimodal_file_is_read_without_unused_key_weights(multimodal, tmp_path):
    model, folder = multimodal
    plan = prepare(flags(folder, output_dir=tmp_path / "out", dry_run=True)).plan
    assert not [name for name in plan.target_headers if "layers.5.self_attn.k_" in name]
    target = plan.spec.module().load(
        plan.target_source.tensors(), plan.target_config, 128, torch.float32, EagerAttention
    )
    tokens = torch.randint(0, 96, (1, 16), generator=torch.Generator().manual_seed(2))
    found = target.logits(target(tokens, torch.arange(16), ())[0])
    torch.testing.assert_close(found, model(tokens).logits, atol=1e-4, rtol=1e-4)


def test_key_weights_of_a_layer_with_its_own_cache_are_not_left_out(multimodal, tmp_path):
    _, folder = multimodal
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text((folder / "target" / "config.json").read_text())
    tensors = load_file(folder / "target" / "model.safetensors")
    tensors["model.language_model.layers.3.self_attn.k_proj.bias"] = torch.ones(64)
    save_file(tensors, tmp_path / "target" / "model.safetensors")
    with pytest.raises(ValueError, match="layers.3.self_attn.k_proj.bias"):
        make_plan(replace(flags(folder), checkpoint=tmp_path / "target"))


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "kinds", [{}, {"per_layer_token_embd.weight": "Q8_0", "_proj.weight": "Q8_0"}], ids=["F32", "Q8_0"]
)
def test_a_gguf_file_of_gemma4_gives_the_same_model(kinds, multimodal, tmp_path):
    """The file is as llama.cpp's converter writes it (``Gemma4Model`` there), with key weights of the layers that share
    keys."""
    model, folder = multimodal
    fields = {"feed_forward_length": [128] * 4 + [256] * 2, "attention.shared_kv_layers": 2}
    fields |= {"embedding_length_per_layer_input": 32}
    unused = {"blk.5.attn_k.weight": (torch.ones(64, 64), "F32"), "blk.5.attn_k_norm.weight": (torch.ones(32), "F32")}
    file = gemma4_gguf(tmp_path / "e2b.gguf", model, kinds, fields, unused)
    plan = prepare(flags(folder, checkpoint=file, config_folder=folder / "target", output_dir=tmp_path / "out")).plan
    target = load_speculator(plan, EagerAttention, torch.float32).target
    tokens = torch.randint(0, 96, (1, 16), generator=torch.Generator().manual_seed(2))
    found, expected = target.logits(target(tokens, torch.arange(16), ())[0]), model(tokens).logits
    assert (found - expected).abs().max() < (0.1 if kinds else 1e-4) * expected.std()
    file = gemma4_gguf(tmp_path / "other.gguf", model, kinds, fields | {"feed_forward_length": 128})
    with pytest.raises(ValueError, match="feed_forward_length"):
        make_plan(flags(folder, checkpoint=file, config_folder=folder / "target"))


def test_a_gguf_file_of_gemma4_without_the_experts_of_its_configuration_is_refused(tmp_path):
    model = random_model("gemma4-26B-A4B")
    model.save_pretrained(tmp_path / "target")
    save_random_draft(tmp_path / "draft", model.config)
    experts = {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 64}
    file = gemma4_gguf(tmp_path / "moe.gguf", random_model("gemma4-31B"), {}, experts)
    with pytest.raises(ValueError, match=r"moe.gguf lacks model.layers.0.*, which its config.json implies"):
        make_plan(flags(tmp_path, checkpoint=file, config_folder=tmp_path / "target"))


@pytest.mark.parametrize(("layers", "sharing"), [(8, 2)])
def test_with_random_weights_the_per_layer_table_has_a_part_for_each_layer(layers, sharing, tmp_path):
    random_model("gemma4-E2B", num_hidden_layers=10).save_pretrained(tmp_path / "target")
    with random_weights(flags(tmp_path, draft=Path("none"), layers=layers)) as config:
        plan = make_plan(config)
        target = load_speculator(plan, EagerAttention, torch.float32).target
    assert target.causal_lm.model.embed_tokens_per_layer.weight.shape == (96, 32 * (layers or 10))
    assert plan.target_config.num_kv_shared_layers == sharing


# --- quantization and memory


def test_the_table_of_per_layer_inputs_is_quantized_and_counted(multimodal):
    """On the CPU --qembedding decides; on CUDA, whose embeddings are never INT4, it is INT8 with a scale for each
    layer's part."""
    _, folder = multimodal
    plan = make_plan(flags(folder, qlinear="8da8w"))
    model = plan.skeleton.model
    table = model.model.embed_tokens_per_layer
    assert table.weight.numel() == 96 * 6 * 32
    assert recipes(plan)[0].covers(table) and not recipes(make_plan(flags(folder)))[0].covers(table)
    recipe = fitted_recipe("default", plan.target_config, model)
    rule = recipe.get_config("model.embed_tokens_per_layer.weight")
    assert (rule.bits, rule.group_size) == (8, 32)
    whole = gpu_memory(make_plan(flags(folder, backend="cuda", cuda_arch="sm_90"))).target
    del model.model.embed_tokens_per_layer
    assert whole - module_bytes(model, recipe) == table.weight.numel() * (1 + 3 / 32)  # a bfloat16 scale, a zero point


def test_gemma4_routers_are_not_quantized(tmp_path):
    config = random_model("gemma4-26B-A4B").config
    model = gemma4.skeleton(config, 128).model
    routers = [path for path, module in model.named_modules() if isinstance(module, Router)]
    assert len(routers) == 6
    for name in ("default", "sensitive"):
        recipe = fitted_recipe(name, config, model)
        assert not any(recipe.get_config(f"{path}.weight") for path in routers)
    random_model("gemma4-26B-A4B").save_pretrained(tmp_path / "target")
    draft = save_random_draft(tmp_path / "draft", config)
    plan = make_plan(replace(flags(tmp_path, qlinear="8da8w"), target_model="gemma4-26B-A4B", draft=draft))
    assert not any(recipes(plan)[0].covers(model.get_submodule(path)) for path in routers)


@pytest.mark.parametrize("name", ["gemma4-E2B", "gemma4-26B-A4B"])
def test_on_the_cpu_every_gemma4_norm_is_lowered_as_a_product(name):
    """This includes norms without a weight, of values and in routers, since a mean would end XNNPACK's delegate."""
    model = random_model(name)
    tokens = torch.randint(0, 96, (1, 12), generator=torch.Generator().manual_seed(3))
    expected = model(tokens, use_cache=False).logits
    norms = sum("RMSNorm" in type(module).__name__ for module in model.modules())
    use_product_norms(model)
    assert sum(isinstance(module, ProductRMSNorm) for module in model.modules()) == norms
    torch.testing.assert_close(model(tokens, use_cache=False).logits, expected, atol=1e-5, rtol=1e-4)
