"""Reads the ids of the taps from a head's file, under any known key and at any place. A wrong tap causes no error, so a
file that names two different sets is refused.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3.export.checkpoints.json_fields import layer_ids, nested
from eagle3.export.draft.dialects import Dialect
from eagle3.export.draft.dialects.angelslim import AUX_OUTPUTS

AUX_IDS = "eagle_aux_hidden_state_layer_ids"
_MEANINGS = {AUX_OUTPUTS: "output", "target_layer_ids": "output", "aux_hidden_state_layer_ids": "input"}
"""Maps other keys of the taps to the meaning of their ids in the code that writes them: the keys of AngelSlim, of z-lab
and DeepSpec, and of DFlash heads in speculators."""


def named_taps(
    config: Mapping[str, Any], file: Path, dialect: Dialect
) -> tuple[tuple[int, ...] | None, str, list[str]]:
    """Return the ids of the taps, their meaning ("input" or "output"), and warnings about ids under another system's
    key.

    Raises ValueError if ids at two places or under two keys mean different layers.
    """
    own = {AUX_IDS, dialect.ids_key}
    meanings = _MEANINGS | {AUX_IDS: dialect.ids_are} | {dialect.ids_key: dialect.ids_are}
    keys = (dialect.ids_key, *(key for key in meanings if key != dialect.ids_key))
    places = {"": config, "eagle_config.": nested(config, "eagle_config", file)}
    found = [
        (f"{where}{key}", key, ids)
        for key in keys
        for where, held in places.items()
        if (ids := layer_ids(held, key, file)) is not None
    ]
    if not found:
        return None, dialect.ids_are, []
    (name, key, ids), *others = found
    for other, its_key, its_ids in others:
        if its_ids != ids and _inputs(its_ids, meanings[its_key]) != _inputs(ids, meanings[key]):
            raise ValueError(
                f"{file} names taps twice: {name} is {list(ids)}, {other} is {list(its_ids)}: they mean different "
                "layers, take out the ones that the head was not trained with"
            )
    lines = []
    if key not in own and key != dialect.second_ids_key:
        lines.append(
            f"{file} names its taps as {name} {list(ids)}, a key that {dialect.name} does not have, taken as "
            f"{meanings[key]}s of layers as in the systems that have it: type --aux-layers if hardly anything is "
            "accepted"
        )
    return ids, meanings[key], lines


def _inputs(ids: tuple[int, ...], meaning: str) -> tuple[int, ...]:
    return tuple(id + 1 for id in ids) if meaning == "output" else ids
