"""Reads a checkpoint of the block family, of any variant and dialect, and lists its fields that can be read in more
than one way."""

from collections.abc import Iterable
from dataclasses import replace
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
    Field,
    HeadReading,
    flag_field,
    parse_bool,
)
from eagle3.export.draft.kinds.dflash.description import DFlashDescription
from eagle3.export.draft.kinds.dflash.dialects import DIALECTS, Files

__all__ = ["FIELDS", "check_pair", "read"]


def read(fields: Fields, source: Source) -> DFlashDescription:
    """Describe the head with the configuration ``fields`` and the tensors ``source``. Raises ValueError with one line
    if the configuration contradicts itself or asks for something that no trainer's code computes."""
    dialect = next(each for each in DIALECTS if each.recognizes(fields))
    return dialect.read(Files(fields, source))


def _causal(reading: HeadReading) -> bool:
    draft: Any = reading.draft
    return all(block.causal for block in draft.attends)


def _with_causal(reading: HeadReading, causal: bool) -> HeadReading:
    draft: Any = reading.draft
    return reading.with_draft(attends=tuple(replace(block, causal=causal) for block in draft.attends))


def _anchor_proposes(reading: HeadReading) -> bool:
    draft: Any = reading.draft
    return draft.first_row == 0


def _other_anchor(reading: HeadReading) -> Iterable[bool]:
    draft: Any = reading.draft
    return [] if draft.variant.fixes_first_row else [not _anchor_proposes(reading)]


FIELDS: tuple[Field, ...] = (
    *OF_TAPS,
    Field(
        "sample_from_anchor",
        parse_bool,
        _anchor_proposes,
        lambda reading, value: reading.with_draft(first_row=0 if value else 1),
        _other_anchor,
        keys=("sample_from_anchor", "dspark_bonus_anchor", "shift_label"),
    ),
    Field(
        "causal",
        parse_bool,
        _causal,
        _with_causal,
        lambda reading: [not _causal(reading)],
        keys=("is_causal", "causal", "causal_head", "sliding_window_non_causal"),
    ),
    flag_field("embeds_as_target", "embeds_as_target", ("input_embedding_scale",)),
    ROPE_THETA,
    ROPE_TYPE,
    EMBEDDING_SCALE,
    D2T,
)
