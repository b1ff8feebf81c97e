"""Checks the settings of an EAGLE head: that its trainer's code heeds them, and that its tensors agree with them.

A setting that the trainer's code ignores would make other systems compute another head. A dialect names the keys that
its trainer uses and, if files of other systems look the same, the tensors and the types of RoPE. For any other setting
an error asks the user to decide.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.export.checkpoints.json_fields import Fields
from eagle3.export.checkpoints.source import TensorHeader
from eagle3.export.draft.kinds import EAGLE
from eagle3.export.draft.kinds.eagle.rope_reading import rotary_part
from eagle3.export.draft.kinds.eagle.tensor_names import layer_count

SILENT: dict[str, tuple[Any, ...]] = {
    "norm_before_residual": (False,),
    "norm_before_fc": (False,),
    "fc_norm": (False,),
    "use_aux_norm": (False,),
    "norm_output": (False,),
    "return_hidden_post_norm": (False,),
    "use_aux_hidden_state": (True,),
    "use_last_layernorm": (True,),
    "use_input_layernorm_in_first_layer": (True,),
}
"""The keys of the variants that ``Head`` supports, each with the values that have no effect."""
PART = "partial_rotary_factor"
"""The key of a partial RoPE, which may be at the top level or among the RoPE's keys."""
WINDOWS = "layer_types"
"""The key of the layers' types; it has an effect if a type is not ``full_attention``."""
DERIVED = "use_sliding_window"
"""A key that has an effect if the class of ``model_type`` derives sliding layers from it."""
_TAKE_OUT = "if that trained the head, else type --draft-dialect sglang"
Headers = Mapping[str, TensorHeader]


@dataclass(frozen=True)
class Heeded:
    """The settings that a trainer's code uses for a kind of head; None if that is not known."""

    trainer: str = ""
    keys: Collection[str] | None = None
    """The keys of ``SILENT`` that it uses."""
    ropes: Collection[str] | None = None
    """The types of RoPE."""
    tensors: str | None = None
    """A pattern of the tensors, by ``Head``'s names."""


def refuse_ignored(fields: Fields, trainer: str, said: Mapping[str, Any]) -> None:
    """Raise ValueError for keys that the trainer's code ignores and other systems use. ``said`` maps keys to values;
    None means that the value is what the trainer's code assumes."""
    for key, value in said.items():
        if value is not None:
            raise ValueError(
                f"{fields.file}: {key} is {value}, which {trainer}'s code ignores: take it out {_TAKE_OUT}"
            )


def refuse_unheeded(
    heeded: Heeded,
    variants: Fields,
    tensors: Collection[str],
    overridden: Collection[str] = (),
    windows: Sequence[int] = (),
) -> None:
    """Raise ValueError for the first key or tensor that the trainer's code ignores.

    Args:
        variants: the keys of the configuration, including those of ``eagle_config`` and of the layers
        tensors: names of the tensors in ``Head``
        overridden: keys that a flag of the export overrides
        windows: the sliding window of each layer in the configuration, 0 for none
    """
    file, ignores = variants.file, f"which {heeded.trainer}'s code ignores"
    for key, value in said(variants, windows).items() if heeded.keys is not None else ():
        if key not in heeded.keys and key not in overridden:  # type: ignore[operator]
            raise ValueError(f"{file}: {key} is {_shown(value)}, {ignores}: take it out {_TAKE_OUT}")
    for key in ("rope_scaling", "rope_parameters") if heeded.ropes is not None else ():
        rope = variants.get(key)
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else None
        if kind is not None and kind not in heeded.ropes:  # type: ignore[operator]
            raise ValueError(f"{file}: {key} has the type {_shown(kind)}, {ignores}: take it out {_TAKE_OUT}")
    for name in sorted(tensors):
        if heeded.tensors is not None and not re.fullmatch(heeded.tensors, name):
            raise ValueError(f"{file.parent} has {name}, {ignores}: take the tensor out of the file {_TAKE_OUT}")


def said(variants: Mapping[str, Any], windows: Sequence[int] = ()) -> dict[str, Any]:
    """Return the keys of ``variants`` that change the head, with their values. ``windows`` are the sliding windows of
    its layers."""
    found = {key: variants[key] for key, silent in SILENT.items() if variants.get(key) not in (None, *silent)}
    kinds = variants.get(WINDOWS)
    if isinstance(kinds, list) and set(map(str, kinds)) != {"full_attention"} and kinds:
        found[WINDOWS] = kinds
    elif any(windows):
        found[DERIVED] = variants.get(DERIVED)
    if (part := rotary_part(variants)) is not None:
        found[PART] = part
    return found


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}..."


def refuse_variants(variants: Fields) -> None:
    """Raise ValueError for variants of EAGLE heads that are not supported."""
    file = variants.file
    for key, what in (
        ("use_mtp_layernorm", "applies norms to embedding and state as MTP layers do"),
        ("eh_proj_before_attn", "projects embedding and state before attention"),
    ):
        if variants.boolean(key, False):
            raise ValueError(f"{file}: {key} is true: a head that {what} is not supported")
    if variants.count("parallel_draft_step", 1) > 1:
        raise ValueError(
            f"{file}: parallel_draft_step is {variants['parallel_draft_step']}: heads with Medusa's parallel layers "
            "are not supported"
        )
    variants.number("logit_scale")  # a scale above 0 does not change greedy proposals
    if variants.boolean("norm_before_fc", False) and variants.boolean("fc_norm", False):
        raise ValueError(f"{file}: norm_before_fc and fc_norm are both true, but exclude each other: correct it")


def check_gemma4(folder: Path, gemma4: bool, own: Headers) -> None:
    """Check that the head has all tensors that only Gemma 4's layers have, or, if ``gemma4`` is False, none of them."""
    for name in ("pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight", "layer_scalar"):
        if gemma4 != (f"layers.0.{name}" in own):
            raise ValueError(
                f"{folder} {'lacks' if gemma4 else 'has'} layers.0.{name}: EAGLE-3 heads with Gemma 4's layers are "
                "read as DeepSpec saves them (Gemma4Eagle3Model)"
            )


def check_presence(kind: str, variants: Fields, own: Headers, final: bool, warnings: list[str]) -> None:
    """Check that the tensors include the norms and biases that the configuration implies, and none that it excludes."""
    folder, layers = variants.file.parent, range(layer_count(own))
    implied = {f"layers.{index}.post_attention_layernorm.weight": True for index in layers}
    implied |= {"input_norm.weight": variants.boolean("norm_before_fc", False) and not final}
    implied |= {"embed_norm.weight": False} if kind != EAGLE else {}
    if kind != EAGLE:
        implied |= {
            "layers.0.input_layernorm.weight": variants.boolean("use_input_layernorm_in_first_layer", True),
            "norm.weight": variants.boolean("use_last_layernorm", True),
        }
        implied |= {} if final else {"layers.0.hidden_norm.weight": True}
        if final and "layers.0.hidden_norm.weight" not in own:
            warnings.append(f"{folder} has no hidden_norm: the target's final state is taken without a norm")
    for name, wanted in implied.items():
        if wanted != (name in own):
            raise ValueError(
                f"{folder} {'lacks' if wanted else 'has'} {name}, which its config.json "
                f"{'implies' if wanted else 'has no place for'}"
            )
    _check_fc_norm(variants, own, final)
    for key, name in (("attention_bias", "self_attn.q_proj"), ("mlp_bias", "mlp.gate_proj")):
        if variants.boolean(key, False) and f"layers.0.{name}.bias" not in own:
            raise ValueError(f"{folder} lacks layers.0.{name}.bias, which its config.json implies ({key} is true)")


def _check_fc_norm(variants: Fields, own: Headers, final: bool) -> None:
    folder, fc_norm = variants.file.parent, any(name.startswith("fc_norm.") for name in own)
    stated = variants.boolean("fc_norm")
    if not stated:  # SGLang's older name of the key
        stated = variants.boolean("use_aux_norm", fc_norm and stated is None)
    if stated != fc_norm:
        raise ValueError(f"{folder}: fc_norm is {stated} in config.json, but the tensors differ")
    normed = sum(own[name].shape[0] for name in own if name.startswith("fc_norm."))
    fused = own["fc.weight"].shape[1] if stated and not final else normed
    if normed != fused:
        raise ValueError(
            f"{folder}: the norms of fc_norm have {normed} features together, but fc takes {fused}: is a shard missing?"
        )
