"""Describes the fields of a draft head that can be read in more than one way: a ``Field`` for each, in a table of the
head's kind.

``--read FIELD=VALUE`` overrides one of them; ``eagle3.export.fit`` tries its values and measures which is right.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from eagle3.export.draft.common.description import DraftDescription

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class HeadReading:
    """A reading of a head: its description, and the states of the target that it takes."""

    draft: DraftDescription
    taps: tuple[int, ...]
    """Ascending indices of transformers' ``hidden_states``; empty for the final state after the target's norm."""
    target: "PreTrainedConfig"
    """transformers' text configuration of the target."""

    def with_draft(self, **changes: Any) -> "HeadReading":
        """Return the reading with fields of the description replaced."""
        return replace(self, draft=replace(self.draft, **changes))


@dataclass(frozen=True)
class Field:
    """A field of a head that can be read in more than one way, because its files leave it open or may be misleading."""

    name: str
    parse: Callable[[str], Any]
    """Returns the value that a typed text stands for. Raises ValueError for an invalid text."""
    value: Callable[[HeadReading], Any]
    """Returns the field's value in a reading; None if the field does not apply to that head."""
    applied: Callable[[HeadReading, Any], HeadReading]
    """Returns the reading with another value of the field."""
    others: Callable[[HeadReading], Iterable[Any]]
    """Returns the values worth trying besides the reading's; none if the field does not apply to that head."""
    keys: tuple[str, ...] = ()
    """Keys of ``config.json`` that determine the field. If all are absent, the file leaves the field open."""
    flag: str | None = None
    """The flag of ``eagle3-export`` that overrides the field; None if only ``--read`` does."""

    def typed(self, value: Any) -> str:  # noqa: ANN401 - of the field's type
        """Return the flag and the text that set this value."""
        text = text_of(value)
        return f"{self.flag} {text}" if self.flag else f"--read {self.name}={text}"


def text_of(value: Any) -> str:  # noqa: ANN401 - of a field's type
    """Return a value as ``--read`` takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def said_in(config: Mapping[str, Any]) -> set[str]:
    """Return the keys of a head's ``config.json`` that have a value, at its top level or in nested objects."""
    found = {key for key, value in config.items() if value is not None}
    for value in config.values():
        if isinstance(value, Mapping):
            found |= said_in(value)
    return found


def parse_bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text == "true"


def parse_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is no list such as 2,30,57") from None


def parse_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no number") from None


def one_of(*values: str) -> Callable[[str], str]:
    """Return a function that returns a text unchanged if it is one of ``values``, and raises ValueError otherwise."""

    def parse(text: str) -> str:
        if text not in values:
            raise ValueError(f"{text!r} is none of {', '.join(values)}")
        return text

    return parse


def flag_field(name: str, attribute: str, keys: tuple[str, ...] = (), **given: Any) -> Field:
    """Return the field of a true or false attribute of the description."""
    return Field(
        name,
        parse_bool,
        lambda reading: getattr(reading.draft, attribute, None),
        lambda reading, value: reading.with_draft(**{attribute: value}),
        lambda reading: (not getattr(reading.draft, attribute),),
        keys,
        **given,
    )
