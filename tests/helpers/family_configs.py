"""Small configurations of decoder-only families of transformers, each with the features that are special to its
family."""

from random_checkpoints import GRANITE
from transformers import AutoConfig

SIZE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 192,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 48,
}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_chunk_size": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
FALCON_H1 = MAMBA2 | {
    "num_hidden_layers": 2,
    "mamba_d_ssm": 128,
    "key_multiplier": 0.5,
    "lm_head_multiplier": 0.7,
    "embedding_multiplier": 2.0,
    "mlp_multipliers": [0.8, 0.6],
    "ssm_multipliers": [0.5, 0.9, 0.8, 1.2, 0.7],
    "ssm_in_multiplier": 0.7,
    "ssm_out_multiplier": 0.8,
    "attention_in_multiplier": 1.1,
    "attention_out_multiplier": 0.9,
}
"""Every multiplier of the class has a value of its own."""

DELTA_RULE = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 512,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
EXPERTS_BESIDE_ONE = EXPERTS | {"shared_expert_intermediate_size": 32}

FAMILIES = {
    "bamba": MAMBA2 | {"num_hidden_layers": 3, "attn_layer_indices": [1], "time_step_limit": (0.02, 0.1)},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"sliding_window": 16, "logit_scale": 0.25},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "head_dim": 8,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
    "falcon_h1": FALCON_H1,
    "falcon_h1 with a norm": FALCON_H1 | {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    "gemma": {},
    "gemma2": {"sliding_window": 16, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0},
    "gemma3_text": {"sliding_window": 16, "query_pre_attn_scalar": 24, "layer_types": ALTERNATING},
    "glm4": {"partial_rotary_factor": 0.5, "attention_bias": True},
    "gpt_oss": {"sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ALTERNATING},
    "granite": GRANITE,
    "granitemoehybrid": MAMBA2
    | GRANITE
    | {
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 4,
        "shared_intermediate_size": 80,
    },
    "kimi_linear": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_key_value_heads": 4,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 24,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "moe_intermediate_size": 32,
        "max_position_embeddings": 512,
    },
    "bailing_hybrid": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,  # the class takes it as its head_dim when it reads its own file
        "v_head_dim": 24,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "max_position_embeddings": 512,
    },
    "lara_mini": DELTA_RULE
    | EXPERTS_BESIDE_ONE
    | {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "sliding_attention", "full_attention"],
        "sliding_window": 32,
    },
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"], "conv_bias": True},
    "lfm2_moe": EXPERTS | {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1, "conv_L_cache": 4},
    "lfm3": {"sliding_window": 16, "layer_types": ["conv", "sliding_attention", "full_attention", "conv"]},
    "llama4_text": {
        "attention_chunk_size": 16,
        "num_local_experts": 4,
        "intermediate_size_mlp": 96,
        "floor_scale": 24,
        "attn_scale": 0.5,
    },
    "ministral3": {"rope_parameters": YARN_ROPE | {"llama_4_scaling_beta": 0.1}},
    "mistral": {"sliding_window": 16},
    "mistral without a window": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "nemotron_h": {
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "layers_block_type": ["mamba", "moe", "attention", "mamba", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 24,
        "chunk_size": 32,
        "time_step_min": 0.02,
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "moe_latent_size": 40,
        "moe_shared_expert_intermediate_size": 48,
    },
    "olmo2": {},
    "olmo_hybrid": DELTA_RULE | {"linear_num_key_heads": 4},
    "olmo3": {"sliding_window": 16, "layer_types": ALTERNATING},
    "phi": {"num_key_value_heads": 4, "partial_rotary_factor": 0.5},
    "phi3": {"sliding_window": 16},
    "phi3 without a window": {"sliding_window": None},
    "qwen2": {},
    "qwen2 with a window": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    "qwen3_5_moe_text": DELTA_RULE | EXPERTS_BESIDE_ONE,
    "qwen3_5_text": DELTA_RULE,
    "qwen3_moe": EXPERTS,
    "qwen3_next": DELTA_RULE | EXPERTS_BESIDE_ONE,
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "stablelm": {"num_key_value_heads": 4, "partial_rotary_factor": 0.25},
    "starcoder2": {"sliding_window": 16},
    "llama with yarn": {"rope_parameters": YARN_ROPE},
    "qwen3 with a window": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
}
"""The changed fields by name, whose first word is transformers' ``model_type``."""


def family_config(name: str):
    return AutoConfig.for_model(name.split()[0], **SIZE | FAMILIES[name])
