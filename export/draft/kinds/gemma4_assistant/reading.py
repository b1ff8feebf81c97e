"""Reads a checkpoint of an assistant, as transformers' ``Gemma4AssistantForCausalLM`` saves it."""

import re
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from eagle3.export.checkpoints.json_fields import Fields, read_object
from eagle3.export.checkpoints.source import Source
from eagle3.export.draft.common.description import DraftDescription
from eagle3.export.draft.common.field import STATE, Field, HeadReading, flag_field, parse_float
from eagle3.export.draft.kinds import GEMMA4_ASSISTANT

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
ORDERING = "masked_embedding.token_ordering"
_NAMES = {r"model\.(layers\..*|norm\.weight)": r"\1", r"masked_embedding\.(.*)": r"\1"}
_UNREAD = r".*rotary_emb\..*inv_freq"


@dataclass(frozen=True, kw_only=True)
class AssistantDescription(DraftDescription):
    """The description of a Gemma 4 assistant. ``layer`` is transformers' text configuration of its layers, and
    ``config`` is the whole configuration."""

    config: "PreTrainedConfig"
    takes_final_state: bool = True
    embeds_as_target: bool = True
    """True if tokens are embedded by the target's module, including its scale. If False, the rows of the embedding are
    used unscaled."""

    @property
    def hidden_size(self) -> int:
        """The width of a state, which is the target's. The width of the head's layers is ``layer.hidden_size``."""
        return self.config.backbone_hidden_size

    @property
    def kinds(self) -> list[str]:
        """The kinds of layers whose keys the head attends to."""
        return sorted(set(self.layer.layer_types))

    @property
    def keys(self) -> tuple[tuple[int, int], ...]:
        firsts = (self.layer.layer_types.index(kind) for kind in self.kinds if self.has_cache)
        layers = map(self.layer.per_layer_config.__getitem__, firsts)
        return tuple((layer.num_key_value_heads, layer.head_dim) for layer in layers)

    @property
    def feature_size(self) -> int:
        return self.hidden_size + self.has_cache + sum(2 * heads * size for heads, size in self.keys)

    def in_program(self, shares_caches: bool) -> Self:
        """Return the description of a head that attends to the target's caches, or to copies of their rows."""
        windows = (self.layer.sliding_window if kind == "sliding_attention" else 0 for kind in self.kinds)
        return replace(self, windows=() if shares_caches else tuple(windows))

    @property
    def ordered(self) -> bool:
        """True if only the tokens of the best centroids are scored."""
        return self.config.use_ordered_embeddings


def read(fields: Fields, source: Source) -> AssistantDescription:
    """Describe the assistant with the configuration ``fields``. Raises ValueError with one line if transformers cannot
    read its ``config.json`` as an assistant, or if a tensor occurs twice."""
    whole = _configuration(fields.file.parent)
    text, headers = whole.get_text_config(), source.headers()
    Fields(fields.file, vars(text)).number("rms_norm_eps", most=1)
    vocabulary = "embed_tokens.weight" if whole.use_ordered_embeddings else LM_HEAD
    given = EMBEDDING if whole.tie_word_embeddings and EMBEDDING in headers else LM_HEAD
    left_out = {EMBEDDING, LM_HEAD} - {given}  # a tied copy or an unused embedding
    names = {name: own_name(name, vocabulary) for name in headers if name not in left_out}
    names = {name: own for name, own in names.items() if not re.fullmatch(_UNREAD, name)}
    return AssistantDescription(
        kind=GEMMA4_ASSISTANT,
        dialect="transformers",
        source=source,
        layer=text,
        config=whole,
        tensor_names=names,
        headers={own: headers[name] for name, own in names.items()},
        target_vocab_size=text.vocab_size,
        chain_len=_chain_len(fields),
    )


def own_name(name: str, vocabulary: str) -> str:
    """Return the module's name of a tensor. ``vocabulary`` is the name of the table whose rows score tokens."""
    if name in (EMBEDDING, LM_HEAD):
        return vocabulary
    for pattern, own in _NAMES.items():
        if re.fullmatch(pattern, name):
            return re.sub(pattern, own, name)
    return name


def _configuration(folder: Path) -> "PreTrainedConfig":
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config.get_text_config().per_layer_config  # noqa: B018 - raises if the layers cannot be made from it
    except Exception as error:  # transformers validates field by field, with errors of its own kinds
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{folder / 'config.json'}: transformers cannot read it as an assistant ({reason[:200]})"
        ) from error
    if not hasattr(config, "backbone_hidden_size"):
        raise ValueError(
            f"{folder / 'config.json'} names a Gemma 4 assistant in architectures, but its model_type is "
            f"{config.model_type}: correct one of them"
        )
    return config


def _chain_len(fields: Fields) -> int:
    """Return the draft tokens a round that the folder suggests, by default 3."""
    file = fields.file.with_name("generation_config.json")
    given = Fields(file, read_object(file) if file.is_file() else fields)
    return given.count("num_assistant_tokens", 3)


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


def _theta_of(kind: str) -> Field:
    """Return the field for the RoPE base of all layers with this kind of attention."""

    def rope(reading: HeadReading) -> dict[str, Any]:
        return reading.draft.layer.rope_parameters.get(kind) or {}

    def applied(reading: HeadReading, theta: float) -> HeadReading:
        layer = deepcopy(reading.draft.layer)
        layer.rope_parameters[kind]["rope_theta"] = theta
        return reading.with_draft(layer=layer)

    def others(reading: HeadReading) -> Iterable[float]:
        theirs = (getattr(reading.target, "rope_parameters", None) or {}).get(kind) or {}
        found = (theirs.get("rope_theta"), 10_000.0, 1_000_000.0)
        now = rope(reading).get("rope_theta")
        return [float(theta) for theta in dict.fromkeys(found) if theta and theta != now]

    return Field(
        f"rope_theta_{kind.removesuffix('_attention')}",
        parse_float,
        lambda reading: rope(reading).get("rope_theta"),
        applied,
        others,
        keys=("rope_parameters", "rope_theta"),
    )


FIELDS: tuple[Field, ...] = (
    STATE,
    flag_field("embeds_as_target", "embeds_as_target"),
    _theta_of("sliding_attention"),
    _theta_of("full_attention"),
)
