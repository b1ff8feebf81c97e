"""Decides the RoPE of an EAGLE head, since its file may name another one than it was trained with.

Some trainers ignore ``rope_theta`` or ``partial_rotary_factor``, some only in older versions, which a file does not
record. The head gets its trainer's RoPE. If the file does not show that, it gets the file's, and a warning says so. The
flags ``--draft-rope-theta`` and ``--draft-partial-rotary`` override both.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from eagle3.export.checkpoints.json_fields import Fields

FILE = "file"
"""The value of both flags that selects the value in the head's ``config.json``."""
BASE_DOUBT = "the file does not show whether the head was trained with it"
"""A warning says so of a base that some trainers' code ignored."""
IGNORED_BASE = 10000.0
"""The RoPE base in trainers' code that ignores ``rope_theta``."""
ANGELSLIM = "AngelSlim"
_FIXED = ("default", "linear", "dynamic")
_ROPES = ("rope_scaling", "rope_parameters")


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


@dataclass(frozen=True)
class RopeOfTrainer:
    """The RoPE in a trainer's code."""

    trainer: str = ""
    heeds_base: bool | None = True
    """True if the code uses ``rope_theta``, False if the base is always ``IGNORED_BASE``, None if the file does not
    show which is the case."""
    doubt: str = ""
    """The reason why the file does not show the base."""
    heeds_part: bool = True
    """True if the code uses ``partial_rotary_factor`` of a RoPE of the type "default"."""


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merged keys of ``rope_scaling`` and ``rope_parameters``."""
    return {key: value for name in _ROPES if isinstance(rope := config.get(name), dict) for key, value in rope.items()}


def rotary_part(config: Mapping[str, Any]) -> Any:  # noqa: ANN401 - the value has any type of JSON
    """Return ``partial_rotary_factor``, from the top level or from the RoPE's keys; None if it is absent or 1."""
    part = rope_of(config).get("partial_rotary_factor", config.get("partial_rotary_factor"))
    return None if part == 1 else part


def angelslim_heeds_base(fields: Mapping[str, Any], own: bool = False) -> bool | None:
    """Return False if AngelSlim's code uses a fixed RoPE base. Return None if only the class name is AngelSlim's, since
    other systems save under that name. ``own`` is True for a head that AngelSlim published."""
    rope = rope_of(fields)
    kind = rope.get("type", rope.get("rope_type", "default"))
    if kind not in _FIXED or rope.get("mrope_interleaved") is True:
        return True
    own = own or "target_model_type" in fields or "modal_type" in fields
    return False if own or any(name.startswith("CosyVoice3") for name in fields.get("architectures") or []) else None


def trained_rope(
    fields: "Fields", layer: "PreTrainedConfig", trained: RopeOfTrainer, flags: RopeFlags, dialect: str
) -> tuple[dict[str, Any], list[str]]:
    """Return the RoPE parameters that a head was trained with, and warnings about parameters that differ from its file
    or that the file does not show. ``layer`` has the file's parameters, ``fields`` are those of the layers."""
    base, of_base = _base(fields, layer.rope_parameters, trained, flags)
    part, of_part = _part(fields, layer.rope_parameters, trained.heeds_part, flags.part, dialect)
    changes = {"rope_theta": base} | ({} if part is None else {"partial_rotary_factor": part})
    return layer.rope_parameters | changes, [*of_base, *of_part]


def _base(
    fields: "Fields", rope: Mapping[str, Any], trained: RopeOfTrainer, flags: RopeFlags
) -> tuple[float, list[str]]:
    said, given = rope["rope_theta"], flags.theta
    if given is not None:
        return (said if given == FILE else float(given)), []
    heeds, trainer = trained.heeds_base, trained.trainer
    if heeds is None and flags.publisher == ANGELSLIM:
        heeds, trainer = angelslim_heeds_base(fields, own=True), ANGELSLIM
    if heeds is True or said == IGNORED_BASE:
        return said, []
    if heeds is False:
        return IGNORED_BASE, [
            f"{fields.file}: rope_theta is {said:.10g}, which {trainer}'s code ignores: the head's RoPE "
            f"has base {IGNORED_BASE:.10g}, as in training; type --draft-rope-theta {FILE} if another system trained it"
        ]
    return said, [
        f"{fields.file}: rope_theta is {said:.10g}, and {BASE_DOUBT}: {trained.doubt}. "
        f"Its RoPE has base {said:.10g}; if little is accepted, type --draft-rope-theta {IGNORED_BASE:.10g}"
    ]


def _part(
    fields: "Fields", rope: Mapping[str, Any], heeds: bool, given: float | str | None, dialect: str
) -> tuple[float | None, list[str]]:
    said = rope.get("partial_rotary_factor")
    if given is not None:
        return (said if given == FILE else float(given)), []
    if said in (None, 1.0) or heeds or rope["rope_type"] != "default":
        return said, []
    return 1.0, [
        f"{fields.file}: partial_rotary_factor is {said:.10g}, which {dialect}' code ignores with rope_type "
        f"default: RoPE applies to whole heads, as in training; vLLM applies it to {said:.10g} of them. If little is "
        f"accepted, type --draft-partial-rotary {FILE}"
    ]


def without_decided(config: Mapping[str, Any], decided: tuple[str, ...]) -> dict[str, Any]:
    """Return a configuration without the keys of RoPE that flags decide."""
    kept = {key: value for key, value in config.items() if key not in decided}
    ropes = {key: rope for key in _ROPES if isinstance(rope := kept.get(key), dict)}
    return kept | {key: {name: rope[name] for name in rope if name not in decided} for key, rope in ropes.items()}
