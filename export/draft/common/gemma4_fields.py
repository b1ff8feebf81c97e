"""Reads the sizes of Gemma 4's layers of full attention from a draft head's configuration. DeepSeek's DeepSpec writes
them under the target's own keys, which have two sizes of heads and two RoPEs.

Source: deepseek-ai/DeepSpec, ``deepspec/modeling/eagle3/gemma4`` and ``deepspec/modeling/dspark/gemma4``.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_KEPT = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings", "vocab_size"),
    *("num_hidden_layers", "rms_norm_eps", "layer_types"),
)
_FULL = "full_attention"


def names_gemma4(config: Mapping[str, Any]) -> bool:
    """Return True for a DeepSpec head with Gemma 4's layers."""
    return any(str(name).startswith("Gemma4") for name in config.get("architectures") or [])


def full_attention_fields(config: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the sizes of these layers under the keys that other families use. Raises ValueError for experts and
    per-layer inputs, which DeepSpec's code does not compute."""
    from eagle3.export.checkpoints.json_fields import (  # here, because its package imports torch
        boolean,
        count,
        nested,
    )

    experts = boolean(config, "enable_moe_block", False, file)
    by_layer = count(config, "hidden_size_per_layer_input", 0, file, least=0)
    if experts or by_layer:
        raise ValueError(
            f"{file}: layers with experts or with per-layer inputs, which DeepSpec's code does not compute"
        )
    heads = "num_global_key_value_heads" if boolean(config, "attention_k_eq_v", False, file) else "num_key_value_heads"
    rope = nested(nested(config, "rope_parameters", file), _FULL, file)
    own = {"head_dim": config.get("global_head_dim"), "num_key_value_heads": config.get(heads), "rope_parameters": rope}
    own |= {"hidden_act": config.get("hidden_activation", "gelu_pytorch_tanh")}
    return {key: config[key] for key in _KEPT if key in config} | own
