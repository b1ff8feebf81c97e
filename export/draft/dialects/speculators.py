"""vLLM's speculators, new (``Eagle3DraftModel``, ``PEagleDraftModel``) and old (``Eagle3Speculator``,
``EagleSpeculator``).

Source: speculators 0.3.0 and 0.9.0, their configuration classes and the files that their ``save_pretrained`` writes.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from eagle3.export.draft.dialects.dialect import Dialect, Proposal

LAYER = "transformer_layer_config"


def recognizes(config: dict[str, Any], _tensors: Collection[str]) -> bool:
    return LAYER in config


def check(config: dict[str, Any], file: Path) -> None:
    """Raise ValueError for a file without the keys of the layers."""
    from eagle3.export.checkpoints.json_fields import nested  # imported here: eagle3.export.checkpoints imports torch

    if not isinstance(config.get(LAYER), dict):
        nested(config, LAYER, file)
        raise ValueError(f"{file} has no {LAYER}, as a head of speculators has: correct it")


def layer_fields(config: dict[str, Any]) -> dict[str, Any]:
    return config[LAYER]


def proposal(config: dict[str, Any], file: Path) -> Proposal:
    """Return the settings of the first proposal method. Raises ValueError for a lossy method, which accepts tokens that
    differ from greedy decoding's."""
    from eagle3.export.checkpoints.json_fields import (
        count,
        nested,
        texts,
    )  # imported here: eagle3.export.checkpoints imports torch, and --help must not

    described = nested(config, "speculators_config", file)
    methods = described.get("proposal_methods") or [{}]
    if not isinstance(methods, list) or not isinstance(methods[0], dict):
        raise ValueError(f"{file}: proposal_methods must be a list of objects: correct it")
    method = methods[0]
    for key, lossless in (("verifier_accept_k", 1), ("accept_tolerance", 0)):
        if method.get(key, lossless) != lossless:
            raise ValueError(f"{file}: {key} is {method[key]}, which is lossy: only {lossless} gives greedy tokens")
    verifier = nested(described, "verifier", file)
    name = verifier.get("name_or_path")
    return Proposal(
        chain_len=count(method, "speculative_tokens", 3, file),
        verifier=str(name) if name else None,
        verifier_architectures=texts(verifier, "architectures", file),
    )


DIALECT = Dialect(
    "speculators",
    recognizes,
    layer_fields,
    ids_are_known=True,
    check=check,
    proposal=proposal,
    heeds_part=False,
    takes_rope_of="sliding_attention",  # as speculators' flatten_rope_parameters does
    any_model_type=False,
    warns_of_residual=True,
)
