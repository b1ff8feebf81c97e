"""Refuses settings of a draft checkpoint that its trainer's code ignores, because other systems would apply them and
compute another head. A dialect lists the keys that its trainer uses. If files of other systems look the same, the
dialect also lists the tensors and the kinds of RoPE (``dialects/dialect.py``). For any other setting an error asks the
user to decide.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3.export.draft.dialects import Dialect
from eagle3.export.draft.dialects.dialect import rotary_part

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
"""The keys of the variants that ``DraftHead`` supports, each with the values that have no effect."""
PART = "partial_rotary_factor"
"""The key of a partial RoPE, which may be at the top level or among the RoPE's keys."""
WINDOWS = "layer_types"
"""The key of the layers' types; it has an effect if a type is not ``full_attention``."""
DERIVED = "use_sliding_window"
"""A key that has an effect if the class of ``model_type`` derives sliding layers from it."""


def refuse_unheeded_variants(
    dialect: Dialect,
    kind: str,
    file: Path,
    variants: Mapping[str, Any],
    tensors: Collection[str],
    overridden: Collection[str] = (),
    windows: Sequence[int] = (),
) -> None:
    """Raise ValueError for the first key or tensor that the trainer of ``dialect`` ignores in a head of ``kind``.

    Args:
        variants: the keys of the configuration, including those of ``eagle_config`` and of the layers
        tensors: names of the tensors in ``DraftHead``
        overridden: keys that a flag of the export overrides
        windows: the sliding window of each layer in the configuration, 0 for none
    """
    heeds, trainer = dialect.heeds(kind), dialect.trainer
    for key, value in said(variants, windows).items():
        if heeds is not None and key not in heeds and key not in overridden:
            raise ValueError(_asked(f"{file}: {key} is {_shown(value)}", trainer, "take it out"))
    ropes = dialect.ropes(kind)
    for key, value in rope_kinds(variants).items():
        if ropes is not None and value not in ropes:
            raise ValueError(_asked(f"{file}: {key} has the type {_shown(value)}", trainer, "take it out"))
    places = dialect.places(kind)
    for name in sorted(tensors):
        if places is not None and not re.fullmatch(places, name):
            raise ValueError(_asked(f"{file.parent} has {name}", trainer, "take the tensor out of the file"))


def doubts_of_taps(dialect: Dialect, file: Path, ids: tuple[int, ...] | None, ids_are: str) -> list[str]:
    """Return a warning if a file names taps although the trainer of ``dialect`` always uses the same ones. ``ids_are``
    is "input" or "output"."""
    if not ids or dialect.names_taps:
        return []
    return [
        f"{file} names taps {','.join(map(str, ids))}, taken as {ids_are}s of layers, but {dialect.trainer} always "
        "trains with the inputs of 2, n//2, n-3: if hardly anything is accepted, type --aux-layers with those"
    ]


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


def rope_kinds(variants: Mapping[str, Any]) -> dict[str, Any]:
    """Return the type of RoPE that each key of the configuration describes."""
    given = {key: variants.get(key) for key in ("rope_scaling", "rope_parameters")}
    ropes = {key: value for key, value in given.items() if isinstance(value, dict)}
    return {key: rope.get("rope_type", rope.get("type", "default")) for key, rope in ropes.items()}


def _asked(fact: str, trainer: str, remove: str) -> str:
    return (
        f"{fact}, which {trainer}'s code ignores: {remove} if that trained the head, else type --draft-dialect sglang"
    )


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}..."
