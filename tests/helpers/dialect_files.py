"""Writes one random draft head in the form of each system: with other names and keys, but the same numbers."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

IDS = "eagle_aux_hidden_state_layer_ids"
HIDDEN, VOCAB, SPOKEN, HEADS = 64, 96, 48, 4
SIZES = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
}
FLAT = SIZES | {"rope_theta": 10000.0, "rope_scaling": None, "draft_vocab_size": SPOKEN, "tie_word_embeddings": False}
PROPOSAL = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
CONFIGS = {
    "speculators": {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": SPOKEN,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        "norm_before_residual": False,
        "transformer_layer_config": SIZES | {"rope_theta": 10000.0},
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [PROPOSAL]},
    },
    "safeailab": FLAT | {"architectures": ["LlamaForCausalLM"]},
    "specforge": FLAT
    | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 2, 3]},
    },
    "sglang": FLAT
    | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "norm_output": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]},
    },
    "nemo": FLAT
    | {
        "architectures": ["LlamaEagle3DraftModel"],
        "num_hidden_layers": 12,  # the target's depth
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]},
    },
    "angelslim": FLAT
    | {
        "architectures": ["Eagle3LlamaForCausalLM"],
        "target_model_type": "qwen3",
        "modal_type": "LLM",
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
    },
    "deepspec": FLAT
    | {
        "architectures": ["Qwen3Eagle3Model"],
        "model_type": "qwen3",
        "target_layer_ids": [0, 2, 3],
        "ttt_length": 7,
        "target_model_name_or_path": "Qwen/Qwen3-8B",
    },
    "modelopt": FLAT
    | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [0, 2, 3],
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
            "parallel_draft_heads_num_layers": 1,
        },
    },
}
NAMES = {
    "speculators": lambda name: name,
    "safeailab": lambda name: name.replace("layers.0.", "midlayer."),
    "specforge": lambda name: name.replace("layers.0.", "midlayer."),
    "sglang": lambda name: name if name.split(".")[0] in ("lm_head", "d2t", "t2d") else f"model.{name}",
    "nemo": lambda name: f"model.{name}",
    "angelslim": lambda name: name.replace("layers.0.", "midlayer."),
    "modelopt": lambda name: name,
    "deepspec": lambda name: name,
}


def random_head(
    taps: int = 3, layers: int = 1, width: int | None = None, head_dim: int | None = None, hidden: int = HIDDEN
) -> dict[str, Tensor]:
    """Return a head's tensors under speculators' names, including the embedding; later layers have an
    ``input_layernorm``."""
    generator = torch.Generator().manual_seed(5)
    width, head_dim = width or hidden, head_dim or hidden // HEADS

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    def norm(size: int) -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=generator)

    tensors = {"embed_tokens.weight": noise(VOCAB, hidden) * hidden**0.5, "lm_head.weight": noise(SPOKEN, hidden)}
    tensors |= {"fc.weight": noise(hidden, taps * width), "norm.weight": norm(hidden)}
    for index in range(layers):
        at, inputs = f"layers.{index}.", hidden if index else 2 * hidden
        for name, rows in (("q", HEADS), ("k", HEADS // 2), ("v", HEADS // 2)):
            tensors[f"{at}self_attn.{name}_proj.weight"] = noise(rows * head_dim, inputs)
        tensors[f"{at}self_attn.o_proj.weight"] = noise(hidden, HEADS * head_dim)
        for name in ("gate", "up"):
            tensors[f"{at}mlp.{name}_proj.weight"] = noise(2 * hidden, hidden)
        tensors[f"{at}mlp.down_proj.weight"] = noise(hidden, 2 * hidden)
        for name in ("input_layernorm", "post_attention_layernorm", *([] if index else ["hidden_norm"])):
            tensors[f"{at}{name}.weight"] = norm(hidden)
    ids = torch.randperm(VOCAB, generator=generator)[:SPOKEN].sort().values
    tensors["d2t"] = ids - torch.arange(SPOKEN)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def write(folder: Path, dialect: str, tensors: dict[str, Tensor] | None = None, pickled: bool = False, **keys) -> Path:
    """Write a head in a dialect. ``keys`` change its configuration (a dictionary is merged, None removes a key)."""
    tensors = tensors or random_head()
    config = json.loads(json.dumps(CONFIGS[dialect]))
    hidden = next(tensor.shape[0] for name, tensor in tensors.items() if name.endswith("mlp.down_proj.weight"))
    sizes = config["transformer_layer_config"] if dialect == "speculators" else config
    sizes |= {"hidden_size": hidden, "intermediate_size": 2 * hidden}
    for key, value in keys.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            config[key] |= value
        else:
            config[key] = value
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    named = {NAMES[dialect](name): tensor for name, tensor in tensors.items()}
    if pickled:
        torch.save(named, folder / "pytorch_model.bin")
    else:
        save_file(named, folder / "model.safetensors")
    return folder


def random_eagle(hidden: int = HIDDEN) -> dict[str, Tensor]:
    """Return the tensors of an EAGLE 1 head as SafeAILab writes them: the target's embedding and lm_head, a bias of
    fc, and no norm before the head's layer."""
    generator = torch.Generator().manual_seed(8)
    tensors = {name: tensor for name, tensor in random_head(hidden=hidden).items() if name.startswith("layers.0.")}
    for name in ("input_layernorm", "hidden_norm"):
        del tensors[f"layers.0.{name}.weight"]
    for name in ("q", "k", "v"):
        key = f"layers.0.self_attn.{name}_proj.weight"
        tensors[key] = tensors[key][:, :hidden] * 2**0.5
    fc = torch.randn(hidden, 2 * hidden, generator=generator) / (2 * hidden) ** 0.5
    return tensors | {"fc.weight": fc, "fc.bias": 0.1 * torch.randn(hidden, generator=generator)}


def random_peagle(hidden: int = HIDDEN) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(8)
    return random_head(layers=2, hidden=hidden) | {"mask_hidden": torch.randn(1, 1, 3 * hidden, generator=generator)}


PEAGLE = {"architectures": ["PEagleDraftModel"], "mask_token_id": VOCAB - 1}
PEAGLE |= {"transformer_layer_config": {"num_hidden_layers": 2}}
"""Keys of a P-EAGLE of ``random_peagle`` in the dialect of speculators."""


def without(tensors, *names):
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def norms(*names, size=HIDDEN):
    generator = torch.Generator().manual_seed(6)
    return {f"{name}.weight": 1 + 0.3 * torch.randn(size, generator=generator) for name in names}


def biases(*names, size):
    generator = torch.Generator().manual_seed(7)
    return {f"{name}.bias": torch.randn(size, generator=generator) for name in names}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 1.0}
YARN |= {"mscale_all_dim": 0.0, "beta_fast": 32.0, "beta_slow": 1.0}
FC_NORMS = norms("fc_norm.0", "fc_norm.1", "fc_norm.2")
