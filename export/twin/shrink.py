"""A shrunken twin of a text configuration: sizes, counts and lengths cut, every other field kept.

What a field does to the numbers (scales, caps, kinds of rope, biases, which layer is of which kind) shows at any size.
It goes by the names of fields, except for the kinds of layers (``layers.py``).
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig

from eagle3.export.twin.layers import fewest_layers

HEADS, WIDTH, EXPERTS, NARROW = 4, 96, 4, 64
"""At most, where nothing else asks for more; ``WIDTH`` where hidden_size does not follow from the heads."""
LENGTH, SHORTEST, POSITIONS = 32, 16, 256
"""Tokens: the longest length that a prompt passes, the shortest one, max_position_embeddings where nothing rules it."""

SIZES = {
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "dense_intermediate_size"), 224),
    **dict.fromkeys(("intermediate_size_mlp", "shared_intermediate_size", "decoder_ffn_dim"), 160),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), NARROW),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 320),
    **{
        "q_lora_rank": 48,
        "kv_lora_rank": 40,
        "hidden_size_per_layer_input": 32,
        "shared_expert_intermediate_size": 128,
    },
}
"""Sizes that stand alone, and the largest value of each in a twin."""
HEAD_COUNTS = {
    "attention": (
        ("num_attention_heads", "num_key_value_heads"),
        ("num_attention_heads", "num_kv_heads"),
        ("num_attention_heads_per_layer", "num_key_value_heads"),
        ("swa_num_attention_heads", "swa_num_key_value_heads"),
    ),
    "linear attention": (("linear_num_value_heads", "linear_num_key_heads"),),
    "indexer": (("index_n_heads", "index_n_heads"),),
}
"""Of queries, and of what they share."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
EXPERT_GROUPS = ("n_group", "num_expert_group")
RUN_LENGTHS = (
    *("sliding_window", "sliding_window_size", "attention_window_size", "window_size", "local_attention"),
    *("attention_chunk_size", "floor_scale", "log_scaling_n_floor", "index_topk"),
)
"""In tokens, and compared with positions in a forward."""
ORIGINAL, MAX_POSITIONS = "original_max_position_embeddings", "max_position_embeddings"


def shrink(config: PreTrainedConfig) -> PreTrainedConfig:
    """A fresh small configuration of the same class, in float32, with null special ids (0 where it takes no null).

    No size, count or length in it is larger than in ``config``, a text configuration, which is not changed. Raises
    whatever transformers raises for a configuration that it cannot build.
    """
    common = {own: name for name, own in config.attribute_map.items()}  # n_embd to hidden_size
    fields = {common.get(own, own): value for own, value in config.to_dict().items()}
    needed = {field.name for field in dataclasses.fields(config) if field.type is int}
    fields |= {name: 0 if name in needed else None for name in fields if name.endswith("_token_id")}
    fields.pop("quantization_config", None)  # says how a checkpoint is stored
    fields["dtype"] = "float32"
    _cut_lengths(fields)
    _cut_heads(fields)
    _cut_experts(fields)
    for part in _parts(fields):
        part |= {name: _at_most(part[name], largest) for name, largest in SIZES.items() if name in part}

    def build(fields: dict[str, Any]) -> PreTrainedConfig:
        return type(config).from_dict({config.attribute_map.get(name, name): value for name, value in fields.items()})

    return fewest_layers(fields, build)


def prompt_length(config: PreTrainedConfig) -> int:
    """Tokens of a prompt that passes every length of ``config``, a shrunken one: two and a half times the longest."""
    lengths = (part[name] for part, name in _lengths(config.to_dict()))
    wanted = 5 * max((length for length in lengths if length <= LENGTH), default=LENGTH) // 2
    positions = getattr(config, MAX_POSITIONS, None)
    return min(wanted, positions - 4) if positions else wanted  # 4: a rejected window past the end


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    """The fields and every dictionary in them: rope parameters, also per layer type, and overrides per layer."""
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from _parts(inner)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _at_most(value: Any, largest: int) -> Any:
    if isinstance(value, list):
        return [_at_most(item, largest) for item in value]
    return min(value, largest) if _is_count(value) else value


def _lengths(fields: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    names = (*RUN_LENGTHS, ORIGINAL)
    return [(part, name) for part in _parts(fields) for name in names if _is_count(part.get(name))]


def _cut_lengths(fields: dict[str, Any]) -> None:
    """By one ratio, so that what a prompt passes (any length below max_position_embeddings) is at most ``LENGTH``.

    A yarn table is made from its original length and never compared with a position. It stays unpassed: by the table's
    formula beta_fast has no effect on less than 2 pi beta_fast tokens.
    """
    positions = fields.get(MAX_POSITIONS) or math.inf

    def table(part: dict[str, Any], name: str) -> int:
        yarn = name == ORIGINAL and part.get("rope_type", part.get("type")) == "yarn"
        return int(10 * (part.get("beta_fast") or 32)) if yarn and "llama_4_scaling_beta" not in part else 0

    reached = [(part, name) for part, name in _lengths(fields) if part[name] < positions]
    longest = max((part[name] for part, name in reached if not table(part, name)), default=LENGTH)

    def cut(part: dict[str, Any], name: str) -> int:
        return min(part[name], table(part, name) or max(round(part[name] * LENGTH / longest), SHORTEST))

    # Where a factor is not given, it is max_position_embeddings by the original length.
    ruled = [cut(part, name) * positions // part[name] for part, name in reached if name == ORIGINAL]
    fewer = min(positions, max(ruled, default=POSITIONS))
    for part, name in _lengths(fields):
        part[name] = cut(part, name) if part[name] < positions else part[name] * fewer // positions
    for part in _parts(fields):
        if _is_count(part.get(MAX_POSITIONS)):
            part[MAX_POSITIONS] = min(part[MAX_POSITIONS], fewer)


def _cut_heads(fields: dict[str, Any]) -> None:
    """Fewer heads of the same size; sharing, and which parts of the model have more heads than others, stay."""
    heads, width = fields.get("num_attention_heads"), fields.get("hidden_size")
    head_dim = fields.get("head_dim") or (width // heads if heads and width else 0)
    for names in HEAD_COUNTS.values():
        found = [
            (part, query, shared, part.get(query, fields.get(query)), part.get(shared, fields.get(shared)))
            for part in _parts(fields)
            for query, shared in names
            if query in part or shared in part
        ]
        pairs = {(count, keys or count) for *_, queries, keys in found for count in _listed(queries)}
        cuts = _head_cuts(pairs, HEADS if head_dim < 128 else HEADS // 2)
        for part, query, shared, queries, keys in found:
            fewer = [cuts[count, keys or count] for count in _listed(queries)]
            if fewer and part.get(query):
                part[query] = [cut for cut, _ in fewer] if isinstance(queries, list) else fewer[0][0]
            if fewer and part.get(shared):
                part[shared] = fewer[0][1]
    if heads and width:
        left = fields["num_attention_heads"] * head_dim
        # From 256 on even a few heads are wide, and every class with such heads takes their size from head_dim.
        follows = heads * head_dim == width and not (fields.get("head_dim") and head_dim >= 256)
        fields["hidden_size"] = min(width, left if follows else WIDTH - 16 * (left == WIDTH))


def _listed(value: Any) -> list[int]:
    return value if isinstance(value, list) else [value] if _is_count(value) else []


def _head_cuts(pairs: set[tuple[int, int]], heads: int) -> dict[tuple[int, int], tuple[int, int]]:
    """(queries, keys) to fewer of both: distinct counts stay distinct, as do one key a query and one key for all."""
    groups = sorted({k for q, k in pairs if 1 < k < q})
    keys = {k: 2 ** (i + 1) for i, k in enumerate(groups)}
    least = 2 * max(keys.values()) if keys else heads
    queries = {q: least * (i + 1) for i, q in enumerate(sorted({q for q, _ in pairs}))}
    if any(cut > count for count, cut in (*keys.items(), *queries.items())):
        return {pair: pair for pair in pairs}
    return {(q, k): (queries[q], queries[q] if k == q else keys.get(k, 1)) for q, k in pairs}


def _cut_experts(fields: dict[str, Any]) -> None:
    """Twice as many as a token chooses, also within the groups that it chooses; each of them narrow."""
    for part in _parts(fields):
        groups = next((part[name] for name in EXPERT_GROUPS if part.get(name)), 1)
        chosen = next((part[name] for name in TOP_K if part.get(name)), 1)
        least = max(EXPERTS, 2 * groups, 2 * chosen * groups // (part.get("topk_group") or groups))
        for name in EXPERT_COUNTS:
            if _is_count(part.get(name)):
                part[name] = min(part[name], groups * math.ceil(least / groups))
                if "intermediate_size" in part and "moe_intermediate_size" not in part:
                    part["intermediate_size"] = _at_most(part["intermediate_size"], NARROW)
