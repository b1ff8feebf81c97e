"""Writes tiny random checkpoints of every target family, in the formats of published ones."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
    Gemma4UnifiedTextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from eagle3.export.draft.kinds.gemma4_assistant.twin import states_are_shared
from eagle3.export.twin.randomize import randomize

SIZE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
GEMMA4 = {
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 96,
    "sliding_window": 16,
    "final_logit_softcapping": 30.0,
}
GEMMA4_E2B = GEMMA4 | {
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 32,
    "use_double_wide_mlp": True,
}
GEMMA4_E4B = GEMMA4_E2B | {"use_double_wide_mlp": False}
GEMMA4_MOE = GEMMA4 | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 64}
GRANITE = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 0.5,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "pad_token_id": None}
QWEN3_MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
LLAMA4 = {
    "intermediate_size_mlp": 160,
    "no_rope_layer_interval": 2,
    "floor_scale": 12,
    "attn_scale": 0.5,
    "bos_token_id": None,
    "eos_token_id": None,
}
SCOUT = LLAMA4 | {"num_local_experts": 4, "attention_chunk_size": 16}
MAVERICK = LLAMA4 | {
    "num_local_experts": 8,
    "interleave_moe_layer_step": 2,
    "use_qk_norm": False,
    "attention_chunk_size": 24,
}


def gemma4_sharing_keys(size: dict, fields: dict) -> Gemma4ForCausalLM:
    """Return a Gemma 4 in which the last third of the layers (of four, two) share keys of earlier layers. With six
    layers, the third and the fourth store these keys, and each follows another layer of its kind."""
    count = size["num_hidden_layers"]
    kinds = ["sliding_attention", "full_attention"] * (count // 2)
    config = Gemma4TextConfig(**size, **fields, layer_types=kinds, num_kv_shared_layers=math.ceil(count / 3))
    return Gemma4ForCausalLM(config)


FAMILIES = {
    "gemma4-31B": lambda size: Gemma4ForCausalLM(Gemma4TextConfig(**size, **GEMMA4)),
    "gemma4-E2B": lambda size: gemma4_sharing_keys(size, GEMMA4_E2B),
    "gemma4-E4B": lambda size: gemma4_sharing_keys(size, GEMMA4_E4B),
    "gemma4-26B-A4B": lambda size: Gemma4ForCausalLM(Gemma4TextConfig(**size, **GEMMA4_MOE)),
    "llama3.1-8B": lambda size: LlamaForCausalLM(LlamaConfig(**size, rope_parameters=LLAMA3_ROPE)),
    "qwen3-4B": lambda size: Qwen3ForCausalLM(Qwen3Config(**size, tie_word_embeddings=True)),
    "mistral-7B": lambda size: MistralForCausalLM(MistralConfig(**size, sliding_window=16)),
    "phi4": lambda size: Phi3ForCausalLM(Phi3Config(**size, pad_token_id=0, eos_token_id=2, sliding_window=None)),
    "granite3-8B": lambda size: GraniteForCausalLM(GraniteConfig(**size, **GRANITE)),
    "gemma3-27B": lambda size: Gemma3ForCausalLM(Gemma3TextConfig(**size, sliding_window=16)),
    "gpt-oss-20b": lambda size: GptOssForCausalLM(GptOssConfig(**size, **GPT_OSS)),
    "llama4-maverick": lambda size: Llama4ForCausalLM(Llama4TextConfig(**size, **MAVERICK)),
    "llama4-scout": lambda size: Llama4ForCausalLM(Llama4TextConfig(**size, **SCOUT)),
    "qwen3-30B-A3B": lambda size: Qwen3MoeForCausalLM(Qwen3MoeConfig(**size, **QWEN3_MOE)),
}


def random_model(name: str, **changes):
    """Return a transformers model of a target's family whose norms, scalars and logits are far from their initial
    values."""
    torch.manual_seed(7)
    model = FAMILIES[name](SIZE | changes).float().eval().requires_grad_(False)
    for key, value in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        if "norm" in key or "layer_scalar" in key:
            value.add_(0.3 * torch.randn_like(value))
        elif key.endswith(("router.scale", "per_expert_scale")):
            value.mul_(1 + 0.3 * torch.randn_like(value))
        elif "sinks" in key:
            value.copy_(torch.randn_like(value))
        elif value.ndim >= 2 and "embed" not in key:
            value.copy_(torch.randn_like(value) / value.shape[-1] ** 0.5)
    return model


def save_random_draft(
    folder: Path, config, aux_layers=(1, 3, 4), draft_vocab: int = 48, changes=None, window: int = 0
) -> Path:
    """Write a speculators folder with a random draft head for a target's text configuration.

    ``changes`` maps names to tensors that replace others, or to None to remove one. ``window`` is the sliding window of
    the head's own attention, 0 for none.
    """
    torch.manual_seed(11)
    hidden, heads, head_dim = config.hidden_size, 4, config.hidden_size // 4
    attention = heads * head_dim
    shapes = {
        "embed_tokens.weight": (config.vocab_size, hidden),
        "fc.weight": (hidden, len(aux_layers) * hidden),
        "layers.0.self_attn.q_proj.weight": (attention, 2 * hidden),
        "layers.0.self_attn.k_proj.weight": (attention // 2, 2 * hidden),
        "layers.0.self_attn.v_proj.weight": (attention // 2, 2 * hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, attention),
        "layers.0.mlp.gate_proj.weight": (2 * hidden, hidden),
        "layers.0.mlp.up_proj.weight": (2 * hidden, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, 2 * hidden),
        "lm_head.weight": (draft_vocab, hidden),
    }
    tensors = {name: torch.randn(shape) / shape[1] ** 0.5 for name, shape in shapes.items()}
    norms = ("layers.0.input_layernorm", "layers.0.hidden_norm", "layers.0.post_attention_layernorm", "norm")
    tensors |= {f"{name}.weight": 1 + 0.3 * torch.randn(hidden) for name in norms}
    ids = torch.randperm(config.vocab_size)[:draft_vocab].sort().values
    tensors["d2t"] = ids - torch.arange(draft_vocab)
    tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    tensors |= changes or {}
    layer = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": head_dim,
        "num_hidden_layers": 1,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    }
    if window:
        layer |= {"layer_types": ["sliding_attention"], "sliding_window": window}
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    described = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": draft_vocab,
        "eagle_aux_hidden_state_layer_ids": list(aux_layers),
        "norm_before_residual": True,
        "transformer_layer_config": layer,
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [proposal]},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(described))
    save_file({name: value for name, value in tensors.items() if value is not None}, folder / "model.safetensors")
    return folder


def save_random_dflash(
    folder: Path, config, aux_layers=(1, 3, 4), draft_vocab: int = 48, block: int = 5, **keys
) -> Path:
    """Write a speculators folder with a random DFlash head of two layers for a target's text configuration. ``keys``
    are keys of its configuration, ``layer`` those of its layers."""
    torch.manual_seed(13)
    hidden, heads, head_dim = config.hidden_size, 4, config.hidden_size // 4
    shapes = {"fc.weight": (hidden, len(aux_layers) * hidden), "lm_head.weight": (draft_vocab, hidden)}
    norms = ["hidden_norm", "norm"]
    for at in ("layers.0", "layers.1"):
        rows = {"q": hidden, "k": hidden // 2, "v": hidden // 2, "o": hidden}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (count, hidden) for name, count in rows.items()}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (2 * hidden, hidden) for name in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj.weight": (hidden, 2 * hidden)}
        norms += [f"{at}.input_layernorm", f"{at}.post_attention_layernorm"]
    tensors = {name: torch.randn(shape) / shape[1] ** 0.5 for name, shape in shapes.items()}
    tensors |= {f"{name}.weight": 1 + 0.3 * torch.randn(hidden) for name in norms}
    for at in ("layers.0", "layers.1"):
        tensors |= {f"{at}.self_attn.{name}_norm.weight": 2 + 0.3 * torch.randn(head_dim) for name in "qk"}
    if draft_vocab != config.vocab_size:
        ids = torch.randperm(config.vocab_size)[:draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    else:
        del tensors["lm_head.weight"]
    layer = {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": head_dim,
        "num_hidden_layers": 2,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    }
    tokens = block if keys.get("sample_from_anchor") else block - 1
    proposal = {"proposal_type": "greedy", "speculative_tokens": tokens}
    described = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "draft_vocab_size": draft_vocab,
        "block_size": block,
        "mask_token_id": config.vocab_size - 1,
        "aux_hidden_state_layer_ids": list(aux_layers),
        "transformer_layer_config": layer | keys.pop("layer", {}),
        "speculators_config": {"algorithm": "dflash", "proposal_methods": [proposal]},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(described | keys))
    save_file(tensors, folder / "model.safetensors")
    return folder


def save_random_xpress(folder: Path, config, aux_layers=(1, 3, 4), rank: int = 16, **keys) -> Path:
    """Write a speculators folder with a random xPress head: that of ``save_random_dflash`` with a refiner."""
    named = {"architectures": ["XPressDraftModel"], "speculators_model_type": "xpress", "xpress_rank": rank}
    save_random_dflash(folder, config, aux_layers, **named | keys)
    described, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    hidden, block = config.hidden_size, described["block_size"]
    shapes = {"token_embed": (config.vocab_size, rank), "readout": (described["draft_vocab_size"], rank)}
    shapes |= {"down_h": (rank, hidden), "down_g": (rank, hidden), "in_proj": (rank, 3 * rank)}
    shapes |= {"mlp_gate": (2 * rank, rank), "mlp_up": (2 * rank, rank), "mlp_down": (rank, 2 * rank)}
    tensors |= {f"refiner_head.{name}.weight": torch.randn(each) / each[1] ** 0.5 for name, each in shapes.items()}
    tensors["refiner_head.mix_l"] = torch.randn(rank, block, block) / block**0.5
    save_file(tensors, folder / "model.safetensors")
    return folder


def save_random_domino(folder: Path, config, aux_layers=(1, 3, 4), gru: int = 32, rank: int = 16, **keys) -> Path:
    """Write a speculators folder with a random Domino head: that of ``save_random_dflash`` with a GRU."""
    named = {"projector_type": "domino", "gru_hidden_dim": gru, "emb_dim": rank}
    save_random_dflash(folder, config, aux_layers, **named | keys)
    described, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    hidden = config.hidden_size
    shapes = {"prefix_gru.weight_ih_l0": (3 * gru, hidden), "prefix_gru.weight_hh_l0": (3 * gru, gru)}
    shapes |= {
        "embed_proj.0.weight": (rank, hidden + gru),
        "embed_proj.2.weight": (described["draft_vocab_size"], rank),
    }
    tensors |= {f"domino_head.{name}": torch.randn(each) / each[1] ** 0.5 for name, each in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


ASSISTANTS = {
    Gemma4TextConfig: (Gemma4AssistantConfig, Gemma4AssistantForCausalLM),
    Gemma4UnifiedTextConfig: (Gemma4UnifiedAssistantConfig, Gemma4UnifiedAssistantForCausalLM),
}


def random_assistant(config, ordered: bool = False, **changes):
    """Return transformers' own assistant with random weights, for a target with transformers' text configuration
    ``config``. ``changes`` are fields of its text configuration."""
    layer_types = ["sliding_attention", "sliding_attention", "full_attention"]
    overrides = config.per_layer_config[config.layer_types.index("full_attention")]
    sizes = {"num_hidden_layers": 3, "layer_types": layer_types, "hidden_size": 48, "intermediate_size": 96}
    text = config.to_dict() | sizes | {"num_kv_shared_layers": 3, "hidden_size_per_layer_input": 0}
    text |= {"vocab_size_per_layer_input": 0, "final_logit_softcapping": None, "use_double_wide_mlp": False}
    text["per_layer_config"] = {"2": {key: getattr(overrides, key) for key in ("head_dim", "num_key_value_heads")}}
    text = type(config).from_dict(text | changes)
    config_class, model_class = ASSISTANTS[type(config)]
    centroids = {"num_centroids": 16, "centroid_intermediate_top_k": 5}
    whole = config_class(
        text_config=text, backbone_hidden_size=config.hidden_size, use_ordered_embeddings=ordered, **centroids
    )
    with states_are_shared(type(text)):
        model = model_class(whole).float().eval().requires_grad_(False)
    randomize(model, seed=9)
    if ordered:
        model.masked_embedding.token_ordering.copy_(torch.randperm(config.vocab_size))
    return model


def save_random_assistant(folder: Path, config, ordered: bool = False, **changes) -> Path:
    random_assistant(config, ordered, **changes).save_pretrained(folder)
    return folder


def save_random_mlp(folder: Path, config, **changes) -> Path:
    """Write an MLP speculator with random weights, for a target with transformers' text configuration ``config``, in
    the published form: tied, so that later stages have no weights of their own."""
    described = {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "n_predict": 4}
    described |= {"emb_dim": config.hidden_size, "inner_dim": 48, "vocab_size": config.vocab_size}
    described |= {"tie_weights": True, "scale_input": True, "n_candidates": 5, "top_k_tokens_per_head": [4, 3, 2, 2]}
    described |= changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(described))
    inner, generator = described["inner_dim"], torch.Generator().manual_seed(11)
    shapes = {"emb.0": (config.vocab_size, inner), "head.0": (config.vocab_size, inner)}
    shapes |= {"proj.0": (inner, config.hidden_size), "proj.1": (inner, inner)}
    tensors = {
        f"speculator.{name}.weight": torch.randn(shape, generator=generator) * shape[1] ** -0.5
        for name, shape in shapes.items()
    }
    tensors |= {f"speculator.ln.0.{name}": torch.randn(inner, generator=generator) for name in ("weight", "bias")}
    save_file(tensors, folder / "model.safetensors")
    return folder
