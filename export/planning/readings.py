"""Applies the readings of a head that the flag ``--read FIELD=VALUE`` gives."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from eagle3.export.draft.common.description import DraftDescription
from eagle3.export.draft.common.field import HeadReading
from eagle3.export.draft.kinds import KINDS
from eagle3.export.planning.taps import Taps

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def with_readings(
    draft: DraftDescription, taps: Taps, target: "PreTrainedConfig", given: Iterable[str]
) -> tuple[DraftDescription, Taps]:
    """Return the head and its taps with the readings ``given``, each FIELD=VALUE. Raises ValueError with one line for a
    field that the head's kind lacks, and for an invalid value."""
    fields = {field.name: field for field in KINDS[draft.kind].load().FIELDS}
    reading, typed = HeadReading(draft, taps.layers, target), []
    for text in given:
        name, _, value = text.partition("=")
        if name not in fields:
            raise ValueError(
                f"--read {text}: a head of the kind {draft.kind} has {', '.join(fields)}: type one of them "
                "with = and a value"
            )
        try:
            reading = fields[name].applied(reading, fields[name].parse(value))
        except ValueError as error:
            raise ValueError(f"--read {text}: {error}: type another value") from error
        typed.append(f"--read {text}")
    if reading.taps == taps.layers:
        return reading.draft, taps
    layers = target.num_hidden_layers
    if list(reading.taps) != sorted(set(reading.taps)) or any(not 0 <= tap <= layers for tap in reading.taps):
        raise ValueError(
            f"{' '.join(typed)}: the taps {','.join(map(str, reading.taps))} must ascend, be unique and lie within the "
            f"target's {layers} layers"
        )
    return reading.draft, Taps(reading.taps, " ".join(typed))
