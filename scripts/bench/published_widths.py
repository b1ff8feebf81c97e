"""Writes synthetic checkpoints of Gemma 4 31B with any number of layers: published widths and random weights, so that
only an artifact's size and speed are meaningful. ``published_heads.py`` writes heads for them."""

import json
from pathlib import Path

import torch
from executorch.extension.llm.export.quant import QuantConfig, QuantRecipe
from safetensors.torch import save_file
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import IntxUnpackedToInt8Tensor
from torchao.quantization.quantize_.workflows.int4.int4_tensor import Int4Tensor
from transformers import Gemma4TextConfig

from eagle3.export.lowering.cuda.weights.quantization import fitted_recipe
from eagle3.targets import gemma4


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
