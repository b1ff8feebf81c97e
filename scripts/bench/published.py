"""Writes checkpoints of published sizes with random weights, of which only size and speed are meaningful: targets with
any number of layers, and a draft head of four kinds for each.

An EAGLE-3 head of one layer and a P-EAGLE head of four can be made for any target. For Gemma 4 31B the EAGLE-3 head has
the shapes of ``RedHatAI/gemma-4-31B-it-speculator.eagle3`` (2.24 B parameters), the P-EAGLE head four such layers, the
assistant the shapes of ``google/gemma-4-31B-it-assistant`` (0.47 B), and the DFlash head those of
``z-lab/gemma-4-31B-it-DFlash``.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from executorch.extension.llm.export.quant import QuantConfig, QuantRecipe
from safetensors.torch import save_file
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import IntxUnpackedToInt8Tensor
from torchao.quantization.quantize_.workflows.int4.int4_tensor import Int4Tensor
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from eagle3.export.draft.kinds.eagle.tensor_names import MASK
from eagle3.export.draft.kinds.gemma4_assistant.twin import states_are_shared
from eagle3.export.lowering.cuda.weights.quantization import fitted_recipe
from eagle3.targets import TARGETS

GEMMA4 = "gemma4-31B"
TARGET, EAGLE3 = "target", "eagle3"
"""Names of the folders of checkpoints; a head's folder is named after its kind."""
Shapes = dict[str, tuple[int, ...]]


def gemma4_config(layers: int = 60) -> Gemma4TextConfig:
    """Return a configuration with Gemma 4 31B's widths. Every sixth layer has full attention."""
    sizes = {"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256, "sliding_window": 1024}
    full = {"global_head_dim": 512, "num_global_key_value_heads": 4, "attention_k_eq_v": True}
    table = {"vocab_size": 262144, "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 0}
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "max_position_embeddings": 131072}
    more = {"final_logit_softcapping": 30.0, "tie_word_embeddings": True, "dtype": "bfloat16"}
    return Gemma4TextConfig(**sizes, **heads, **full, **table, **tokens, **more)


def qwen3_config(layers: int = 36) -> Qwen3Config:
    sizes = {"hidden_size": 2560, "intermediate_size": 9728, "vocab_size": 151936, "max_position_embeddings": 40960}
    rope = {"rope_theta": 1e6, "rope_type": "default"}
    more = {"rope_parameters": rope, "tie_word_embeddings": True, "dtype": "bfloat16"}
    return Qwen3Config(**HEADS_OF_128, **sizes, **more, num_hidden_layers=layers)


def llama_config(layers: int = 32) -> LlamaConfig:
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072}
    rope = {"rope_theta": 5e5, "rope_type": "default"}
    more = {"rope_parameters": rope, "tie_word_embeddings": False, "dtype": "bfloat16"}
    return LlamaConfig(**HEADS_OF_128, **sizes, **more, num_hidden_layers=layers)


def qwen3_5_config(layers: int = 32) -> Qwen3_5TextConfig:
    sizes = {"hidden_size": 2560, "intermediate_size": 9216, "vocab_size": 248320, "max_position_embeddings": 262144}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256}
    heads |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
    heads |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    rope = {"rope_theta": 1e7, "rope_type": "default", "partial_rotary_factor": 0.25}
    more = {"rope_parameters": rope, "tie_word_embeddings": True, "dtype": "bfloat16"}
    return Qwen3_5TextConfig(**sizes, **heads, **more, num_hidden_layers=layers)


HEADS_OF_128 = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6}
CPU_MODELS = {"qwen3-4B": qwen3_config, "llama3.1-8B": llama_config, "qwen3.5-4B": qwen3_5_config}
TARGET_CONFIGS: dict[str, Callable[..., PreTrainedConfig]] = {**CPU_MODELS, GEMMA4: gemma4_config}
"""Configurations by target. Called with a number of layers, or without arguments for all layers."""


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


def save_target(folder: Path, config: PreTrainedConfig, unquantized: bool = False, target: str = GEMMA4) -> None:
    """Write the target with one shard per layer, so that only one shard is in memory: quantized as for CUDA, or in
    bfloat16."""
    recipe = QuantRecipe([]) if unquantized else fitted_recipe("default", config)
    shards: dict[str, dict[str, torch.Size]] = {}
    for name, value in TARGETS[target].module().skeleton(config, max_seq_len=1024).model.state_dict().items():
        if unquantized and config.tie_word_embeddings and name == "lm_head.weight":
            continue
        parts = name.split(".")
        shard = parts[parts.index("layers") + 1] if "layers" in parts else parts[-2]
        shards.setdefault(shard, {})[name] = value.shape
    weight_map = {}
    for key, shapes in shards.items():
        weights = {name: random_weight(shape, recipe.get_config(name)) for name, shape in shapes.items()}
        tensors, metadata = (weights, None) if unquantized else flatten_tensor_state_dict(weights)
        save_file(tensors, folder / f"{key}.safetensors", metadata=metadata)
        weight_map |= dict.fromkeys(tensors, f"{key}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config.save_pretrained(folder)


def save_pair(place: Path, target: str, config: PreTrainedConfig, kind: str, unquantized: bool = True) -> None:
    """Write target and head into folders of ``place``, unless they are already there."""
    if not (place / TARGET / "config.json").is_file():
        (place / TARGET).mkdir(parents=True, exist_ok=True)
        save_target(place / TARGET, config, unquantized, target)
    if not (place / kind / "config.json").is_file():
        HEADS[kind](config).save(place / kind)


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


DRAFT_VOCABULARY, PEAGLE_LAYERS, DFLASH_TAPS = 32000, 4, 6
DFLASH = {"model_type": "qwen3", "hidden_act": "silu", "intermediate_size": 10752, "num_hidden_layers": 5}
DFLASH |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6}
DFLASH |= {"rope_theta": 1e6, "max_position_embeddings": 262144, "block_size": 16, "final_logit_softcapping": 30.0}
DFLASH |= {"layer_types": ["sliding_attention"] * 4 + ["full_attention"]}
DFLASH |= {"sliding_window": 2048, "use_sliding_window": True}
ASSISTANT_LAYERS = ["sliding_attention"] * 3 + ["full_attention"]


def layer_shapes(at: str, config: dict[str, Any], width: int, taken: int) -> Shapes:
    """Return the shapes of a decoder layer named ``at``, whose attention takes ``taken`` values for each token."""
    heads, keys = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    inner = config["intermediate_size"]
    attention = {"q_proj": (heads, taken), "k_proj": (keys, taken), "v_proj": (keys, taken), "o_proj": (width, heads)}
    mlp = {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
    norms = {name: (width,) for name in ("input_layernorm", "post_attention_layernorm")}
    parts = {f"self_attn.{name}": shape for name, shape in attention.items()}
    parts |= {f"mlp.{name}": shape for name, shape in mlp.items()} | norms
    return {f"{at}.{name}.weight": shape for name, shape in parts.items()}


def eagle3(config: PreTrainedConfig, taps: list[int] | None = None) -> PublishedHead:
    """Return an EAGLE-3 head with the target's widths, which takes the inputs of the layers ``taps``."""
    taps = taps or [1, config.num_hidden_layers // 2, config.num_hidden_layers - 1]
    width, known = config.hidden_size, config.to_dict()  # attributes vary by layer
    own = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    layer = {name: known[name] for name in own} | {"model_type": "llama", "num_hidden_layers": 1, "rms_norm_eps": 1e-6}
    layer |= {"max_position_embeddings": 131072, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    fields = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFT_VOCABULARY,
        "eagle_aux_hidden_state_layer_ids": taps,
        "norm_before_residual": True,
        "transformer_layer_config": layer,
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [proposal]},
    }
    shapes = {"embed_tokens.weight": (config.vocab_size, width), "lm_head.weight": (DRAFT_VOCABULARY, width)}
    shapes |= {
        "fc.weight": (width, len(taps) * width),
        "norm.weight": (width,),
        "layers.0.hidden_norm.weight": (width,),
    }
    shapes |= layer_shapes("layers.0", known, width, 2 * width)
    d2t = torch.zeros(DRAFT_VOCABULARY, dtype=torch.long)  # the first ids of the target's
    return PublishedHead(fields, shapes, {"d2t": d2t, "t2d": torch.arange(config.vocab_size) < DRAFT_VOCABULARY})


def peagle(config: PreTrainedConfig) -> PublishedHead:
    head, known = eagle3(config), config.to_dict()
    own = {"architectures": ["PEagleDraftModel"], "speculators_model_type": "peagle", "mask_token_id": 4}
    fields, shapes = head.fields | own, head.shapes | {MASK: (1, 1, head.shapes["fc.weight"][1])}
    fields["transformer_layer_config"]["num_hidden_layers"] = PEAGLE_LAYERS
    fields["speculators_config"]["algorithm"] = "peagle"
    for index in range(1, PEAGLE_LAYERS):
        shapes |= layer_shapes(f"layers.{index}", known, config.hidden_size, config.hidden_size)
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
    shapes: Shapes = {
        "fc.weight": (width, DFLASH_TAPS * width),
        "norm.weight": (width,),
        "hidden_norm.weight": (width,),
    }
    for at in (f"layers.{index}" for index in range(DFLASH["num_hidden_layers"])):
        shapes |= layer_shapes(at, DFLASH, width, width)
        shapes |= {f"{at}.self_attn.{name}_norm.weight": (DFLASH["head_dim"],) for name in "qk"}
    return PublishedHead(fields, shapes)


def assistant(config: Gemma4TextConfig) -> PublishedHead:
    full = config.per_layer_config[config.layer_types.index("full_attention")]
    keys = {"head_dim": full.head_dim, "num_key_value_heads": full.num_key_value_heads}
    changes = {"hidden_size": 1024, "intermediate_size": 8192, "layer_types": ASSISTANT_LAYERS}
    changes |= dict.fromkeys(("num_hidden_layers", "num_kv_shared_layers"), len(ASSISTANT_LAYERS))
    changes |= {"vocab_size_per_layer_input": 0, "hidden_size_per_layer_input": 0, "final_logit_softcapping": None}
    changes |= {"use_double_wide_mlp": False, "enable_moe_block": False}
    changes |= {"per_layer_config": {ASSISTANT_LAYERS.index("full_attention"): keys}}
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
