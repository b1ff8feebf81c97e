"""Reads a target's configuration and special ids. A fault in the files gives one line that names the file, the field
and its value. The meaning of fields is left to transformers, and to the twin check.

Refuses rotary tables that depend on more than positions, since a cached key keeps its rotation.
"""

import json
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.export.checkpoints.json_fields import Fields, read_object
from eagle3.export.checkpoints.safetensors_folder import ADAPTER_CONFIG, MERGE_ADAPTER, foreign_weights
from eagle3.targets import TARGETS, spec_for
from eagle3.targets.spec import CONVOLUTION

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

SIZES = (
    *("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings", "sliding_window"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("num_global_key_value_heads", "global_head_dim"),  # fields of Gemma 4
)
NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
MOST, MOST_LAYERS = 2**31 - 1, 1000  # larger numbers exhaust memory when the skeleton is built
BY_LAYER = ("head_dim", "num_key_value_heads")
"""Fields that single layers may override, as the full layers of Gemma 4 do."""
SHORT = 16  # the context length, in tokens, of a model that is built only to test that it can be constructed
DRAFT_FIELDS = ("transformer_layer_config", "speculators_model_type", "draft_vocab_size")
"""Fields of draft heads' configurations in some dialects, which no target's configuration has."""


def read_target_config(checkpoint: Path, name: str) -> "PreTrainedConfig":
    """Return transformers' text configuration of the target ``name``.

    Raises FileNotFoundError for a folder without a configuration, and ValueError for a file that describes no model, or
    a model that the target's loader does not read.
    """
    from transformers import AutoConfig

    from eagle3.targets.text_part import text_config_of

    file = checkpoint / "config.json"
    if (checkpoint / ADAPTER_CONFIG).is_file():
        raise ValueError(
            f"{checkpoint} has a LoRA adapter ({ADAPTER_CONFIG}), which transformers would add to its base: "
            f"{MERGE_ADAPTER}; remove {ADAPTER_CONFIG} if the weights here are merged already"
        )
    if not file.is_file():
        cause = foreign_weights(checkpoint) or "--checkpoint takes a Hugging Face folder"
        raise FileNotFoundError(f"{file} is missing: {cause}")
    fields = read_object(file)
    _refuse_what_is_no_target(file, fields)
    for part in _parts(fields):
        _check_sizes(file, part)
    try:
        read = AutoConfig.from_pretrained(checkpoint, local_files_only=True, trust_remote_code=False)
        text_config = text_config_of(read)
    except Exception as error:
        raise _refusal(file, fields, error, _config_of) from error
    _tie_as_the_whole(read, text_config)
    for stored in ("quantization_config", "compression_config"):  # the ``Source`` reads the storage format
        text_config.__dict__.pop(stored, None)
    spec = spec_for(name, text_config.model_type)
    if spec.model_types and text_config.model_type not in spec.model_types:
        fitting = [key for key, other in TARGETS.items() if text_config.model_type in other.model_types]
        advice = f"type --target-model {' or '.join([*fitting, 'auto'])}"
        raise ValueError(
            f"{checkpoint} is a {text_config.model_type}, but {name} is a {' or '.join(spec.model_types)}: {advice}"
        )
    for name in NEEDED:
        if not text_config.per_layer_attributes and getattr(text_config, name, None) is None:
            raise ValueError(
                f"{file} ({text_config.model_type}) has no {name}, which every supported decoder has: "
                "eagle3-export --list-targets lists what is supported"
            )
    _check_layers(file, text_config)
    _check_ropes(file, text_config)
    try:
        model = spec.module().skeleton(text_config, SHORT).model
    except ValueError as error:
        raise ValueError(f"{file} ({text_config.model_type}): {error}") from error
    except Exception as error:
        raise _refusal(
            file, fields, error, lambda rest: spec.module().skeleton(text_config_of(_config_of(rest)), SHORT)
        ) from error
    check_static(model, text_config, file)
    return text_config


def special_ids(checkpoint: Path, target_config: "PreTrainedConfig") -> tuple[int, tuple[int, ...]]:
    """Return the bos token's id (-1 if there is none) and the stop tokens, as transformers' ``generate`` takes them.

    Raises ValueError for an id that is not a whole number, and for a stop token in a file that is not in the
    vocabulary, since no text would ever stop.
    """
    eos, where = None, checkpoint / "config.json"
    for name in ("generation_config.json", "config.json"):  # a multimodal config.json has the ids at its top level
        if eos is None and (checkpoint / name).is_file():
            eos, where = read_object(checkpoint / name).get("eos_token_id"), checkpoint / name
    written = eos is not None  # False for a class's default, which is meant for another vocabulary
    eos = getattr(target_config, "eos_token_id", None) if eos is None else eos  # Qwen3-VL's text part lacks the field
    eos_ids = tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (eos,)
    bos = getattr(target_config, "bos_token_id", None)
    ids = [("eos_token_id", where, id) for id in eos_ids]
    ids += [] if bos is None else [("bos_token_id", checkpoint / "config.json", bos)]
    for field, file, id in ids:
        if not _whole(id) or not 0 <= id <= MOST:
            raise ValueError(f"{file}: {field} has {_shown(id)}, which is no token id: write a whole number from 0 on")
        if written and field == "eos_token_id" and id >= target_config.vocab_size:
            raise ValueError(
                f"{file}: {field} has {id}, but the vocabulary of config.json has {target_config.vocab_size} tokens: "
                "nothing would end a text: write the id of the model's end token, or copy the file again"
            )
    return (-1 if bos is None else bos), eos_ids


def _refuse_what_is_no_target(file: Path, fields: dict[str, Any]) -> None:
    from transformers import CONFIG_MAPPING, __version__

    own = [field for field in DRAFT_FIELDS if field in fields]
    if own:
        raise ValueError(
            f"{file} is the configuration of a draft head (it has {own[0]}): type --draft {file.parent}, and "
            "--checkpoint with the folder of its target"
        )
    kind = fields.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise ValueError(f"{file}: model_type is {_shown(kind)}, so it describes no model: copy config.json again")
    if kind in CONFIG_MAPPING:
        return
    if "auto_map" in fields:
        raise ValueError(
            f"{file}: model_type {kind} comes with Python code of its own (auto_map), which is never run: "
            "eagle3-export --list-targets lists what is supported"
        )
    raise ValueError(
        f"{file}: transformers {__version__} knows no model_type {kind}: eagle3-export --list-targets lists what is "
        "supported"
    )


def _parts(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the configuration, its text part, and the overrides of single layers."""
    for part in (fields, fields.get("text_config")):
        if isinstance(part, dict):
            yield part
            overrides = part.get("per_layer_config")
            yield from (each for each in (overrides.values() if isinstance(overrides, dict) else ()) if each)


def _check_sizes(file: Path, part: object, unused: str | None = "sliding_window") -> None:
    """Check that sizes are whole numbers above 0. The size ``unused`` may be 0, since no layer uses it: Qwen2-MoE's
    class writes 0 for a sliding window."""
    if not isinstance(part, dict):
        return
    for name in SIZES:
        value, most = part.get(name), MOST_LAYERS if name == "num_hidden_layers" else MOST
        if value == 0 and _whole(value) and name == unused:
            continue
        if value is not None and not (_whole(value) and 1 <= value <= most):
            raise ValueError(
                f"{file}: {name} is {_shown(value)}, but must be a whole number from 1 to {most}: correct it, or copy "
                "config.json again"
            )


def _config_of(fields: dict[str, Any]) -> "PreTrainedConfig":
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[fields["model_type"]].from_dict(deepcopy(fields))


def _refusal(
    file: Path, fields: dict[str, Any], error: Exception, build: Callable[[dict[str, Any]], Any]
) -> ValueError:
    """Return an error that replaces transformers' own. It names the first field without which ``build`` succeeds."""
    cause = error.__cause__ if isinstance(error.__cause__, (TypeError, ValueError)) else error
    reason = " ".join(str(cause).partition(" Errors: ")[0].split()).rstrip(".") or type(cause).__name__
    reason = re.sub(r"<class '(\w+)'>", r"\1", reason) + (
        " is missing or unknown" if isinstance(cause, KeyError) else ""
    )
    fact = "transformers cannot build a model from it"
    for name in fields:
        try:
            build({key: value for key, value in fields.items() if key != name})
        except Exception:  # any error means that this field is not the only cause
            continue
        fact = f"{name} is {_shown(fields[name])}, from which transformers cannot build a model"
        break
    return ValueError(f"{file}: {fact} ({reason}): correct it, or copy the file again")


def _tie_as_the_whole(config: "PreTrainedConfig", text_config: "PreTrainedConfig") -> None:
    """Tie the head if the whole model does: most multimodal configurations say at their top level whether it is
    tied."""
    if config is text_config:
        return
    from eagle3.targets.wrapper import wrapper_of

    wrapper = wrapper_of(config)
    if wrapper is not None and wrapper.ties is not None:
        text_config.tie_word_embeddings = wrapper.ties


def _check_layers(file: Path, config: "PreTrainedConfig") -> None:
    """Check the sizes of each layer again, with the class's defaults filled in."""
    strange = sorted((config.per_layer_attributes or set()).difference(BY_LAYER))
    if strange:
        raise ValueError(
            f"{file}: single layers have a {strange[0]} of their own (per_layer_config), but only "
            f"{' and '.join(BY_LAYER)} may differ between layers"
        )
    kinds = getattr(config, "layer_types", None)
    window_is_used = not kinds or "sliding_attention" in kinds  # without layer_types every layer uses the window
    for layer in config.per_layer_config:
        unused = None if window_is_used else "sliding_window"
        _check_sizes(file, {name: getattr(layer, name, None) for name in SIZES}, unused)
        heads = layer.num_attention_heads
        shared = getattr(layer, "num_key_value_heads", None) or heads
        if heads % shared:
            raise ValueError(
                f"{file}: num_attention_heads {heads} is no multiple of num_key_value_heads {shared}: "
                "correct one of them"
            )


def _check_ropes(file: Path, config: "PreTrainedConfig") -> None:
    """Check that there is one rope for all layers or one for each kind of layer, and that each can be computed."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict):
        return
    kinds = dict.fromkeys(getattr(config, "layer_types", None) or ())
    for kind in () if "rope_type" in rope else kinds:
        if kind == CONVOLUTION:  # convolutions have no rope
            continue
        if not isinstance(rope.get(kind), dict):
            raise ValueError(f"{file}: rope_parameters has no entry for {kind}: correct it, or copy config.json again")
    check_rope(config, file, static=False)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    """Return the value as JSON, cut to 60 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}..."


_BY_LENGTH = {
    "dynamic": "its frequencies change with the length of the text",
    "longrope": "it has one table for short texts and another for long ones",
}


def check_rope(config: "PreTrainedConfig", file: Path, static: bool = True) -> None:
    """Raise ValueError for a transformers configuration with a rope that transformers does not know, and, if it must be
    ``static``, with one whose table depends on the length of the text. Errors name ``file``."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = getattr(config, "rope_parameters", None) or {}
    flat = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    for each in flat:
        kind = each.get("rope_type", "default")
        if not isinstance(kind, str) or kind not in ("default", *ROPE_INIT_FUNCTIONS):
            raise ValueError(f"{file}: rope_type is {json.dumps(kind)}, which transformers does not know: correct it")
        if each.get("rope_theta", 1.0) is None:
            raise ValueError(f"{file}: rope_theta is null, but must be a number above 0: correct it")
        fields = Fields(file, each)
        fields.number("rope_theta")
        fields.number("partial_rotary_factor", most=1)
        if static:
            _refuse_by_length(kind, file)


def check_static(model: "nn.Module", config: "PreTrainedConfig", file: Path) -> None:
    """Raise ValueError for a model whose rotary table depends on the length of the text. transformers' rotary modules
    decide that by their own ``rope_type`` (``dynamic_rope_update`` there), which may differ from the configuration's:
    HunYuan's "dynamic" with a fixed ``alpha`` is static."""
    found: list[Any] = [module.rope_type for module in model.modules() if hasattr(module, "rope_type")]
    if not found:
        check_rope(config, file)
    for kind in (kind for each in found for kind in (each.values() if isinstance(each, dict) else (each,))):
        _refuse_by_length(kind, file)


def _refuse_by_length(kind: str, file: Path) -> None:
    if kind in _BY_LENGTH:
        raise ValueError(
            f"{file}: rope_type {kind} is not supported: {_BY_LENGTH[kind]}, but a cached key keeps the rotation that "
            "it was given"
        )
