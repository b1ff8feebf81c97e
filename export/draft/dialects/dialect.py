"""What sets one system's draft checkpoints apart from another's."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EAGLE, EAGLE3, P_EAGLE = "EAGLE", "EAGLE-3", "P-EAGLE"
"""Kinds of head. EAGLE (1, 2, HASS) fuses a token's embedding and the target's final state in its fc; EAGLE-3 fuses
taps there, and embedding and feature in its first layer's attention; P-EAGLE is an EAGLE-3 head whose later proposals
come of mask tokens in the same forward."""


@dataclass(frozen=True)
class Proposal:
    """What a checkpoint says of its use."""

    chain_len: int = 3
    verifier: str | None = None
    verifier_architectures: tuple[str, ...] = ()


def silent(_config: dict[str, Any], _file: Path) -> Proposal:
    """Of a dialect that says nothing of its use."""
    return Proposal()


def nothing(config: dict[str, Any], file: Path) -> None:
    """Of a dialect that refuses nothing of its own."""


def refuse_unheeded(trainer: str, said: dict[str, Any], file: Path) -> None:
    """Raise ValueError for keys that other systems heed, and the trainer's own code does not. ``said``: those that are
    not as the trainer takes them."""
    for key, value in said.items():
        if value is not None:
            raise ValueError(
                f"{file}: {key} is {value}, which {trainer}'s code takes no notice of: take it out if that trained the "
                "head, else type --draft-dialect sglang"
            )


@dataclass(frozen=True)
class Dialect:
    """The facts in which dialects differ; names of tensors are the same in all (``tensor_names.py``)."""

    name: str
    recognizes: Callable[[dict[str, Any], Collection[str]], bool]
    """Of a configuration and the checkpoint's tensor names."""
    layer_fields: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: config
    """The part of the configuration that has the sizes of the decoder layers."""
    ids_are: str = "input"
    """What an explicit aux layer id means: the input or the output of that layer."""
    names_taps: bool = True
    """The trainer's code heeds such ids at all."""
    norm_output_feeds: bool = True
    """``norm_output`` says whether the normed state is the next feature; if not, whether lm_head takes it normed."""
    later_norm: str = "input_layernorm"
    """The norm of a later layer's input in a checkpoint that has both."""
    proposal: Callable[[dict[str, Any], Path], Proposal] = silent
    depth_is_targets: bool = False
    """``num_hidden_layers`` of an EAGLE-3 head is its target's; it has as many layers as it has tensors of."""
    trainer: str = ""
    """The system whose code trained the heads, by name; empty where many do."""
    heeds: Callable[[str], Collection[str] | None] = lambda _kind: None
    """By kind of head, which keys of variants the trainer's code heeds (``unheeded.SILENT``); None: no telling."""
    ropes: Callable[[str], Collection[str] | None] = lambda _kind: None
    """Likewise, the types of rope that it knows."""
    places: Callable[[str], str | None] = lambda _kind: None
    """Likewise, a pattern of the tensors that it has a place for, by ``DraftHead``'s names."""
    refuse: Callable[[dict[str, Any], Path], None] = nothing
    """Raises ValueError for what the dialect's trainer computes in a way of its own."""
    warns_of_residual: bool = False
    """Its systems disagree on what an absent ``norm_before_residual`` means."""
