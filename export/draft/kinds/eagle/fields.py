"""The fields of an EAGLE head (EAGLE-3, P-EAGLE, EAGLE 1 and 2) that can be read in more than one way."""

from collections.abc import Iterable
from typing import Any

from eagle3.export.draft.common.field import Field, HeadReading, flag_field, parse_bool
from eagle3.export.draft.common.fields import (
    D2T,
    EMBEDDING_SCALE,
    OF_TAPS,
    ROPE_THETA,
    ROPE_TYPE,
    STATE,
)
from eagle3.export.draft.dialects.dialect import EAGLE


def _norm_there(name: str, prefix: str, keys: tuple[str, ...]) -> Field:
    """Return the field of an optional norm: true applies the norm that the tensors have, false leaves it out."""

    def there(reading: HeadReading) -> bool | None:
        return any(each.startswith(prefix) for each in reading.draft.headers)

    def applied(reading: HeadReading, value: bool) -> HeadReading:
        if value:
            return reading
        draft: Any = reading.draft
        names = {name: own for name, own in draft.tensor_names.items() if not own.startswith(prefix)}
        headers = {own: header for own, header in draft.headers.items() if not own.startswith(prefix)}
        without = {"norm_before_fc": False} if prefix == "input_norm." else {}
        return reading.with_draft(tensor_names=names, headers=headers, **without)

    def others(reading: HeadReading) -> Iterable[bool]:
        return [False] if there(reading) else []

    return Field(name, parse_bool, there, applied, others, keys)


def _of(applies: bool, field: Field) -> Field:
    """Return the field restricted to EAGLE 1 and 2 (``applies`` True) or to the other kinds (False): elsewhere no other
    values are tried."""

    def others(reading: HeadReading) -> Iterable[Any]:
        return field.others(reading) if (reading.draft.kind == EAGLE) == applies else []

    return Field(field.name, field.parse, field.value, field.applied, others, field.keys, field.flag)


FIELDS: tuple[Field, ...] = (
    *(_of(False, field) for field in OF_TAPS),
    _of(True, STATE),
    _of(
        False,
        flag_field(
            "norm_before_residual", "norm_before_residual", ("norm_before_residual",), flag="--norm-before-residual"
        ),
    ),
    flag_field("norm_output", "feeds_normed", ("norm_output", "return_hidden_post_norm")),
    _norm_there("norm_before_fc", "input_norm.", ("norm_before_fc",)),
    _norm_there("fc_norm", "fc_norm.", ("fc_norm", "use_aux_norm")),
    _norm_there("last_norm", "norm.", ("use_last_layernorm",)),
    ROPE_THETA,
    ROPE_TYPE,
    EMBEDDING_SCALE,
    D2T,
)
