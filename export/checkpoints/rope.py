"""Which rotary tables can be computed: those that depend on positions alone, since a cached key keeps its rotation."""

import json
from typing import Any

from eagle3.export.checkpoints.json_fields import number

_BY_LENGTH = {
    "dynamic": "its frequencies change with the length of the text",
    "longrope": "it has one table for short texts and another for long ones",
}


def check_rope(config: Any, where: str) -> None:
    """Raise ValueError for a transformers configuration with a rope that transformers does not know, or whose table
    depends on the length of the text (``dynamic_rope_update`` there)."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = getattr(config, "rope_parameters", None) or {}
    flat = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    for each in flat:
        kind = each.get("rope_type", "default")
        if not isinstance(kind, str) or kind not in ("default", *ROPE_INIT_FUNCTIONS):
            raise ValueError(f"{where}: rope_type is {json.dumps(kind)}, which transformers does not know: correct it")
        if each.get("rope_theta", 1.0) is None:
            raise ValueError(f"{where}: rope_theta is null, but must be a number above 0: correct it")
        number(each, "rope_theta", None, where)
        number(each, "partial_rotary_factor", None, where, most=1)
        if kind in _BY_LENGTH:
            raise ValueError(
                f"{where}: rope_type {kind} is not supported: {_BY_LENGTH[kind]}, but a cached key keeps the rotation "
                "that it was given"
            )
