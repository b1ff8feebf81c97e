"""Refuses rotary tables that depend on more than positions, since a cached key keeps its rotation."""

import json
from typing import TYPE_CHECKING, Any

from eagle3.export.checkpoints.json_fields import number

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

_BY_LENGTH = {
    "dynamic": "its frequencies change with the length of the text",
    "longrope": "it has one table for short texts and another for long ones",
}


def check_rope(config: "PreTrainedConfig", where: str, static: bool = True) -> None:
    """Raise ValueError for a transformers configuration with a rope that transformers does not know, and, if it must be
    ``static``, with one whose table depends on the length of the text."""
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
        if static:
            _refuse_by_length(kind, where)


def check_static(model: "nn.Module", config: "PreTrainedConfig", where: str) -> None:
    """Raise ValueError for a model whose rotary table depends on the length of the text. transformers' rotary modules
    decide that by their own ``rope_type`` (``dynamic_rope_update`` there), which may differ from the configuration's:
    HunYuan's "dynamic" with a fixed ``alpha`` is static."""
    found: list[Any] = [module.rope_type for module in model.modules() if hasattr(module, "rope_type")]
    if not found:
        check_rope(config, where)
    for kind in (kind for each in found for kind in (each.values() if isinstance(each, dict) else (each,))):
        _refuse_by_length(kind, where)


def _refuse_by_length(kind: str, where: str) -> None:
    if kind in _BY_LENGTH:
        raise ValueError(
            f"{where}: rope_type {kind} is not supported: {_BY_LENGTH[kind]}, but a cached key keeps the rotation that "
            "it was given"
        )
