"""Decides the RoPE of an EAGLE head, since its file may name another one than it was trained with.

Some trainers ignore ``rope_theta`` or ``partial_rotary_factor``, some only in older versions, which a file does not
record. The head gets its trainer's RoPE. If the file does not show that, it gets the file's, and a warning says so. The
flags ``--draft-rope-theta`` and ``--draft-partial-rotary`` override both.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.export.draft.dialects import DIALECTS, Dialect
from eagle3.export.draft.dialects.dialect import IGNORED_BASE

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FILE = "file"
"""The value of both flags that selects the value in the head's ``config.json``."""
BASE_DOUBT = "the file does not show whether the head was trained with it"
"""A warning says so of a base that some trainers' code ignored."""


@dataclass(frozen=True)
class RopeFlags:
    """The values of the two flags: a number, ``FILE``, or None for a flag that was not typed, which selects the value
    in training."""

    theta: float | str | None = None
    part: float | str | None = None
    publisher: str | None = None
    """The organization that published the head on the hub, which may show its trainer if the file does not. It is not a
    flag."""

    @property
    def decided(self) -> tuple[str, ...]:
        """The keys of the configuration whose meaning a flag decides."""
        said = {"rope_theta": self.theta, "partial_rotary_factor": self.part}
        return tuple(key for key, value in said.items() if value is not None)


NO_FLAGS = RopeFlags()


def trained_rope(
    file: Path,
    layer: "PreTrainedConfig",
    fields: Mapping[str, Any],
    dialect: Dialect,
    kind: str,
    flags: RopeFlags,
) -> tuple[dict[str, Any], list[str]]:
    """Return the RoPE parameters that a head of ``kind`` was trained with, and warnings about parameters that differ
    from its file or that the file does not show. ``layer`` has the file's parameters, ``fields`` are the file's
    keys."""
    base, of_base = _base(file, layer.rope_parameters, fields, dialect, kind, flags)
    part, of_part = _part(file, layer.rope_parameters, dialect, flags.part)
    changes = {"rope_theta": base} | ({} if part is None else {"partial_rotary_factor": part})
    return layer.rope_parameters | changes, [*of_base, *of_part]


def _base(
    file: Path,
    rope: Mapping[str, Any],
    fields: Mapping[str, Any],
    dialect: Dialect,
    kind: str,
    flags: RopeFlags,
) -> tuple[float, list[str]]:
    said, given = rope["rope_theta"], flags.theta
    if given is not None:
        return (said if given == FILE else float(given)), []
    heeds, trainer = dialect.heeds_base(kind, fields), dialect.trainer
    marked = (each for each in DIALECTS.values() if each.marks and each.trainer == flags.publisher)
    if heeds is None and (publisher := next(marked, None)):
        heeds, trainer = publisher.heeds_base(kind, {**fields, **publisher.marks}), publisher.trainer
    if heeds is True or said == IGNORED_BASE:
        return said, []
    if heeds is False:
        return IGNORED_BASE, [
            f"{file}: rope_theta is {said:.10g}, which {trainer}'s code ignores: the head's RoPE "
            f"has base {IGNORED_BASE:.10g}, as in training; type --draft-rope-theta {FILE} if another system trained it"
        ]
    return said, [
        f"{file}: rope_theta is {said:.10g}, and {BASE_DOUBT}: {dialect.base_doubt}. "
        f"Its RoPE has base {said:.10g}; if little is accepted, type --draft-rope-theta {IGNORED_BASE:.10g}"
    ]


def _part(
    file: Path, rope: Mapping[str, Any], dialect: Dialect, given: float | str | None
) -> tuple[float | None, list[str]]:
    said = rope.get("partial_rotary_factor")
    if given is not None:
        return (said if given == FILE else float(given)), []
    if said in (None, 1.0) or dialect.heeds_part or rope["rope_type"] != "default":
        return said, []
    return 1.0, [
        f"{file}: partial_rotary_factor is {said:.10g}, which {dialect.name}' code ignores with rope_type "
        f"default: RoPE applies to whole heads, as in training; vLLM applies it to {said:.10g} of them. If little is "
        f"accepted, type --draft-partial-rotary {FILE}"
    ]


def without_decided(config: dict[str, Any], decided: tuple[str, ...]) -> dict[str, Any]:
    """Return a configuration without the keys of RoPE that flags decide."""
    kept = {key: value for key, value in config.items() if key not in decided}
    ropes = {key: rope for key in ("rope_scaling", "rope_parameters") if isinstance(rope := kept.get(key), dict)}
    return kept | {key: {name: rope[name] for name in rope if name not in decided} for key, rope in ropes.items()}
