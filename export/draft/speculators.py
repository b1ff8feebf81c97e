"""The checkpoint format of vLLM's speculators: ``Eagle3DraftModel``, formerly ``Eagle3Speculator``.

Source: speculators 0.9.0 (its configuration class and what its ``save_pretrained`` writes).
"""

import json
from pathlib import Path
from typing import Any

from eagle3.export.checkpoints.json_fields import boolean, count, layer_ids, nested
from eagle3.export.checkpoints.rope import check_rope
from eagle3.export.checkpoints.source import Source, TensorHeader
from eagle3.export.draft.description import DraftDescription

ARCHITECTURES = {"Eagle3DraftModel", "Eagle3Speculator"}
LAYERS = ("llama", "qwen3")
_SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "vocab_size"),
)
_IGNORED = {"t2d", "mask_hidden", "verifier_lm_head.weight", "verifier_norm.weight"}


def recognizes(config: dict[str, Any]) -> bool:
    architectures = config.get("architectures")
    named = {name for name in architectures if isinstance(name, str)} if isinstance(architectures, list) else set()
    return "transformer_layer_config" in config and bool(ARCHITECTURES & named)


def describe(source: Source, config: dict[str, Any], headers: dict[str, TensorHeader]) -> DraftDescription:
    """Raises ValueError for what ``DraftHead`` does not compute, naming the key or the tensor."""
    folder, file = source.path, source.path / "config.json"
    layer = layer_config(file, config)
    check_rope(layer, f"{file}: transformer_layer_config")
    names = {name: own for name in headers if (own := own_name(name)) not in _IGNORED}
    own = {names[name]: header for name, header in headers.items() if name in names}
    if len(own) != len(names):
        twice = next(name for name in names if list(names.values()).count(names[name]) > 1)
        raise ValueError(f"{folder} has {names[twice]} twice, once as {twice}: which one is meant?")
    if "fc.weight" not in own or "layer.hidden_norm.weight" not in own:
        missing = "fc.weight" if "fc.weight" not in own else "hidden_norm.weight"
        raise ValueError(f"{folder}: no tensor {missing}: this is no EAGLE-3 head (EAGLE 1 and 2 have none)")
    if "lm_head.weight" not in own:
        raise ValueError(f"{folder}: no lm_head.weight: heads that share the target's lm_head are not supported")
    spoken = count(config, "draft_vocab_size", None, file)
    if spoken is not None and spoken != own["lm_head.weight"].shape[0]:
        raise ValueError(
            f"{folder}: draft_vocab_size is {spoken} in config.json, but lm_head.weight has "
            f"{own['lm_head.weight'].shape[0]} rows: the two are of different heads, or one is damaged"
        )
    fc_norm = boolean(config, "fc_norm", False, file)
    if fc_norm != any(name.startswith("fc_norm.") for name in own):
        raise ValueError(f"{folder}: fc_norm is {fc_norm} in config.json, but the tensors differ")
    selector = next((name for name in headers if own_name(name) == "t2d"), None)
    target_vocab_size = headers[selector].elements if selector else layer.vocab_size
    warnings = []
    if config.get("norm_before_residual") is None:
        warnings.append(
            f"{file} has no norm_before_residual: taken as false, as speculators does; vLLM takes it "
            "as true. If hardly anything is accepted, write it into config.json"
        )
    described = nested(config, "speculators_config", file)
    proposal = _greedy_proposal(file, described)
    verifier = nested(described, "verifier", file).get("name_or_path")
    return DraftDescription(
        format="speculators",
        source=source,
        layer=layer,
        tensor_names=names,
        headers=own,
        target_vocab_size=target_vocab_size,
        aux_layers=layer_ids(config, "eagle_aux_hidden_state_layer_ids", file),
        norm_before_residual=boolean(config, "norm_before_residual", False, file),
        norm_before_fc=boolean(config, "norm_before_fc", False, file),
        norm_output=boolean(config, "norm_output", False, file),
        selector=selector,
        window=_window(file, layer),
        chain_len=count(proposal, "speculative_tokens", 3, file),
        verifier=str(verifier) if verifier else None,
        warnings=tuple(warnings),
    )


def layer_config(file: Path, config: dict[str, Any]) -> Any:
    """transformers' configuration of the decoder layer."""
    from transformers import AutoConfig
    from transformers.activations import ACT2FN

    layer = dict(nested(config, "transformer_layer_config", file))
    model_type = layer.pop("model_type", None)
    if model_type not in LAYERS:
        raise ValueError(f"{file}: a draft layer of type {model_type!r}, but {' and '.join(LAYERS)} are what we build")
    for key in _SIZES:
        count(layer, key, None, file)
    activation = layer.get("hidden_act", "silu")
    if not isinstance(activation, str) or activation not in ACT2FN:
        raise ValueError(
            f"{file}: hidden_act is {json.dumps(activation)}, which transformers does not know: correct it"
        )
    layers = count(layer, "num_hidden_layers", 1, file)
    if layers != 1:
        raise ValueError(f"{file}: {layers} draft layers, but heads of one layer are supported")
    try:
        return AutoConfig.for_model(model_type, **layer | {"num_hidden_layers": layers})
    except Exception as error:  # transformers validates field by field, with errors of its own kinds
        cause = error.__cause__ if isinstance(error.__cause__, TypeError | ValueError) else error
        reason = " ".join(str(cause).partition(" Errors: ")[0].split())
        raise ValueError(
            f"{file}: transformers takes no such transformer_layer_config ({reason}): correct it"
        ) from error


def _window(file: Path, layer: Any) -> int:
    """The sliding window of the draft's own attention in tokens, 0 for full attention.

    ``layer_types`` decides, as in speculators and vLLM: a ``sliding_window`` that no layer type names is not used.
    """
    (kind,) = (getattr(layer, "layer_types", None) or ["full_attention"])[:1]
    if kind == "full_attention":
        return 0
    window = getattr(layer, "sliding_window", None)
    if kind != "sliding_attention" or isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ValueError(
            f"{file}: layer_types[0] is {kind!r} with sliding_window {window!r}, but a draft layer has "
            "full_attention, or sliding_attention with a window in tokens"
        )
    return window


def own_name(name: str) -> str:
    """``DraftHead``'s name of a tensor: the layer is ``layers.0`` or ``midlayer``, either may be under ``model``."""
    name = name.removeprefix("model.")
    for prefix in ("layers.0.", "midlayer."):
        if name.startswith(prefix):
            return f"layer.{name.removeprefix(prefix)}"
    return name


def _greedy_proposal(file: Path, described: dict[str, Any]) -> dict[str, Any]:
    """The first proposal method. Refuses one that accepts what greedy decoding would not say."""
    proposals = described.get("proposal_methods") or [{}]
    if not isinstance(proposals, list) or not isinstance(proposals[0], dict):
        raise ValueError(f"{file}: proposal_methods must be a list of objects: correct it")
    proposal = proposals[0]
    for key, lossless in (("verifier_accept_k", 1), ("accept_tolerance", 0)):
        if proposal.get(key, lossless) != lossless:
            raise ValueError(f"{file}: {key} is {proposal[key]}, which is lossy: only {lossless} gives greedy tokens")
    return proposal
