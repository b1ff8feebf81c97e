"""The fields of a Gemma 4 assistant that can be read in more than one way."""

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

from eagle3.export.draft.common.field import Field, HeadReading, flag_field, parse_float
from eagle3.export.draft.common.fields import STATE


def _theta_of(kind: str) -> Field:
    """Return the field for the RoPE base of all layers with this kind of attention."""

    def rope(reading: HeadReading) -> dict[str, Any]:
        return reading.draft.layer.rope_parameters.get(kind) or {}

    def applied(reading: HeadReading, theta: float) -> HeadReading:
        layer = deepcopy(reading.draft.layer)
        layer.rope_parameters[kind]["rope_theta"] = theta
        return reading.with_draft(layer=layer)

    def others(reading: HeadReading) -> Iterable[float]:
        theirs = (getattr(reading.target, "rope_parameters", None) or {}).get(kind) or {}
        found = (theirs.get("rope_theta"), 10_000.0, 1_000_000.0)
        now = rope(reading).get("rope_theta")
        return [float(theta) for theta in dict.fromkeys(found) if theta and theta != now]

    return Field(
        f"rope_theta_{kind.removesuffix('_attention')}",
        parse_float,
        lambda reading: rope(reading).get("rope_theta"),
        applied,
        others,
        keys=("rope_parameters", "rope_theta"),
    )


FIELDS: tuple[Field, ...] = (
    STATE,
    flag_field("embeds_as_target", "embeds_as_target"),
    _theta_of("sliding_attention"),
    _theta_of("full_attention"),
)
