"""Reads the keys of a configuration that all variants of the block family have, and checks keys that are ignored.

z-lab's keys lie at the top or in ``dflash_config``. Other trainers write its dialect too, with keys of their own:
SpecForge, AngelSlim, ModelOpt, and JetSpec, whose ``causal_head`` says that a row of a block sees no later one. Source:
z-lab's ``dflash/model.py``; SpecForge's ``modeling/draft``; JetSpec's ``models/draft_head.py``; vLLM's
``configs/speculators/algos.py`` and SGLang's ``models/dflash.py``, which serve them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3.export.checkpoints.json_fields import count, nested

OWN, ANCHORS = "dflash_config", "num_anchors"
"""Keys by which dialects are recognized. AngelSlim also writes ``num_anchors``, inside z-lab's ``dflash_config``."""
TAPS = "target_layer_ids"
FACTORS = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
CAUSAL = ("is_causal", "causal", "causal_head")
"""Keys of z-lab's dialect that say whether a row of a block attends to no later row. The first one present counts."""
PROJECTOR = "projector_type"
ANCHOR, BONUS, SHIFT = "sample_from_anchor", "dspark_bonus_anchor", "shift_label"
"""Keys that say whether the anchor's row proposes."""
_HEEDED = ("block_size", "mask_token_id", TAPS, *CAUSAL, ANCHOR, BONUS)
_OF_TRAINING = (
    PROJECTOR,
    ANCHORS,
    "mask_token",
    "num_target_layers",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "confidence_head_alpha",
)
"""Keys that are ignored: settings of training, repetitions of other keys, and settings of a confidence head, which is
not used."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_swa": (False,),
    "swa_window_size": (),
    "attention_sink_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "is_neox_style": (True,),
    "rope_is_neox_style": (True,),
    "use_gemma_norm": (False,),
    "attention_value_scale": (1.0,),
    "attention_mode": ("gqa", "mha"),
    "logit_scale": (1.0,),
    "use_aux_hidden_state": (True,),
    "use_qk_norm": (True,),
}
"""Keys that some server or trainer uses and this package does not, with the values that have no effect."""


def check_neutral(config: Mapping[str, Any], dialect: str, fields: Mapping[str, Any], file: Path) -> None:
    """Raise ValueError for a key whose value changes the head's output in an unsupported way. ``fields`` are the keys
    of its layers."""
    own = nested(config, OWN, file)
    for key, harmless in _NEUTRAL.items():
        value = own.get(key, config.get(key, fields.get(key)))
        if value is not None and value not in harmless:
            raise ValueError(f"{file}: {key} is {value}, which is not supported in a head of the dialect {dialect}")
    width = own.get("target_hidden_size", fields.get("hidden_size"))
    if width != fields.get("hidden_size"):
        raise ValueError(f"{file}: target_hidden_size is {width} and differs from hidden_size, which is not supported")
    for key in ("rope_scaling", "rope_parameters"):
        if "rope_dim" in nested(fields, key, file):
            raise ValueError(f"{file}: {key} has a rope_dim, but only RoPE over whole heads is supported")


def keys_of_z_lab(config: Mapping[str, Any], kind: str, sizes: tuple[str, ...], file: Path) -> dict[str, Any]:
    """Return the keys of a file of z-lab's dialect. ``sizes`` are the keys of the variant. Raises ValueError for a key
    with two values, and for an unknown key, since it may change the head's output."""
    own = nested(config, OWN, file)
    heeded = (*_HEEDED, *FACTORS, *sizes)
    for key, value in own.items():
        if key not in (*heeded, *_OF_TRAINING, *_NEUTRAL, "target_hidden_size"):
            raise ValueError(f"{file}: {OWN} has {key}, a key that is not known for a {kind}: this head is not read")
        if key in config and config[key] != value and key in heeded:
            raise ValueError(f"{file}: {key} is {config[key]}, but {value} in {OWN}: correct one of them")
    if any((file.parent / name).exists() for name in ("mask_embedding.pt", "mask_embedding.safetensors")):
        raise ValueError(f"{file.parent} has an embedding of its mask token in a file of its own, which is not read")
    return {key: config[key] for key in heeded if key in config} | own


def required(said: Mapping[str, Any], key: str, file: Path, least: int) -> int:
    """Return the value of a count that every head must have. Raises ValueError if the key is missing."""
    value = count(said, key, None, file, least=least)
    if value is None:
        raise ValueError(f"{file} has no {key}, which every head of the DFlash family has: add it")
    return value
