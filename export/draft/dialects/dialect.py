"""The differences between the draft checkpoints of different systems."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EAGLE, EAGLE3, P_EAGLE = "EAGLE", "EAGLE-3", "P-EAGLE"
"""Kinds of draft head. EAGLE (1, 2, HASS) fuses a token's embedding and the target's final state in its fc. EAGLE-3
fuses taps in its fc, and embedding and feature in its first layer's attention. P-EAGLE is an EAGLE-3 head whose later
proposals come from mask tokens in the same forward."""


@dataclass(frozen=True)
class Proposal:
    """A checkpoint's settings for its use: chain length, and the target that it was trained for."""

    chain_len: int = 3
    verifier: str | None = None
    verifier_architectures: tuple[str, ...] = ()


def silent(_config: dict[str, Any], _file: Path) -> Proposal:
    """Return the ``proposal`` of a dialect whose checkpoints have no such settings."""
    return Proposal()


def nothing(config: dict[str, Any], file: Path) -> None:
    """Refuse nothing: the ``refuse`` of most dialects."""


IGNORED_BASE = 10000.0
"""The base of RoPE in code that ignores ``rope_theta``."""


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of ``rope_scaling`` and ``rope_parameters`` together."""
    given = (config.get(key) for key in ("rope_scaling", "rope_parameters"))
    return {key: value for rope in given if isinstance(rope, dict) for key, value in rope.items()}


def rotary_part(config: Mapping[str, Any]) -> Any:  # noqa: ANN401 - the value has any type of JSON
    """Return ``partial_rotary_factor``, at the top or within the RoPE; None where it is absent or 1."""
    part = rope_of(config).get("partial_rotary_factor", config.get("partial_rotary_factor"))
    return None if part == 1 else part


def refuse_unheeded(trainer: str, said: dict[str, Any], file: Path) -> None:
    """Raise ValueError for keys that the trainer's own code ignores and other systems use. ``said`` maps keys to
    values; None is the value that the trainer assumes."""
    for key, value in said.items():
        if value is not None:
            raise ValueError(
                f"{file}: {key} is {value}, which {trainer}'s code takes no notice of: take it out if that trained the "
                "head, else type --draft-dialect sglang"
            )


@dataclass(frozen=True)
class Dialect:
    """The properties in which dialects differ. Tensor names are read alike for all (``tensor_names.py``)."""

    name: str
    recognizes: Callable[[dict[str, Any], Collection[str]], bool]
    """Returns True for a configuration and tensor names of this dialect."""
    layer_fields: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: config
    """Returns the part of the configuration with the sizes of the decoder layers."""
    ids_key: str = "eagle_aux_hidden_state_layer_ids"
    """The key of the aux layer ids."""
    ids_are: str = "input"
    """The meaning of an explicit aux layer id: the "input" or the "output" of that layer."""
    ids_are_known: bool = False
    """All code that writes the dialect means the same by its ids."""
    second_ids_key: str | None = None
    """Another key of the ids that its files have, beside ``ids_key``."""
    names_taps: bool = True
    """The trainer's code uses such ids."""
    norm_output_feeds: bool = True
    """If True, ``norm_output`` makes the normed state the next feature. If False, it makes lm_head take the normed
    state."""
    norm_output_doubt: str | None = None
    """The other dialect that files with ``norm_output`` may be of, and when, as a warning says it."""
    later_norm: str = "input_layernorm"
    """The norm of a later layer's input in a checkpoint that has both."""
    check: Callable[[dict[str, Any], Path], None] = nothing
    """Raises ValueError for a file that lacks what every file of the dialect has."""
    proposal: Callable[[dict[str, Any], Path], Proposal] = silent
    depth_is_targets: bool = False
    """``num_hidden_layers`` of an EAGLE-3 head is its target's; the head's own depth follows from its tensors."""
    depth_of_eagle: str | None = None
    """The key of the depth of an EAGLE head; None if its files hold none that can be relied on."""
    builds_midlayer: bool = False
    """The trainer's code builds one layer of an EAGLE-3 head, ``midlayer``, whatever ``num_hidden_layers`` is; often
    it is the target's depth."""
    trainer: str = ""
    """Name of the system whose code trained the heads, "" if there are many."""
    heeds: Callable[[str], Collection[str] | None] = lambda _kind: None
    """Returns the keys of variants that the trainer's code uses for a kind of head (``unheeded.SILENT``); None if that
    is not known."""
    ropes: Callable[[str], Collection[str] | None] = lambda _kind: None
    """Returns the types of RoPE that the trainer's code supports for a kind of head; None if that is not known."""
    heeds_base: Callable[[str, Mapping[str, Any]], bool | None] = lambda _kind, _fields: True
    """Returns True if the trainer's code uses ``rope_theta`` for a kind of head with these keys of its layers, False if
    the base is ``IGNORED_BASE`` whatever the file says, None if that depends on what the file does not say."""
    base_doubt: str = ""
    """Why a file cannot tell the base, for a dialect whose ``heeds_base`` returns None."""
    marks: Mapping[str, Any] = field(default_factory=dict)
    """Keys that only its own files have, for a trainer that publishes under other systems' names too: with them
    ``heeds_base`` knows such a head."""
    heeds_part: bool = True
    """The trainer's code uses ``partial_rotary_factor`` of a RoPE of the type "default"."""
    takes_rope_of: str | None = None
    """The type of layer whose RoPE the trainer's code takes, of a file with one for each type."""
    feeds_normed: Callable[[str], bool] = lambda _kind: False
    """Returns True if the next step's feature of a kind of head is the normed state, whatever the file says."""
    has_gemma4: bool = False
    """The layers may be Gemma 4's."""
    any_model_type: bool = True
    """The trainer's code builds Llama's layers whatever ``model_type`` is: often its target's."""
    places: Callable[[str], str | None] = lambda _kind: None
    """Returns a pattern of the tensors that the trainer's code uses, by ``DraftHead``'s names; None if that is not
    known."""
    refuse: Callable[[dict[str, Any], Path], None] = nothing
    """Raises ValueError for a setting that the dialect's trainer computes differently."""
    warns_of_residual: bool = False
    """The dialect's systems disagree on what an absent ``norm_before_residual`` means."""
