"""Reads the RoPE of a head whose file has one RoPE for each type of layer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def one_rope(fields: Mapping[str, Any], takes: str | None, file: Path) -> dict[str, Any]:
    """Return the keys of a head's layers, with one RoPE for all layers.

    A target such as Gemma 4 has a RoPE for each type of layer, and a trainer may have copied that into the head's file.
    ``takes`` is the type of layer whose entry the trainer's code uses, None if that code has no such entries. In that
    case it raises ValueError unless all entries are equal.
    """
    flat = dict(fields)
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
                f"{file}: {key} has a RoPE for each type of layer ({shown}), but a draft head has one, and the file "
                f"does not say which it was trained with: leave that one in {key}, without the name of a type"
            )
    return flat


def _shown(rope: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in rope.items())
