"""Finds the fields of a configuration that differ from its class's defaults."""

from typing import TYPE_CHECKING, Any

from eagle3.targets.text_part import fields_of, like

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_SIZES_AND_BOOKKEEPING = {
    "architectures", "attention_dropout", "bos_token_id", "chunk_size_feed_forward", "dtype", "embd_pdrop",
    "eos_token_id", "head_dim", "hidden_size", "id2label", "initializer_range", "intermediate_size", "label2id",
    "max_position_embeddings", "model_type", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "output_attentions", "output_hidden_states", "pad_token_id", "per_layer_config", "resid_pdrop", "return_dict",
    "sep_token_id", "torch_dtype", "transformers_version", "use_cache", "vocab_size", "vocab_size_per_layer_input",
    "_name_or_path",
}  # fmt: skip


def unusual_fields(config: "PreTrainedConfig") -> dict[str, Any]:
    """Return each field that differs from its class's default, by dotted name. Sizes are left out."""
    try:
        usual = _flat(type(config)().to_dict())
    except Exception:  # a class whose fields have no defaults
        usual = {}
    return {name: value for name, value in all_fields(config).items() if value != usual.get(name)}


def all_fields(config: "PreTrainedConfig") -> dict[str, Any]:
    """Return each field by dotted name, without sizes."""
    return _flat(fields_of(config))


def reset(config: "PreTrainedConfig", name: str) -> "PreTrainedConfig":
    """Return a copy of the configuration in which the field of this dotted name has its class's default. If the class
    has no default, the copy lacks the field.
    """
    values, usual = fields_of(config), type(config)().to_dict()
    *path, last = name.split(".")
    owner, default = values, usual
    for part in path:
        owner, default = owner[part], default.get(part) or {}
    if last in default:
        owner[last] = default[last]
    else:
        owner.pop(last)
    return like(type(config).from_dict(values), config)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if not prefix and name in _SIZES_AND_BOOKKEEPING:
            continue
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
