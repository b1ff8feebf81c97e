"""Reads the keys that all kinds of heads of vLLM's speculators have.

Source: speculators 0.3.0 and 0.9.0, their configuration classes and the files that their ``save_pretrained`` writes.
"""

from dataclasses import dataclass

from eagle3.export.checkpoints.json_fields import Fields

SPECULATORS = "speculators"
LAYER = "transformer_layer_config"
"""The key of the layers' fields."""
ROPE_OF = "sliding_attention"
"""The type of layer whose RoPE is used if a file has one RoPE for each type, as in speculators'
``flatten_rope_parameters``."""


@dataclass(frozen=True)
class Proposal:
    """Two settings of a checkpoint: the chain length that it suggests, and the target that it was trained for."""

    chain_len: int = 3
    verifier: str | None = None
    verifier_architectures: tuple[str, ...] = ()


def layer_fields(fields: Fields) -> Fields:
    """Return the fields of the layers. Raises ValueError for a file without them."""
    layers = fields.nested(LAYER)
    if fields.get(LAYER) is None:
        raise ValueError(f"{fields.file} has no {LAYER}, as a head of speculators has: correct it")
    return layers


def proposal_of(fields: Fields) -> Proposal:
    """Return the settings of the first proposal method. Raises ValueError for a lossy method, which accepts tokens that
    differ from greedy decoding's."""
    described = fields.nested("speculators_config")
    methods = described.get("proposal_methods") or [{}]
    if not isinstance(methods, list) or not isinstance(methods[0], dict):
        raise ValueError(f"{fields.file}: proposal_methods must be a list of objects: correct it")
    method = Fields(fields.file, methods[0])
    for key, lossless in (("verifier_accept_k", 1), ("accept_tolerance", 0)):
        if method.get(key, lossless) != lossless:
            raise ValueError(
                f"{fields.file}: {key} is {method[key]}, which is lossy: only {lossless} gives greedy tokens"
            )
    verifier = described.nested("verifier")
    name = verifier.get("name_or_path")
    return Proposal(
        chain_len=method.count("speculative_tokens", 3),
        verifier=str(name) if name else None,
        verifier_architectures=verifier.texts("architectures"),
    )
