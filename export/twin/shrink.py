"""Makes the configuration of a small copy: cuts sizes, counts and lengths, and keeps every other field.

The effect of a field on the numbers (scales, caps, kinds of rope, biases, which layer is of which kind) shows at any
size. Fields are recognized by their names; the kinds of layers are found by ``layers.py``.
"""

import dataclasses
import math
from typing import Any

from transformers import PreTrainedConfig

from eagle3.export.twin.layers import fewest_layers
from eagle3.export.twin.lengths import MAX_POSITIONS, ORIGINAL, RUN_LENGTHS, cut_lengths, is_count, parts
from eagle3.targets.text_part import fields_of, is_part, like

HEADS, WIDTH, EXPERTS, NARROW = 4, 96, 4, 64
"""The largest number of heads, hidden size, number of experts and expert width of a small copy, unless another field
requires more. ``WIDTH`` is for a hidden_size that does not follow from the heads."""
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
        "moe_shared_expert_intermediate_size": 128,
        "moe_latent_size": 48,
    },
    **dict.fromkeys(("mamba_d_state", "ssm_state_size"), 24),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 32),
}
"""Sizes that depend on no other size, and the largest value of each in a small copy."""
HEAD_COUNTS = {
    "attention": (
        ("num_attention_heads", "num_key_value_heads"),
        ("num_attention_heads", "num_kv_heads"),
        ("num_attention_heads_per_layer", "num_key_value_heads"),
        ("swa_num_attention_heads", "swa_num_key_value_heads"),
    ),
    "linear attention": (
        ("linear_num_value_heads", "linear_num_key_heads"),
        ("linear_num_heads", "linear_num_heads"),
    ),
    "indexer": (("index_n_heads", "index_n_heads"),),
}
"""Pairs of field names: the number of query heads, and the number of key heads that they share."""
MAMBA = (
    ("mamba_n_heads", "mamba_n_groups", "mamba_d_head", "mamba_expand", "mamba_d_ssm"),
    ("mamba_num_heads", "n_groups", "mamba_head_dim", None, None),
)
"""The names of Mamba 2's heads, groups of heads, head size, ratio of the heads' width to hidden_size (None where the
width is free) and width of all heads, where it is a field."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
EXPERT_GROUPS = ("n_group", "num_expert_group")
LAYERS = "num_hidden_layers"


def shrink(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a new small configuration of the same class, in float32, with null special ids (0 where null is invalid).

    No size, count or length in it is larger than in ``config``, a text configuration, which is not changed. Raises
    transformers' own error for a configuration that it cannot build.
    """
    fields = common_fields(config)
    needed = {field.name for field in dataclasses.fields(config) if field.type is int}
    if is_part(config):
        needed.add("pad_token_id")  # some multimodal models use it as the image placeholder
    fields |= {name: 0 if name in needed else None for name in fields if name.endswith("_token_id")}
    fields.pop("quantization_config", None)  # describes how a checkpoint is stored
    fields.pop("linear_attn_config", None)  # Kimi's class would prefer its sizes to the fields that have been cut
    fields["dtype"] = "float32"
    cut_lengths(fields)
    _cut_heads(fields)
    _cut_mamba(fields)
    _cut_experts(fields)
    for _, part in parts(fields):
        part |= {name: _at_most(part[name], largest) for name, largest in SIZES.items() if name in part}

    return fewest_layers(fields, lambda fewer: from_common_fields(config, fewer))


def common_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields under the names that most classes have, such as ``hidden_size`` for ``n_embd``."""
    common = {own: name for name, own in config.attribute_map.items()}
    fields = {common.get(own, own): value for own, value in fields_of(config).items()}
    if isinstance(getattr(type(config), LAYERS, None), property):  # Nemotron-H counts the entries of a list
        fields[LAYERS] = config.num_hidden_layers
    return fields


def from_common_fields(config: PreTrainedConfig, fields: dict[str, Any]) -> PreTrainedConfig:
    """Return a configuration of the class of ``config`` with these fields. If ``config`` is part of a multimodal
    configuration, so is the result."""
    names = config.attribute_map
    return like(type(config).from_dict({names.get(name, name): value for name, value in fields.items()}), config)


def known_fields() -> set[str]:
    """Return the names of the numbers that are known to be sizes, counts or lengths."""
    heads = {name for pairs in HEAD_COUNTS.values() for pair in pairs for name in pair}
    heads |= {name for names in MAMBA for name in names if name}
    sizes = {"hidden_size", "head_dim", LAYERS, MAX_POSITIONS, ORIGINAL}
    return heads | sizes | {*SIZES, *EXPERT_COUNTS, *TOP_K, *EXPERT_GROUPS, *RUN_LENGTHS}


def _at_most(value: object, largest: int) -> object:
    if isinstance(value, list):
        return [_at_most(item, largest) for item in value]
    return min(value, largest) if is_count(value) else value


def _cut_heads(fields: dict[str, Any]) -> None:
    """Cut the numbers of heads, in place. The size of a head, the sharing of keys, and the order of the numbers
    stay."""
    heads, width = fields.get("num_attention_heads"), fields.get("hidden_size")
    head_dim = fields.get("head_dim") or (width // heads if heads and width else 0)
    for names in HEAD_COUNTS.values():
        found = [
            (part, query, shared, part.get(query, fields.get(query)), part.get(shared, fields.get(shared)))
            for _, part in parts(fields)
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
        apart = min(width, WIDTH - 16 * (left == WIDTH))
        # Llama's class requires a width that its number of heads divides, for any head_dim.
        apart -= apart % (2 * fields["num_attention_heads"])
        fields["hidden_size"] = min(width, left if follows or not apart else apart)


def _listed(value: Any) -> list[int]:  # noqa: ANN401 - a number, a list of them, or anything else
    return value if isinstance(value, list) else [value] if is_count(value) else []


def _head_cuts(pairs: set[tuple[int, int]], heads: int) -> dict[tuple[int, int], tuple[int, int]]:
    """Map each pair of numbers (query heads, key heads) to a smaller pair. Distinct pairs stay distinct. One key head
    per query head, or one for all, stays so."""
    groups = sorted({k for q, k in pairs if 1 < k < q})
    keys = {k: 2 ** (i + 1) for i, k in enumerate(groups)}
    # More query heads per key head than key heads, so that neither number can be mistaken for the other.
    least = 3 * max(keys.values()) if keys else heads
    queries = {q: least * (i + 1) for i, q in enumerate(sorted({q for q, _ in pairs}))}
    if any(cut > count for count, cut in (*keys.items(), *queries.items())):
        return {pair: pair for pair in pairs}
    return {(q, k): (queries[q], queries[q] if k == q else keys.get(k, 1)) for q, k in pairs}


def _cut_mamba(fields: dict[str, Any]) -> None:
    """Cut Mamba 2's heads and groups, in place. Several groups stay several, of several heads each.

    Where the width of all heads follows from hidden_size, the most heads that fit are a divisor of it.
    """
    for count, shared, size, ratio, width in MAMBA:
        if not is_count(fields.get(count)) or not is_count(fields.get(size)):
            continue
        heads, groups, d_head = fields[count], fields[shared], fields[size]
        few = min(groups, 2)
        fits = [each for each in range(2 * few, heads + 1, few) if each <= 3 * few or each == heads]
        if ratio and not fields.get(width or ""):
            inner = fields[ratio] * fields["hidden_size"]
            fits = [each for each in range(few, heads + 1, few) if inner % each == 0 and inner // each <= d_head]
            d_head = inner // fits[0] if fits else d_head
        if fits and heads % groups == 0:
            fields |= {count: fits[0], shared: few, size: d_head}
            if width and fields.get(width):
                fields[width] = fits[0] * d_head


def _cut_experts(fields: dict[str, Any]) -> None:
    """Keep twice as many experts as a token chooses, also within groups of experts, and make each expert narrow."""
    for _, part in parts(fields):
        groups = next((part[name] for name in EXPERT_GROUPS if part.get(name)), 1)
        chosen = next((part[name] for name in TOP_K if part.get(name)), 1)
        least = max(EXPERTS, 2 * groups, 2 * chosen * groups // (part.get("topk_group") or groups))
        for name in EXPERT_COUNTS:
            if is_count(part.get(name)):
                part[name] = min(part[name], groups * math.ceil(least / groups))
                if "intermediate_size" in part and "moe_intermediate_size" not in part:
                    part["intermediate_size"] = _at_most(part["intermediate_size"], NARROW)
