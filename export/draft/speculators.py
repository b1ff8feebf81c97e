"""The checkpoint format of vLLM's speculators: ``Eagle3DraftModel``, formerly ``Eagle3Speculator``.

Source: speculators 0.9.0 (its configuration class and what its ``save_pretrained`` writes).
"""

from pathlib import Path
from typing import Any

from eagle3.export.checkpoints.safetensors_folder import TensorHeader
from eagle3.export.draft.description import DraftDescription

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
    names = {name: own for name in headers if (own := _own_name(name)) not in _IGNORED}
    own = {names[name]: header for name, header in headers.items() if name in names}
    if "fc.weight" not in own or "layer.hidden_norm.weight" not in own:
        missing = "fc.weight" if "fc.weight" not in own else "hidden_norm.weight"
        raise ValueError(f"{folder}: no tensor {missing}: this is no EAGLE-3 head (EAGLE 1 and 2 have none)")
    if "lm_head.weight" not in own:
        raise ValueError(f"{folder}: no lm_head.weight: heads that share the target's lm_head are not supported")
    if config.get("fc_norm", False) != any(name.startswith("fc_norm.") for name in own):
        raise ValueError(f"{folder}: fc_norm is {config.get('fc_norm', False)} in config.json, but the tensors differ")
    target_vocab_size = _target_vocab_size(headers) or layer.get("vocab_size")
    if target_vocab_size is None:
        raise ValueError(f"{folder}: neither t2d nor vocab_size says how many tokens the target has")
    warnings = []
    if "norm_before_residual" not in config:
        warnings.append(
            f"{folder / 'config.json'} has no norm_before_residual: taken as false, as speculators does; vLLM takes it "
            "as true. If hardly anything is accepted, write it into config.json"
        )
    proposal = _greedy_proposal(folder, config)
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    aux = config.get("eagle_aux_hidden_state_layer_ids")
    return DraftDescription(
        format="speculators",
        folder=folder,
        layer=AutoConfig.for_model(model_type, **layer),
        tensor_names=names,
        headers=own,
        target_vocab_size=target_vocab_size,
        aux_layers=tuple(aux) if aux else None,
        norm_before_residual=config.get("norm_before_residual", False),
        norm_before_fc=config.get("norm_before_fc", False),
        norm_output=config.get("norm_output", False),
        chain_len=proposal.get("speculative_tokens") or 3,
        verifier=verifier.get("name_or_path"),
        warnings=tuple(warnings),
    )


def _target_vocab_size(headers: dict[str, TensorHeader]) -> int | None:
    return next((header.shape[0] for name, header in headers.items() if _own_name(name) == "t2d"), None)


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
