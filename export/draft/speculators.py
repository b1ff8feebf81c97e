"""The checkpoint format of vLLM's speculators: ``Eagle3DraftModel``, formerly ``Eagle3Speculator``.

Source: speculators 0.9.0 (its configuration class and what its ``save_pretrained`` writes).
"""

from pathlib import Path
from typing import Any

from eagle3.export.draft.description import DraftDescription
from eagle3.export.safetensors_folder import TensorHeader

ARCHITECTURES = {"Eagle3DraftModel", "Eagle3Speculator"}
_IGNORED = {"t2d", "mask_hidden", "verifier_lm_head.weight", "verifier_norm.weight"}


def recognizes(config: dict[str, Any]) -> bool:
    return "transformer_layer_config" in config and bool(ARCHITECTURES.intersection(config.get("architectures") or []))


def describe(folder: Path, config: dict[str, Any], headers: dict[str, TensorHeader]) -> DraftDescription:
    """Raises ValueError for what ``DraftHead`` does not compute, naming the key or the tensor."""
    from transformers import AutoConfig

    layer = dict(config["transformer_layer_config"])
    model_type = layer.pop("model_type", None)
    if model_type not in ("llama", "qwen3"):
        raise ValueError(f"{folder}: a draft layer of type {model_type!r}, but llama and qwen3 are what we build")
    if layer.get("num_hidden_layers", 1) != 1:
        raise ValueError(f"{folder}: {layer['num_hidden_layers']} draft layers, but heads of one layer are supported")
    names = {name: _own_name(name) for name in headers if name not in _IGNORED}
    own = {names[name]: header for name, header in headers.items() if name in names}
    if "fc.weight" not in own or "layer.hidden_norm.weight" not in own or "lm_head.weight" not in own:
        missing = [n for n in ("fc.weight", "lm_head.weight", "layer.hidden_norm.weight") if n not in own]
        raise ValueError(f"{folder}: no tensor {', '.join(missing)}: this is no EAGLE-3 head (EAGLE 1 and 2 have none)")
    proposal = _greedy_proposal(folder, config)
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    aux = config.get("eagle_aux_hidden_state_layer_ids")
    return DraftDescription(
        format="speculators",
        folder=folder,
        layer=AutoConfig.for_model(model_type, **layer),
        tensor_names=names,
        headers=own,
        target_vocab_size=headers["t2d"].shape[0] if "t2d" in headers else layer["vocab_size"],
        aux_layers=tuple(aux) if aux else None,
        norm_before_residual=config.get("norm_before_residual", False),
        norm_before_fc=config.get("norm_before_fc", False),
        fc_norm=config.get("fc_norm", False),
        norm_output=config.get("norm_output", False),
        chain_len=proposal.get("speculative_tokens", 3),
        verifier=verifier.get("name_or_path"),
    )


def _own_name(name: str) -> str:
    return name.removeprefix("model.").replace("layers.0.", "layer.", 1)


def _greedy_proposal(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The first proposal method. Refuses one that accepts what greedy decoding would not say."""
    proposals = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    proposal = proposals[0]
    for key, lossless in (("verifier_accept_k", 1), ("accept_tolerance", 0)):
        if proposal.get(key, lossless) != lossless:
            raise ValueError(f"{folder}: {key} is {proposal[key]}, which is lossy: only {lossless} gives greedy tokens")
    return proposal
