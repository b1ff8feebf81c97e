"""Describes the fields of a draft head that can be read in more than one way: a ``Field`` for each, in a table of the
head's kind, and those that several kinds have: taps, the target's state, RoPE, the embedding's scale, ``d2t``.

``--read FIELD=VALUE`` overrides one of them; ``eagle3.export.checks.fit`` tries its values and measures which is right.
"""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import permutations
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


THETAS = (10_000.0, 500_000.0, 1_000_000.0)
"""Common RoPE bases in trainers' default configurations: that of Llama and Qwen 2, of Llama 3, and of Qwen 3."""
MOST_ORDERED = 3
"""The largest number of taps for which every order is tried."""


def _layers(reading: HeadReading) -> int:
    return reading.target.num_hidden_layers


def valid_taps(taps: tuple[int, ...], layers: int) -> bool:
    """Return True if taps ascend and exist in a target with this number of layers."""
    return bool(taps) and list(taps) == sorted(set(taps)) and taps[0] >= 0 and taps[-1] <= layers


def _moved(reading: HeadReading) -> Iterable[tuple[int, ...]]:
    """Return variants of the taps: one tap or all taps moved by a layer, and the two defaults of trainers."""
    taps, layers = reading.taps, _layers(reading)
    moved = [
        tuple(tap + by * (place == at) for at, tap in enumerate(taps)) for place in range(len(taps)) for by in (-1, 1)
    ]
    if reading.draft.aux_layers is None:
        moved += [tuple(tap + by for tap in taps) for by in (-1, 1)]
    if len(taps) == 3:
        moved += [(2, layers // 2, layers - 3), (1, layers // 2 - 1, layers - 4)]
    return [each for each in dict.fromkeys(moved) if each != taps and valid_taps(each, layers)]


def _convention(reading: HeadReading) -> str | None:
    ids = reading.draft.aux_layers
    meanings = {} if ids is None else {tuple(ids): "input", tuple(tap + 1 for tap in ids): "output"}
    return meanings.get(reading.taps)


def _with_convention(reading: HeadReading, meaning: str) -> HeadReading:
    ids = reading.draft.aux_layers or ()
    return replace(reading, taps=tuple(tap + (meaning == "output") for tap in ids))


def _other_convention(reading: HeadReading) -> Iterable[str]:
    now = _convention(reading)
    other = {"input": "output", "output": "input"}.get(now or "")
    return [other] if other and valid_taps(_with_convention(reading, other).taps, _layers(reading)) else []


def _orders(reading: HeadReading) -> Iterable[tuple[int, ...]]:
    count, now = len(reading.taps), reading.draft.tap_order
    if not 2 <= count <= MOST_ORDERED:
        return []
    return [order for order in permutations(range(count)) if order != (now or tuple(range(count)))]


AUX_CONVENTION = Field(
    "aux_convention",
    one_of("input", "output"),
    _convention,
    _with_convention,
    _other_convention,
    flag="--aux-convention",
)
AUX_LAYERS = Field(
    "aux_layers",
    parse_ids,
    lambda reading: reading.taps or None,
    lambda reading, taps: replace(reading, taps=taps),
    _moved,
    flag="--aux-layers",
)
TAP_ORDER = Field(
    "tap_order",
    parse_ids,
    lambda reading: (reading.draft.tap_order or tuple(range(len(reading.taps)))) if reading.taps else None,
    lambda reading, order: reading.with_draft(tap_order=order),
    _orders,
    keys=("no key says it, and all trainers' taps ascend",),
)


def _state(reading: HeadReading) -> str | None:
    return "normed" if reading.draft.takes_final_state else "last_layer"


def _with_state(reading: HeadReading, state: str) -> HeadReading:
    """Return the reading in which the head takes the target's final state, or the output of its last layer."""
    normed = state == "normed"
    taps, layers = () if normed else (_layers(reading),), None if normed else (_layers(reading),)
    return replace(reading.with_draft(takes_final_state=normed, aux_layers=layers), taps=taps)


STATE = Field(
    "state",
    one_of("normed", "last_layer"),
    _state,
    _with_state,
    lambda reading: ["last_layer" if reading.draft.takes_final_state else "normed"],
)
"""The state that a head without taps takes from the target: the final state after its norm, or before it."""


def _rope(reading: HeadReading) -> dict[str, Any] | None:
    rope = getattr(reading.draft.layer, "rope_parameters", None)
    return rope if rope and "rope_theta" in rope else None


def _targets_ropes(reading: HeadReading) -> list[dict[str, Any]]:
    rope = getattr(reading.target, "rope_parameters", None) or {}
    return [rope] if "rope_theta" in rope else [each for each in rope.values() if isinstance(each, dict)]


def with_rope(reading: HeadReading, rope: dict[str, Any]) -> HeadReading:
    """Return the reading with other rotary parameters of the head's layers."""
    layer = deepcopy(reading.draft.layer)
    layer.rope_parameters = rope
    return reading.with_draft(layer=layer)


def _theta(reading: HeadReading) -> float | None:
    rope = _rope(reading)
    return None if rope is None else float(rope["rope_theta"])


def _other_thetas(reading: HeadReading) -> Iterable[float]:
    if (now := _theta(reading)) is None:
        return []
    found = [float(rope["rope_theta"]) for rope in _targets_ropes(reading) if "rope_theta" in rope]
    return [theta for theta in dict.fromkeys((*found, *THETAS)) if theta != now]


def _scaling(reading: HeadReading) -> str | None:
    rope = _rope(reading)
    return None if rope is None else str(rope.get("rope_type", "default"))


def _with_scaling(reading: HeadReading, kind: str) -> HeadReading:
    """Return the reading with the target's RoPE scaling of type ``kind``, or without scaling for "default"."""
    rope = {"rope_type": "default", "rope_theta": _theta(reading)}
    for theirs in _targets_ropes(reading) if kind != "default" else ():
        if theirs.get("rope_type") == kind:
            rope = dict(theirs) | {"rope_theta": _theta(reading)}
            break
    else:
        if kind != "default":
            raise ValueError(f"the target has no RoPE of the type {kind}")
    return with_rope(reading, rope)


_SCALED = ("linear", "dynamic", "yarn", "longrope", "llama3")


def _other_scalings(reading: HeadReading) -> Iterable[str]:
    now = _scaling(reading)
    theirs = [str(rope.get("rope_type", "default")) for rope in _targets_ropes(reading)]
    kinds = ["default", *(kind for kind in theirs if kind in _SCALED)]
    return [] if now is None else [kind for kind in dict.fromkeys(kinds) if kind != now]


ROPE_THETA = Field(
    "rope_theta",
    parse_float,
    _theta,
    lambda reading, theta: with_rope(reading, dict(_rope(reading) or {}) | {"rope_theta": theta}),
    _other_thetas,
    keys=("rope_theta", "rope_parameters"),
)
ROPE_TYPE = Field(
    "rope_type",
    one_of("default", *_SCALED),
    _scaling,
    _with_scaling,
    _other_scalings,
    keys=("rope_scaling", "rope_parameters"),
)
EMBEDDING_SCALE = Field(
    "embedding_scale",
    parse_float,
    lambda reading: float(reading.draft.embedding_scale),
    lambda reading, scale: reading.with_draft(embedding_scale=scale),
    lambda reading: [1.0 if reading.draft.embedding_scale != 1.0 else float(reading.draft.hidden_size) ** 0.5],
)
D2T = Field(
    "d2t",
    one_of("offsets", "ids"),
    lambda reading: ("ids" if reading.draft.d2t_holds_ids else "offsets") if reading.draft.maps_vocabulary else None,
    lambda reading, what: reading.with_draft(d2t_holds_ids=what == "ids"),
    lambda _reading: [],
    keys=("t2d",),
)
"""The meaning of ``d2t``. The tensor ``t2d`` or the values of ``d2t`` show it, so no other value is tried."""
OF_TAPS = (AUX_CONVENTION, AUX_LAYERS, TAP_ORDER)
