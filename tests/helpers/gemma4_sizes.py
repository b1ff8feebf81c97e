"""Configurations of Gemma 4 E2B, E4B and 26B-A4B in their published shapes."""

from transformers import Gemma4TextConfig

EVERY_FIFTH, EVERY_SIXTH = (["sliding_attention"] * run + ["full_attention"] for run in (4, 5))
SIZES = {
    "gemma4-E2B": {
        **{"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35, "num_key_value_heads": 1},
        **{"layer_types": EVERY_FIFTH * 7, "num_kv_shared_layers": 20, "use_double_wide_mlp": True},
    },
    "gemma4-E4B": {
        **{"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 42, "num_key_value_heads": 2},
        **{"layer_types": EVERY_SIXTH * 7, "num_kv_shared_layers": 18},
    },
    "gemma4-26B-A4B": {
        **{"hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_key_value_heads": 8},
        **{
            "num_attention_heads": 16,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "sliding_window": 1024,
        },
        **{"layer_types": EVERY_SIXTH * 5, "hidden_size_per_layer_input": 0, "enable_moe_block": True},
        **{"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
    },
}
"""The fields in which the sizes differ. Others have transformers' defaults, 8 heads of 256, 512 in full layers."""


def config_of(name: str, **changes) -> Gemma4TextConfig:
    return Gemma4TextConfig(**SIZES[name] | {"final_logit_softcapping": 30.0} | changes)
