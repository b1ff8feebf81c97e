"""Checks that an assistant fits a target. It attends to the target's keys, so their shapes and rotations must be the
same as in its training."""

from typing import TYPE_CHECKING, Any

from eagle3.export.draft.kinds.gemma4_assistant.reading import ORDERING, AssistantDescription

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def check_pair(
    draft: AssistantDescription, target_config: "PreTrainedConfig", _taps: tuple[int, ...], _trained_for: str
) -> None:
    """Raise ValueError if the head cannot belong to the target; the message has both values."""
    other = "likely not a matched pair: type --draft with the assistant of this target"
    if not target_config.model_type.startswith("gemma4"):
        raise ValueError(f"the draft is a Gemma 4 assistant, but the target is a {target_config.model_type}: {other}")
    if draft.hidden_size != target_config.hidden_size:
        raise ValueError(
            f"the draft takes states of {draft.hidden_size} (backbone_hidden_size), but the target's hidden size is "
            f"{target_config.hidden_size}: {other}"
        )
    for kind in sorted(set(draft.layer.layer_types)):
        kept = _attended(target_config, kind, target_config.num_hidden_layers - _sharing(target_config))
        if kept is None:
            raise ValueError(f"the draft has layers of {kind}, but the target keeps no keys of that kind: {other}")
        for what, value in (_attended(draft.layer, kind, draft.layer.num_hidden_layers) or {}).items():
            if value != kept[what]:
                raise ValueError(
                    f"the draft attends to keys of {kind} with {what} {value}, but the target's have {kept[what]}: "
                    f"{other}"
                )
    if draft.ordered:
        _check_ordering(draft)


def _sharing(config: Any) -> int:  # noqa: ANN401 - transformers' text configuration
    """Return the number of layers, at the end of the model, that use other layers' keys."""
    return getattr(config, "num_kv_shared_layers", 0) or 0


def _attended(config: Any, kind: str, layers: int) -> dict[str, Any] | None:  # noqa: ANN401
    """Return the properties of the keys to which layers of a kind attend; None if the first ``layers`` layers have none
    of that kind."""
    found = [index for index in range(layers) if config.layer_types[index] == kind]
    if not found:
        return None
    layer, rope = config.per_layer_config[found[-1]], config.rope_parameters[kind]
    return {
        "num_key_value_heads": layer.num_key_value_heads,
        "head_dim": layer.head_dim,
        "sliding_window": config.sliding_window if kind == "sliding_attention" else None,
        **{f"{key} in rope_parameters": rope.get(key) for key in ("rope_type", "rope_theta", "partial_rotary_factor")},
    }


def _check_ordering(draft: AssistantDescription) -> None:
    tokens, centroids = draft.layer.vocab_size, draft.config.num_centroids
    if tokens % centroids or draft.config.centroid_intermediate_top_k > centroids:
        raise ValueError(
            f"{draft.folder}: num_centroids {centroids} must divide vocab_size {tokens} and be at least "
            f"centroid_intermediate_top_k {draft.config.centroid_intermediate_top_k}: correct config.json"
        )
    if "token_ordering" not in draft.headers:
        return  # reported with all other missing tensors
    ids = draft.source.tensor(ORDERING).long()
    if ids.sort().values.tolist() != list(range(tokens)):
        raise ValueError(
            f"{draft.folder}: {ORDERING} has {ids.unique().numel()} different ids from {int(ids.min())} to "
            f"{int(ids.max())}, but must be a permutation of 0..{tokens - 1}: does a shard belong to another head?"
        )
