"""Reads sizes and rotary parameters of a draft head's decoder layers, from nested or flat keys, as transformers does.

Those of Gemma 4's layers of full attention are read as DeepSeek's DeepSpec writes them, under the target's own keys
with two sizes of heads and two RoPEs. Source: deepseek-ai/DeepSpec, ``deepspec/modeling/eagle3/gemma4`` and
``deepspec/modeling/dspark/gemma4``.
"""

import json
from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from eagle3.export.checkpoints.json_fields import Fields
from eagle3.export.checkpoints.source import TensorHeader
from eagle3.export.checkpoints.target_config import check_rope

if TYPE_CHECKING:
    from transformers import LlamaConfig

FAMILIES = ("llama", "qwen2", "qwen3")
"""Prefixes of model types with Llama's layers. Whether queries and keys have biases and norms follows from the
tensors."""
_SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "vocab_size", "num_hidden_layers"),
)
_OF_A_CLASS = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "rms_norm_eps")
"""Sizes whose default values differ between transformers' classes."""
_SCALES = ("scale_emb", "scale_depth", "embedding_multiplier", "residual_multiplier", "attention_multiplier")
"""Keys of factors that Llama's layer does not have."""
_READ: tuple[str, ...] = (
    *_SIZES,
    "hidden_act",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "layer_types",
)
_READ += ("partial_rotary_factor", "sliding_window", "use_sliding_window", "max_window_layers")


def layer_config(fields: Fields, headers: Mapping[str, TensorHeader], any_type: bool = False) -> "LlamaConfig":
    """Return transformers' configuration of the decoder layers. With ``any_type``, a ``model_type`` outside
    ``FAMILIES`` is allowed, and the layers are still read as Llama's.

    The attention heads' size comes from ``headers`` (by ``Head``'s names), because SafeAILab ignores ``head_dim``
    and uses hidden_size / heads. Raises ValueError, which names the key, if transformers cannot build such a layer.
    """
    from transformers import AutoConfig, LlamaConfig
    from transformers.activations import ACT2FN

    file, model_type = fields.file, fields.get("model_type", "llama")
    if not isinstance(model_type, str) or not (model_type.startswith(FAMILIES) or any_type):
        raise ValueError(f"{file}: a draft layer of type {model_type!r}, but {', '.join(FAMILIES)} are supported")
    for key in () if model_type.startswith(FAMILIES) else _OF_A_CLASS:
        if fields.get(key) is None:
            raise ValueError(
                f"{file} has no {key}, and its model_type is {model_type}, whose default may not be the head's: add it"
            )
    for key in () if model_type.startswith(FAMILIES) else _SCALES:
        if fields.get(key) not in (None, 1):
            raise ValueError(
                f"{file}: {key} is {json.dumps(fields[key])} and model_type {model_type}, but the layer is read as "
                f"Llama's, which has no such factor: take {key} out if the head was trained without it"
            )
    for key in _SIZES:
        fields.count(key)
    fields.number("rms_norm_eps", most=1)
    fields.number("partial_rotary_factor", most=1)
    activation = fields.get("hidden_act", "silu")
    if not isinstance(activation, str) or activation not in ACT2FN:
        raise ValueError(
            f"{file}: hidden_act is {json.dumps(activation)}, which transformers does not know: correct it"
        )
    wanted = {key: deepcopy(fields[key]) for key in _READ if key in fields}
    if model_type == "llama4_text":  # its dense layers have another width than its experts
        wanted["intermediate_size"] = fields.get("intermediate_size_mlp", fields.get("intermediate_size"))
    for key in ("rope_scaling", "rope_parameters"):
        fields.nested(key)
        _text_alone(wanted.get(key))
    heads = wanted.get("num_attention_heads")
    if heads and wanted.get("num_key_value_heads") is None:
        wanted["num_key_value_heads"] = heads
    try:
        # transformers requires a number of heads that divides hidden_size, although head_dim may be independent of it.
        one = {"num_attention_heads": 1} if heads else {}
        read = AutoConfig.for_model(model_type if model_type in FAMILIES else "llama", **wanted | one)
        read.num_attention_heads = heads or read.num_attention_heads
        config = LlamaConfig(
            **{key: getattr(read, key, None) for key in (*_SIZES[:-1], "hidden_act", "rms_norm_eps")}
            | {"rope_parameters": deepcopy(read.rope_parameters), "head_dim": _head_dim(read, headers)}
            | {"num_attention_heads": 1},
            num_hidden_layers=wanted.get("num_hidden_layers") or 1,
        )
        config.num_attention_heads = read.num_attention_heads
    except Exception as error:  # transformers validates field by field, with errors of its own kinds
        cause = error.__cause__ if isinstance(error.__cause__, TypeError | ValueError) else error
        reason = " ".join(str(cause).partition(" Errors: ")[0].split())
        raise ValueError(f"{file}: transformers cannot build a decoder layer from it ({reason}): correct it") from error
    config.layer_types = getattr(read, "layer_types", None)
    config.sliding_window = getattr(read, "sliding_window", None)
    check_rope(config, file)
    return config


def _text_alone(rope: dict[str, Any] | None) -> None:
    """Remove the sections of a multimodal RoPE, since in a text all sections have the same positions."""
    if rope and "mrope_section" in rope:
        for key in ("mrope_section", "mrope_interleaved", "type", "rope_type"):
            kind = rope.pop(key, None)
            if key in ("type", "rope_type") and kind not in (None, "mrope"):
                rope[key] = kind
        rope.setdefault("rope_type", rope.get("type", "default"))


def _head_dim(config: "LlamaConfig", headers: Mapping[str, TensorHeader]) -> int:
    rows, heads = headers["layers.0.self_attn.q_proj.weight"].shape[0], config.num_attention_heads
    if rows % heads:
        raise ValueError(f"q_proj has {rows} rows, no multiple of num_attention_heads {heads}")
    return rows // heads


def windows(fields: Fields, config: "LlamaConfig", layers: int) -> tuple[int, ...]:
    """Return the sliding window of each draft layer's own attention in tokens, 0 for full attention.

    As in speculators and vLLM, ``layer_types`` decides: without a sliding layer, ``sliding_window`` is not used.
    """
    kinds, window = config.layer_types or ["full_attention"] * layers, config.sliding_window
    if len(kinds) < layers:
        raise ValueError(f"{fields.file}: layer_types has {len(kinds)} entries for {layers} layers: correct it")
    for index, kind in enumerate(kinds[:layers]):
        whole = isinstance(window, int) and not isinstance(window, bool) and window >= 1
        if kind != "full_attention" and not (kind == "sliding_attention" and whole):
            raise ValueError(
                f"{fields.file}: layer_types[{index}] is {kind!r} with sliding_window {window!r}, but a draft layer "
                "has full_attention, or sliding_attention with a window in tokens"
            )
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds[:layers])


def one_rope(fields: Fields, takes: str | None) -> Fields:
    """Return the keys of a head's layers, with one RoPE for all layers.

    A target such as Gemma 4 has a RoPE for each type of layer, and a trainer may have copied that into the head's file.
    ``takes`` is the type of layer whose entry the trainer's code uses, None if that code has no such entries. In that
    case it raises ValueError unless all entries are equal.
    """
    flat = dict[str, Any]()
    for key in ("rope_scaling", "rope_parameters"):
        rope = fields.get(key)
        entries = (
            {name: each for name, each in rope.items() if isinstance(each, dict)} if isinstance(rope, dict) else {}
        )
        if not entries:
            continue
        if takes in entries:
            flat[key] = entries[takes]
        elif len({str(sorted(each.items())) for each in entries.values()}) == 1:
            flat[key] = next(iter(entries.values()))
        else:
            shown = "; ".join(f"{name}: {_shown(each)}" for name, each in entries.items())
            raise ValueError(
                f"{fields.file}: {key} has a RoPE for each type of layer ({shown}), but a draft head has one, and the "
                f"file does not say which it was trained with: leave that one in {key}, without the name of a type"
            )
    return fields.changed(flat)


def _shown(rope: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in rope.items())


_KEPT = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings", "vocab_size"),
    *("num_hidden_layers", "rms_norm_eps", "layer_types"),
)
_FULL = "full_attention"


def names_gemma4(config: Mapping[str, Any]) -> bool:
    """Return True for a DeepSpec head with Gemma 4's layers."""
    return any(str(name).startswith("Gemma4") for name in config.get("architectures") or [])


def full_attention_fields(config: Fields) -> Fields:
    """Return the sizes of these layers under the keys that other families use. Raises ValueError for experts and
    per-layer inputs, which DeepSpec's code does not compute."""
    experts = config.boolean("enable_moe_block", False)
    by_layer = config.count("hidden_size_per_layer_input", 0, least=0)
    if experts or by_layer:
        raise ValueError(
            f"{config.file}: layers with experts or with per-layer inputs, which DeepSpec's code does not compute"
        )
    heads = "num_global_key_value_heads" if config.boolean("attention_k_eq_v", False) else "num_key_value_heads"
    rope = config.nested("rope_parameters").nested(_FULL).content
    own = {"head_dim": config.get("global_head_dim"), "num_key_value_heads": config.get(heads), "rope_parameters": rope}
    own |= {"hidden_act": config.get("hidden_activation", "gelu_pytorch_tanh")}
    return Fields(config.file, {key: config[key] for key in _KEPT if key in config} | own)
