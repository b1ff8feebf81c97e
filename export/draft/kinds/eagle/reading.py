"""Reads an EAGLE head of any dialect, and lists its fields that can be read in more than one way."""

from collections.abc import Iterable
from typing import Any

from eagle3.export.checkpoints.json_fields import Fields
from eagle3.export.checkpoints.source import Source
from eagle3.export.draft.common.checks import check_pair
from eagle3.export.draft.common.field import (
    D2T,
    EMBEDDING_SCALE,
    OF_TAPS,
    ROPE_THETA,
    ROPE_TYPE,
    STATE,
    Field,
    HeadReading,
    flag_field,
    parse_bool,
)
from eagle3.export.draft.kinds import EAGLE
from eagle3.export.draft.kinds.eagle.description import EagleDescription
from eagle3.export.draft.kinds.eagle.dialects import DIALECTS
from eagle3.export.draft.kinds.eagle.rope_reading import NO_FLAGS, RopeFlags
from eagle3.export.draft.kinds.eagle.steps import Files
from eagle3.export.draft.kinds.eagle.tensor_names import PARD

__all__ = ["FIELDS", "check_pair", "read"]


def read(
    fields: Fields,
    source: Source,
    dialect: str | None = None,
    norm_before_residual: bool | None = None,
    rope: RopeFlags = NO_FLAGS,
) -> EagleDescription:
    """Describe the EAGLE head with the configuration ``fields`` and the tensors ``source``. See ``read_draft`` for the
    other arguments. Raises ValueError with one line."""
    headers = source.headers()
    chosen = dialect or next((name for name, each in DIALECTS.items() if each.recognizes(fields, headers)), None)
    if chosen is None:
        raise ValueError(_unrecognized(fields))
    return DIALECTS[chosen].read(Files(source, fields, headers, norm_before_residual, rope))


def _unrecognized(fields: Fields) -> str:
    if PARD in fields:
        return (
            f"{fields.file.parent} is a PARD model ({PARD} in config.json): independent draft models are not "
            "supported, type --draft with a head (eagle3-export --list-drafts lists the kinds)"
        )
    if "model_type" in fields:
        return (
            f"{fields.file} is of a {fields['model_type']} model, and it has no fc.weight as a draft head has: if it "
            f"is the target, type --checkpoint {fields.file.parent}; independent draft models are not supported"
        )
    return (
        f"{fields.file}: not recognized as a draft head (architectures: {fields.get('architectures') or 'none'}): if "
        f"it is one, type --draft-dialect with one of {', '.join(DIALECTS)}"
    )


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
