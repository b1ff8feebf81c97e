"""Writes synthetic checkpoints of Gemma 4 31B with any number of layers, and of EAGLE-3 heads for any target: published
widths and random weights, so that only an artifact's size and speed are meaningful."""

import json
from pathlib import Path
from typing import Any

import torch
from executorch.extension.llm.export.quant import QuantConfig, QuantRecipe
from safetensors.torch import save_file
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import IntxUnpackedToInt8Tensor
from torchao.quantization.quantize_.workflows.int4.int4_tensor import Int4Tensor
from transformers import Gemma4TextConfig, PreTrainedConfig

from eagle3.export.lowering.cuda.weights.quantization import fitted_recipe
from eagle3.targets import gemma4

DRAFT_VOCABULARY = 32000


def gemma4_config(layers: int) -> Gemma4TextConfig:
    """Return a configuration with Gemma 4 31B's widths. Every sixth layer has full attention."""
    return Gemma4TextConfig(
        vocab_size=262144,
        hidden_size=5376,
        intermediate_size=21504,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=256,
        global_head_dim=512,
        num_global_key_value_heads=4,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=262144,
        sliding_window=1024,
        max_position_embeddings=131072,
        final_logit_softcapping=30.0,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
        dtype="bfloat16",
    )


def random_weight(shape: torch.Size, quantization: QuantConfig | None) -> torch.Tensor:
    """Return a random weight with the statistics of a trained one, in its stored form."""
    if quantization is None:
        return torch.randn(shape).mul_(0.02).add_(1.0 if len(shape) == 1 else 0.0).to(torch.bfloat16)
    rows, columns = shape
    groups, scale = columns // quantization.group_size, columns**-0.5
    scales = torch.full((rows, groups), scale / 2 ** (quantization.bits - 2), dtype=torch.bfloat16)
    if quantization.bits == 4:
        packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
        zeros = torch.full((groups, rows), 8.0, dtype=torch.bfloat16)
        return Int4Tensor(packed, scales.t().contiguous(), zeros, [1, quantization.group_size], shape)
    codes = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
    zeros = torch.zeros((rows, groups), dtype=torch.int8)
    block = (1, quantization.group_size)
    return IntxUnpackedToInt8Tensor(codes, scales, zeros, torch.int8, block, torch.bfloat16, None)


def save_target(folder: Path, config: Gemma4TextConfig, unquantized: bool = False) -> None:
    """Write the target with one shard per layer, so that only one shard is in memory."""
    recipe = QuantRecipe([]) if unquantized else fitted_recipe("default", config)
    shards: dict[str, dict[str, torch.Size]] = {}
    for name, value in gemma4.skeleton(config, max_seq_len=1024).model.state_dict().items():
        parts = name.split(".")
        shards.setdefault(parts[1] if parts[0] == "layers" else parts[0], {})[name] = value.shape
    weight_map = {}
    for key, shapes in shards.items():
        weights = {name: random_weight(shape, recipe.get_config(name)) for name, shape in shapes.items()}
        if unquantized:
            weights.pop("lm_head.weight", None)  # tied
        if not weights:
            continue
        tensors, metadata = (weights, None) if unquantized else flatten_tensor_state_dict(weights)
        save_file(tensors, folder / f"{key}.safetensors", metadata=metadata)
        weight_map |= {name: f"{key}.safetensors" for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config.save_pretrained(folder)


def draft_shapes(config: PreTrainedConfig, taps: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a draft head with the target's widths, without its vocabulary map. For Gemma 4 31B they are
    those of RedHatAI/gemma-4-31B-it-speculator.eagle3, 2.24 B parameters."""
    width, inner, known = config.hidden_size, config.intermediate_size, config.to_dict()  # attributes vary by layer
    heads, kv_heads = (known[name] * known["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    return {
        "embed_tokens.weight": (config.vocab_size, width),
        "fc.weight": (width, taps * width),
        "layers.0.self_attn.q_proj.weight": (heads, 2 * width),
        "layers.0.self_attn.k_proj.weight": (kv_heads, 2 * width),
        "layers.0.self_attn.v_proj.weight": (kv_heads, 2 * width),
        "layers.0.self_attn.o_proj.weight": (width, heads),
        "layers.0.mlp.gate_proj.weight": (inner, width),
        "layers.0.mlp.up_proj.weight": (inner, width),
        "layers.0.mlp.down_proj.weight": (width, inner),
        "lm_head.weight": (DRAFT_VOCABULARY, width),
        "layers.0.input_layernorm.weight": (width,),
        "layers.0.hidden_norm.weight": (width,),
        "layers.0.post_attention_layernorm.weight": (width,),
        "norm.weight": (width,),
    }


def draft_vocabulary(config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """Return a map of the head's vocabulary to the first ids of the target's."""
    return {
        "d2t": torch.zeros(DRAFT_VOCABULARY, dtype=torch.long),
        "t2d": torch.arange(config.vocab_size) < DRAFT_VOCABULARY,
    }


def draft_fields(config: PreTrainedConfig, aux_layers: list[int]) -> dict[str, Any]:
    """Return what the head's config.json holds."""
    known = config.to_dict()
    layer = {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        **{name: known[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")},
        "num_hidden_layers": 1,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    }
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFT_VOCABULARY,
        "eagle_aux_hidden_state_layer_ids": aux_layers,
        "norm_before_residual": True,
        "transformer_layer_config": layer,
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [proposal]},
    }


def save_draft(folder: Path, config: PreTrainedConfig, aux_layers: list[int]) -> None:
    """Write a draft head with random weights."""
    shapes = draft_shapes(config, len(aux_layers))
    tensors = {name: random_weight(torch.Size(shape), None) for name, shape in shapes.items()}
    save_file(tensors | draft_vocabulary(config), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(draft_fields(config, aux_layers)))
