"""Writes draft heads with random weights and published shapes, one function per kind.

An EAGLE-3 head of one layer and a P-EAGLE head of four layers can be made for any target. For Gemma 4 31B the EAGLE-3
head has the shapes of ``RedHatAI/gemma-4-31B-it-speculator.eagle3``, the P-EAGLE head four such layers, the assistant
the shapes of ``google/gemma-4-31B-it-assistant`` (0.47 B parameters), and the DFlash head those of
``z-lab/gemma-4-31B-it-DFlash``.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from published_widths import random_weight
from safetensors.torch import save_file
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig, PreTrainedConfig

from eagle3.export.draft.kinds.eagle.tensor_names import MASK
from eagle3.export.draft.kinds.gemma4_assistant.twin import states_are_shared

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class PublishedHead:
    """The content of a head's folder."""

    fields: dict[str, Any]
    """The content of config.json."""
    shapes: Shapes
    """Shapes of the weights, which are bfloat16."""
    vocabulary: dict[str, torch.Tensor] = field(default_factory=dict)
    """The map of a reduced vocabulary."""

    def save(self, folder: Path) -> None:
        """Write the head with random weights."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: random_weight(torch.Size(shape), None) for name, shape in self.shapes.items()}
        save_file(tensors | self.vocabulary, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(self.fields))


DRAFT_VOCABULARY = 32000
PEAGLE_LAYERS = 4
DFLASH = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "intermediate_size": 10752,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 262144,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "sliding_window": 2048,
    "use_sliding_window": True,
    "block_size": 16,
    "final_logit_softcapping": 30.0,
}
DFLASH_TAPS = 6
ASSISTANT_LAYERS = ["sliding_attention"] * 3 + ["full_attention"]


def taps_of(layers: int) -> list[int]:
    """Return the layers whose inputs an EAGLE head takes."""
    return [1, layers // 2, layers - 1]


def draft_shapes(config: PreTrainedConfig, taps: int) -> Shapes:
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
    """Return the content of the head's config.json."""
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


def eagle3(config: PreTrainedConfig, taps: list[int] | None = None) -> PublishedHead:
    taps = taps or taps_of(config.num_hidden_layers)
    return PublishedHead(draft_fields(config, taps), draft_shapes(config, len(taps)), draft_vocabulary(config))


def peagle(config: PreTrainedConfig) -> PublishedHead:
    head = eagle3(config)
    fields = head.fields | {
        "architectures": ["PEagleDraftModel"],
        "speculators_model_type": "peagle",
        "mask_token_id": 4,
    }
    fields["transformer_layer_config"]["num_hidden_layers"] = PEAGLE_LAYERS
    fields["speculators_config"]["algorithm"] = "peagle"
    shapes, width = head.shapes, config.hidden_size
    for name, shape in [*shapes.items()]:
        if name.startswith("layers.0.") and "hidden_norm" not in name:
            later = (shape[0], width) if shape[-1] == 2 * width else shape
            shapes |= {name.replace("layers.0.", f"layers.{index}."): later for index in range(1, PEAGLE_LAYERS)}
    shapes[MASK] = (1, 1, head.shapes["fc.weight"][1])
    return PublishedHead(fields, shapes, head.vocabulary)


def dflash(config: PreTrainedConfig) -> PublishedHead:
    width, last = config.hidden_size, config.num_hidden_layers - 1
    taps = [index * last // (DFLASH_TAPS - 1) for index in range(DFLASH_TAPS)]
    fields = DFLASH | {
        "architectures": ["DFlashDraftModel"],
        "hidden_size": width,
        "vocab_size": config.vocab_size,
        "num_target_layers": config.num_hidden_layers,
        "dflash_config": {"mask_token_id": 4, "target_layer_ids": taps},
    }
    heads, keys = (DFLASH[name] * DFLASH["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    inner = DFLASH["intermediate_size"]
    shapes: Shapes = {"fc.weight": (width, DFLASH_TAPS * width)}
    shapes |= {f"{name}.weight": (width,) for name in ("norm", "hidden_norm")}
    for at in (f"layers.{index}" for index in range(DFLASH["num_hidden_layers"])):
        shapes |= {f"{at}.self_attn.q_proj.weight": (heads, width), f"{at}.self_attn.o_proj.weight": (width, heads)}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (keys, width) for name in "kv"}
        shapes |= {f"{at}.self_attn.{name}_norm.weight": (DFLASH["head_dim"],) for name in "qk"}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj.weight": (width, inner)}
        shapes |= {f"{at}.{name}.weight": (width,) for name in ("input_layernorm", "post_attention_layernorm")}
    return PublishedHead(fields, shapes)


def assistant(config: Gemma4TextConfig) -> PublishedHead:
    full = config.per_layer_config[config.layer_types.index("full_attention")]
    keys = {"head_dim": full.head_dim, "num_key_value_heads": full.num_key_value_heads}
    changes = {
        "hidden_size": 1024,
        "intermediate_size": 8192,
        "num_hidden_layers": len(ASSISTANT_LAYERS),
        "num_kv_shared_layers": len(ASSISTANT_LAYERS),
        "vocab_size_per_layer_input": 0,
        "layer_types": ASSISTANT_LAYERS,
        "final_logit_softcapping": None,
        "hidden_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "per_layer_config": {ASSISTANT_LAYERS.index("full_attention"): keys},
    }
    text = Gemma4TextConfig.from_dict(config.to_dict() | changes)
    whole = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=config.hidden_size)
    with states_are_shared(Gemma4TextConfig), torch.device("meta"):
        tensors = Gemma4AssistantForCausalLM(whole).state_dict()
    shapes = {name: tuple(value.shape) for name, value in tensors.items() if name != "lm_head.weight"}  # tied
    return PublishedHead(json.loads(whole.to_json_string()) | {"architectures": ["Gemma4AssistantForCausalLM"]}, shapes)


HEADS: dict[str, Callable[[PreTrainedConfig], PublishedHead]] = {
    "eagle3": eagle3,
    "peagle": peagle,
    "assistant": assistant,
    "dflash": dflash,
}
"""Functions that make a head for a target with transformers' configuration, by the value of ``--draft``."""
