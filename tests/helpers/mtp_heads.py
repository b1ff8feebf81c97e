"""MTP heads for tests: golden heads, and random targets whose own MTP layer has its published names."""

import json
import re
import shutil
from pathlib import Path

import torch
from family_configs import FAMILIES, SIZE
from places import TESTS
from safetensors.torch import load_file, save_file
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import MtpModel

from eagle3.export.configuration.config import ExportConfig
from eagle3.export.planning.plan import make_plan
from eagle3.export.twin.randomize import randomize

GOLDEN = TESTS / "golden" / "mtp"
CASES = sorted(path.name for path in GOLDEN.iterdir())
RECURRENT = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
EXPERTS_OF_QWEN = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
EXPERTS = {"moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
OWN = {
    "deepseek_v3": FAMILIES["deepseek_v3"],
    "glm4_moe": EXPERTS | {"use_qk_norm": True, "attention_bias": True},
    "glm4_moe_lite": {key: value for key, value in FAMILIES["deepseek_v3"].items() if key != "first_k_dense_replace"},
    "qwen3": {},
    "qwen3_5_text": RECURRENT,
    "qwen3_5_moe_text": RECURRENT | EXPERTS_OF_QWEN,
    "qwen3_next": RECURRENT | EXPERTS_OF_QWEN,
}
"""Targets with an MTP layer of their own: with latent attention and groups of experts, with partial rotary and experts,
with latent attention and a list of which layers have experts, dense; recurrent layers, dense and with experts. The last
four are named as Qwen3-Next's is."""
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
ON_THE_CPU = {"backend": "xnnpack", "cuda_arch": None, "max_prefill": None}
"""Flags for targets with recurrent layers."""
MTP_KEYS = {"num_mtp_layers": 1, "mtp_layer_types": ["full_attention"], "mtp_mlp_layer_types": ["sparse"]}
"""The keys by which transformers makes such a layer, of which Qwen3's and GLM-4.7-Flash's configurations have none."""


def own_config(model_type: str, **changes):
    return AutoConfig.for_model(model_type, **SIZE | OWN[model_type] | {"num_hidden_layers": 3} | changes)


def own_model(model_type: str, **changes):
    """Return a random target of transformers without its MTP layer. Each call returns the same weights."""
    torch.manual_seed(7)
    target = AutoModelForCausalLM.from_config(own_config(model_type, **changes)).eval().requires_grad_(False)
    randomize(target, seed=3)
    return target


def save_target(folder: Path, model_type: str, **changes) -> Path:
    """Save a random target of transformers together with a random MTP layer of its own."""
    target = own_model(model_type, **changes)
    target.save_pretrained(folder)
    head, layers = transformers_head(target), target.config.num_hidden_layers
    generator = torch.Generator().manual_seed(5)
    for name, value in head.layers[0].state_dict().items():
        noise = torch.randn(value.shape, generator=generator)
        value.copy_(noise / value.shape[-1] ** 0.5 if value.ndim > 1 else 0.3 * noise + name.endswith("norm.weight"))
    block = {f"model.layers.0.{name}": value for name, value in head.layers[0].mtp_block.state_dict().items()}
    saved = {
        name.removeprefix("model.layers.0."): value for name, value in revert_weight_conversion(target, block).items()
    }
    outer = {name: value for name, value in head.layers[0].state_dict().items() if not name.startswith("mtp_block")}
    if model_type.startswith("qwen3"):
        names = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}
        named = {f"mtp.layers.0.{name}": value for name, value in saved.items()}
        named |= {f"mtp.{names[name.partition('.')[0]]}.weight": value for name, value in outer.items()}
    else:
        outer["shared_head.norm.weight"] = outer.pop("post_norm.weight")
        copies = {"embed_tokens.weight": target.get_input_embeddings(), "shared_head.head.weight": target.lm_head}
        outer |= {name: module.weight for name, module in copies.items()}
        named = {f"model.layers.{layers}.{name}": value for name, value in (saved | outer).items()}
    file, dtype = folder / "model.safetensors", target.dtype
    tensors = load_file(file) | {name: value.detach().clone().to(dtype) for name, value in named.items()}
    save_file(tensors, file, {"format": "pt"})
    return folder


def published(text: Path, whole: Path) -> Path:
    """Write a Qwen3.5 of the text class in the multimodal class in which it is published, and return its folder."""
    fields = json.loads((text / "config.json").read_text())
    outer = AutoConfig.for_model(fields["model_type"].removesuffix("_text"), text_config=fields, vision_config=VISION)
    outer.tie_word_embeddings = fields["tie_word_embeddings"]
    outer.architectures = [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(outer)].__name__]
    outer.save_pretrained(whole)
    tensors = load_file(text / "model.safetensors")
    named = {re.sub(r"^model\.", "model.language_model.", name): value for name, value in tensors.items()}
    save_file(named, whole / "model.safetensors", {"format": "pt"})
    return whole


def transformers_head(target, folder: Path | None = None) -> MtpModel:
    """Return transformers' own MTP model of a target: with new weights, or read from the target's folder."""
    for key, value in MTP_KEYS.items():
        if not hasattr(target.config, key):
            setattr(target.config, key, value)
    if folder is None:
        return MtpModel(target, 1).eval().requires_grad_(False)
    layers = target.config.num_hidden_layers  # transformers would ignore the layers of published sizes
    target._keys_to_ignore_on_load_unexpected = [r"^mtp\..*", rf"model\.layers\.{layers}\..*"]
    return MtpModel.from_pretrained(target).eval().requires_grad_(False)


def plan_of(target: Path, draft: Path | str | None = "mtp", **flags):
    given = {"checkpoint": target, "draft": draft and Path(draft), "max_seq_len": 128, "max_prefill": 16}
    arch = None if torch.cuda.is_available() else "sm_90"
    return make_plan(ExportConfig("auto", **{"output_dir": None, "cuda_arch": arch} | given | flags))


def changed(source: Path, into: Path, keys=None, layer=None, tensors=None) -> Path:
    """Write a copy of a checkpoint with changed keys, changed keys of its layers, and changed tensors (None removes
    one), and return its folder."""
    shutil.copytree(source, into)
    config = json.loads((into / "config.json").read_text()) | (keys or {})
    if layer:
        config["transformer_layer_config"] |= layer
    (into / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    held = load_file(into / "model.safetensors") | (tensors or {})
    save_file({name: value for name, value in held.items() if value is not None}, into / "model.safetensors")
    return into
