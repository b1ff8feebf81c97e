"""Defines ``Dialect``, the record of the differences between the draft checkpoints of different systems."""

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
    """Two settings of a checkpoint: the chain length that it suggests, and the target that it was trained for."""

    chain_len: int = 3
    verifier: str | None = None
    verifier_architectures: tuple[str, ...] = ()


def silent(_config: dict[str, Any], _file: Path) -> Proposal:
    """Return default settings, as ``proposal`` of a dialect whose checkpoints have none."""
    return Proposal()


def nothing(config: dict[str, Any], file: Path) -> None:
    """Accept any file, as ``check`` or ``refuse`` of a dialect without such faults."""


IGNORED_BASE = 10000.0
"""The RoPE base in trainers' code that ignores ``rope_theta``."""


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merged keys of ``rope_scaling`` and ``rope_parameters``."""
    given = (config.get(key) for key in ("rope_scaling", "rope_parameters"))
    return {key: value for rope in given if isinstance(rope, dict) for key, value in rope.items()}


def rotary_part(config: Mapping[str, Any]) -> Any:  # noqa: ANN401 - the value has any type of JSON
    """Return ``partial_rotary_factor``, from the top level or from the RoPE's keys; None if it is absent or 1."""
    part = rope_of(config).get("partial_rotary_factor", config.get("partial_rotary_factor"))
    return None if part == 1 else part


def refuse_unheeded(trainer: str, said: dict[str, Any], file: Path) -> None:
    """Raise ValueError for keys that the trainer's own code ignores and other systems use. ``said`` maps keys to
    values; None means that the value is what the trainer's code assumes."""
    for key, value in said.items():
        if value is not None:
            raise ValueError(
                f"{file}: {key} is {value}, which {trainer}'s code ignores: take it out if that trained the "
                "head, else type --draft-dialect sglang"
            )


@dataclass(frozen=True)
class Dialect:
    """The properties in which dialects differ. Tensor names are read in the same way for all (``tensor_names.py``)."""

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
    """True if all code that writes the dialect gives ids the same meaning."""
    second_ids_key: str | None = None
    """Another key with ids in the dialect's files, beside ``ids_key``."""
    names_taps: bool = True
    """True if the trainer's code uses the ids."""
    norm_output_feeds: bool = True
    """If True, ``norm_output`` makes the normed state the next feature. If False, it makes lm_head take the normed
    state."""
    norm_output_doubt: str | None = None
    """The part of a warning that names the other dialect to which a file with ``norm_output`` may belong, and when."""
    later_norm: str = "input_layernorm"
    """The norm of the input of layers after the first, for a checkpoint that has both norms."""
    check: Callable[[dict[str, Any], Path], None] = nothing
    """Raises ValueError for a file that lacks what every file of the dialect has."""
    proposal: Callable[[dict[str, Any], Path], Proposal] = silent
    depth_is_targets: bool = False
    """True if ``num_hidden_layers`` of an EAGLE-3 head is the target's depth; the head's own depth then follows from
    its tensors."""
    depth_of_eagle: str | None = None
    """The key of the depth of an EAGLE head; None if the files have no reliable one."""
    builds_midlayer: bool = False
    """True if the trainer's code builds one layer of an EAGLE-3 head, ``midlayer``, and ignores ``num_hidden_layers``,
    which is often the target's depth."""
    trainer: str = ""
    """The name of the system whose code trained the heads; "" if there are many."""
    heeds: Callable[[str], Collection[str] | None] = lambda _kind: None
    """Returns those keys in ``unheeded.SILENT`` that the trainer's code uses for a kind of head; None if that is not
    known."""
    ropes: Callable[[str], Collection[str] | None] = lambda _kind: None
    """Returns the types of RoPE that the trainer's code supports for a kind of head; None if that is not known."""
    heeds_base: Callable[[str, Mapping[str, Any]], bool | None] = lambda _kind, _fields: True
    """Returns True if the trainer's code uses ``rope_theta`` for a kind of head with these keys of its layers, False if
    the base is always ``IGNORED_BASE``, None if the file does not show which is the case."""
    base_doubt: str = ""
    """The reason why a file does not show the base, for a dialect whose ``heeds_base`` returns None."""
    marks: Mapping[str, Any] = field(default_factory=dict)
    """Keys that only the trainer's own files have, for a trainer that also publishes under other systems' names.
    ``heeds_base`` recognizes its heads by them."""
    heeds_part: bool = True
    """True if the trainer's code uses ``partial_rotary_factor`` of a RoPE of the type "default"."""
    takes_rope_of: str | None = None
    """The type of layer whose RoPE the trainer's code uses if a file has one RoPE for each type."""
    feeds_normed: Callable[[str], bool] = lambda _kind: False
    """Returns True if, for this kind of head, the next step's feature is always the normed state."""
    has_gemma4: bool = False
    """True if the layers may be Gemma 4's."""
    any_model_type: bool = True
    """True if the trainer's code builds Llama's layers for any ``model_type``, which is often the target's."""
    places: Callable[[str], str | None] = lambda _kind: None
    """Returns a pattern of the tensors that the trainer's code uses, by ``DraftHead``'s names; None if that is not
    known."""
    refuse: Callable[[dict[str, Any], Path], None] = nothing
    """Raises ValueError for a setting that the dialect's trainer computes differently."""
    warns_of_residual: bool = False
    """True if the systems that use this dialect disagree on the meaning of an absent ``norm_before_residual``."""
