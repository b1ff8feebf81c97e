"""Derives from a configuration each key of a GGUF file's metadata: the sizes, constants and switches by which llama.cpp
computes, as its converter writes them (``conversion/`` there, per architecture)."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from eagle3.targets.spec import CONVOLUTION, RECURRENT, layer_windows

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FULL = "full_attention"
HARMLESS = ("tensor_data_layout", "rope.scaling.finetuned")
"""Keys that have no effect on the model's output."""
_MTP_LAYERS = "num_nextn_predict_layers", "mtp_num_hidden_layers"
_MAMBA = "mamba_d_conv", "mamba_d_state", "mamba_n_groups", "mamba_n_heads", "mamba_d_head"
_NEMOTRON = "conv_kernel", "ssm_state_size", "n_groups", "mamba_num_heads", "mamba_head_dim"
"""The fields of Mamba 2: taps, size of a state, groups, heads, width of a head."""
_MLPS = "mlp", "moe"
"""The kinds of Nemotron-H's layers that have neither attention nor a state."""
_SHARED_WIDTHS = ("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size")
_SIGMOID = 2
"""llama.cpp's number for a router whose scores are sigmoids."""
_QWEN35_SECTIONS = 11, 11, 10
"""The rope sections of Qwen3.5 where its configuration has none, as llama.cpp's converter writes them."""


class Implied(NamedTuple):
    """The value that a configuration implies for one key of the metadata. ``key`` is that key without the
    architecture's name, and ``field`` is the field of ``config.json``. ``value`` is what the configuration implies: one
    value, or a list with one for each layer; None means that the key is not compared. ``absent`` is the value that
    llama.cpp uses if the file lacks the key; None means that it uses ``value``."""

    key: str
    field: str
    value: Any
    absent: Any = None


def implied(config: "PreTrainedConfig") -> Iterator[Implied]:
    """Yield the implied value of each key. ``config`` is transformers' text configuration."""
    windows = [window.tokens for window in layer_windows(config)]
    layers, full, sliding = config.per_layer_config, None, None
    for layer, window in zip(layers, windows, strict=True):
        full, sliding = (full, layer) if window else (layer, sliding)
    heads, one = config.num_attention_heads, full or sliding
    width = getattr(one, "head_dim", None) or config.hidden_size // heads
    narrow = sliding and (getattr(sliding, "head_dim", None) or width)
    unsaid = None if config.model_type == "qwen3_next" else 0  # published with an MTP layer that it does not mention
    yield Implied("nextn_predict_layers", "num_nextn_predict_layers", _said(config, *_MTP_LAYERS, default=unsaid))
    yield Implied("block_count", "num_hidden_layers", config.num_hidden_layers)
    yield Implied("embedding_length", "hidden_size", config.hidden_size)
    yield Implied("feed_forward_length", "intermediate_size", _widths(config))
    unbounded = _has_mamba(config) and not rotates(config)  # the converter writes 2^20
    yield Implied("context_length", "max_position_embeddings", None if unbounded else config.max_position_embeddings)
    yield Implied("vocab_size", "vocab_size", config.vocab_size)
    yield Implied("attention.head_count", "num_attention_heads", heads)
    kinds = getattr(config, "layer_types", None) or _blocks(config) or [""] * len(layers)
    without_heads = (CONVOLUTION, *((RECURRENT, *_MLPS) if _has_mamba(config) else ()))
    kv_heads = [
        0 if kind in without_heads else getattr(layer, "num_key_value_heads", None) or heads
        for kind, layer in zip(kinds, layers, strict=True)
    ]
    yield Implied("attention.head_count_kv", "num_key_value_heads", kv_heads)
    for part in ("key", "value"):
        yield Implied(f"attention.{part}_length", "head_dim", width)
        yield Implied(f"attention.{part}_length_swa", "head_dim", narrow)
    epsilon = next(name for name in ("rms_norm_eps", "norm_eps", "layer_norm_epsilon") if hasattr(config, name))
    for kind in ("layer_norm_rms_epsilon", "layer_norm_epsilon"):
        yield Implied(f"attention.{kind}", epsilon, getattr(config, epsilon))
    yield Implied("attention.sliding_window", "sliding_window", max(windows))
    yield Implied("attention.sliding_window_pattern", "layer_types", [bool(window) for window in windows])
    yield Implied("attention.scale", _scale_field(config), _scale(config, width))
    yield from _switches(config)
    yield from _states(config, kinds)
    for each in _ropes(config, width, narrow):
        yield each if rotates(config) else each._replace(value=None)


def _widths(config: "PreTrainedConfig") -> int | list[int] | None:
    """Return the width of the MLPs, or a list of each layer's width if they differ: Gemma 4 E2B's layers that share
    keys have twice the width. Return None if all MLPs are experts."""
    width = getattr(config, "intermediate_size", None)
    if width is None:
        return None
    blocks = _blocks(config)
    if set(_MLPS) & set(blocks):  # an MLP is a layer of its own
        by_kind = dict(zip(_MLPS, (width, getattr(config, "moe_intermediate_size", 0)), strict=True))
        return [by_kind.get(kind, 0) for kind in blocks]
    if getattr(config, "block_auto_adjust_ff_dim", False):  # as LFM2's class adjusts it
        width = int((getattr(config, "block_ffn_dim_multiplier", None) or 1) * int(2 * width / 3))
        return -(-width // config.block_multiple_of) * config.block_multiple_of
    if not getattr(config, "use_double_wide_mlp", False):
        return width
    return [width * (2 if mode == "reuse" else 1) for mode in config.kv_sharing_modes]


def _states(config: "PreTrainedConfig", kinds: list[str]) -> Iterator[Implied]:
    """Yield the keys for layers with a state: the gated delta rule, Mamba 2 and short convolutions."""
    if CONVOLUTION in kinds:
        yield Implied("shortconv.l_cache", "conv_L_cache", config.conv_L_cache)
    if _has_mamba(config):
        names = _MAMBA if hasattr(config, "mamba_n_heads") else _NEMOTRON
        conv, state, groups, heads, width = (getattr(config, name) for name in names)
        sizes = (("conv_kernel", conv), ("state_size", state), ("group_count", groups), ("time_step_rank", heads))
        for name, (key, value) in zip(names, (*sizes, ("inner_size", heads * width)), strict=True):
            yield Implied(f"ssm.{key}", name, value)
    if RECURRENT not in kinds or not hasattr(config, "linear_num_key_heads"):
        return
    values = config.linear_num_value_heads
    yield Implied("ssm.conv_kernel", "linear_conv_kernel_dim", config.linear_conv_kernel_dim)
    yield Implied("ssm.state_size", "linear_key_head_dim", config.linear_key_head_dim)
    yield Implied("ssm.group_count", "linear_num_key_heads", config.linear_num_key_heads)
    yield Implied("ssm.time_step_rank", "linear_num_value_heads", values)
    yield Implied("ssm.inner_size", "linear_value_head_dim", config.linear_value_head_dim * values)
    yield Implied("attention.recurrent_layers", "layer_types", [kind == RECURRENT for kind in kinds])
    yield Implied("full_attention_interval", "full_attention_interval", _interval(kinds))


def _blocks(config: "PreTrainedConfig") -> list[str]:
    return getattr(config, "layers_block_type", None) or []


def _has_mamba(config: "PreTrainedConfig") -> bool:
    return hasattr(config, _MAMBA[3]) or hasattr(config, _NEMOTRON[3])


def _interval(kinds: list[str]) -> int | None:
    """Return the number n if every n-th layer, and no other, has full attention; None for another pattern."""
    first = kinds.index(FULL) + 1 if FULL in kinds else 0
    regular = first and all((kind == FULL) == (layer % first == 0) for layer, kind in enumerate(kinds, 1))
    return first if regular else None


def rotates(config: "PreTrainedConfig") -> bool:
    """Return True if the model rotates queries and keys. Granite's hybrids do for "rope" alone, not for null."""
    kind = getattr(config, "position_embedding_type", "rope")
    return bool(getattr(config, "rope_parameters", None)) and kind == "rope"


def ropes_of(config: "PreTrainedConfig") -> dict[str, dict[str, Any]]:
    """Return the rope parameters of each kind of layer; both kinds may have the same ones. Nemotron-H has none."""
    given = getattr(config, "rope_parameters", None) or {}
    return {kind: given.get(kind, given) for kind in (FULL, "sliding_attention")}


def _scale_field(config: "PreTrainedConfig") -> str:
    fields = ("query_pre_attn_scalar", "attention_multiplier")
    return next((field for field in fields if getattr(config, field, None)), "head_dim")


def _scale(config: "PreTrainedConfig", width: int) -> float:
    """Return the factor by which attention scales its scores, as in transformers' classes."""
    if config.model_type == "gemma4_text":
        return 1.0  # the norms of its queries and keys include the factor
    if multiplier := getattr(config, "attention_multiplier", None):
        return multiplier
    return (getattr(config, "query_pre_attn_scalar", None) or width) ** -0.5


def _said(config: "PreTrainedConfig", *names: str, default: Any = 0) -> Any:  # noqa: ANN401 - of the field's type
    """Return the first of the fields that the configuration has, ``default`` if it has none."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), default)


def _switches(config: "PreTrainedConfig") -> Iterator[Implied]:
    """Yield the keys for optional features; a model without the field has the value 0, or 1 for a factor."""

    said = partial(_said, config)
    yield Implied("final_logit_softcapping", "final_logit_softcapping", said("final_logit_softcapping"), 0)
    yield Implied("attn_logit_softcapping", "attn_logit_softcapping", said("attn_logit_softcapping"), 0)
    yield Implied("logit_scale", "logit_scale", said("logit_scale", "logits_scaling") or 1, 1)
    yield Implied("embedding_scale", "embedding_multiplier", said("embedding_multiplier") or 1)
    yield Implied("residual_scale", "residual_multiplier", said("residual_multiplier") or 1)
    yield Implied("attention.shared_kv_layers", "num_kv_shared_layers", said("num_kv_shared_layers"), 0)
    yield Implied(
        "embedding_length_per_layer_input", "hidden_size_per_layer_input", said("hidden_size_per_layer_input")
    )
    experts = said("num_experts", "num_local_experts", "n_routed_experts")
    if "mlp" in _blocks(config) and "moe" not in _blocks(config):  # the class has a default for them
        experts = 0
    yield Implied("expert_count", "num_experts", experts, 0)
    yield from _routing(config, bool(experts))
    shared = said(*_SHARED_WIDTHS)
    yield Implied("expert_shared_feed_forward_length", "shared_expert_intermediate_size", shared)
    yield Implied("leading_dense_block_count", "num_dense_layers", said("num_dense_layers"), 0)
    yield Implied("attention.causal", "is_causal", True)


def _routing(config: "PreTrainedConfig", has_experts: bool) -> Iterator[Implied]:
    """Yield the keys for the choice of experts. Converters write them for models without experts as well, whose
    configurations have the fields; they are not compared then."""
    said, sigmoid = partial(_said, config), _SIGMOID if config.model_type == "lfm2_moe" else None
    for key, field, value, absent in (
        ("expert_used_count", "num_experts_per_tok", said("num_experts_per_tok", "top_k_experts"), None),
        ("expert_feed_forward_length", "moe_intermediate_size", said("moe_intermediate_size"), None),
        ("expert_shared_count", "n_shared_experts", said("n_shared_experts"), 0),
        ("expert_group_count", "n_group", said("n_group"), 0),
        ("expert_group_used_count", "topk_group", said("topk_group"), 0),
        ("expert_weights_norm", "norm_topk_prob", said("norm_topk_prob", default=None), None),
        ("expert_weights_scale", "routed_scaling_factor", said("routed_scaling_factor") or 1, 1),
        ("expert_gating_func", "model_type", sigmoid, None),
    ):
        yield Implied(key, field, value if has_experts else None, absent if has_experts else None)


def _ropes(config: "PreTrainedConfig", width: int, narrow: int | None) -> Iterator[Implied]:
    ropes, field = ropes_of(config), "rope_parameters"
    rope, swa = ropes[FULL], ropes["sliding_attention"]
    kind = rope.get("rope_type") if rope.get("rope_type") in ("linear", "yarn", "longrope") else "none"
    yield Implied("rope.dimension_count", "partial_rotary_factor", _rotated(rope, width))
    yield Implied("rope.dimension_count_swa", "partial_rotary_factor", narrow and _rotated(swa, narrow))
    sections = [*_QWEN35_SECTIONS] if config.model_type.startswith("qwen3_5") else 0
    yield Implied("rope.dimension_sections", "mrope_section", rope.get("mrope_section") or sections)
    yield Implied("rope.freq_base", field, rope.get("rope_theta"), 10000.0)
    yield Implied("rope.freq_base_swa", field, narrow and swa.get("rope_theta"))
    yield Implied("rope.scaling.type", field, kind, "none")
    factor = rope.get("factor") if kind != "none" else 1
    yield Implied("rope.scaling.factor", "factor of rope_parameters", factor)
    yield Implied("rope.scale_linear", "factor of rope_parameters", factor)  # the older name of this key
    attention = rope.get("attention_factor") or rope.get("attn_factor") or 1
    yield Implied("rope.scaling.attn_factor", "attention_factor", attention)
    length = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    if kind == "yarn":
        length = length or config.max_position_embeddings
        yield Implied("rope.scaling.yarn_beta_fast", "beta_fast", rope.get("beta_fast") or 32, 32)
        yield Implied("rope.scaling.yarn_beta_slow", "beta_slow", rope.get("beta_slow") or 1, 1)
        yield Implied("rope.scaling.yarn_attn_factor", "attention_factor", attention, 1)
        yield Implied("rope.scaling.yarn_ext_factor", "extrapolation_factor", rope.get("extrapolation_factor") or 1)
        yield Implied("rope.scaling.yarn_log_multiplier", "mscale_all_dim", rope.get("mscale_all_dim") or 0)
    yield Implied("rope.scaling.original_context_length", "original_max_position_embeddings", length)


def _rotated(rope: dict[str, Any], width: int) -> int:
    """Return how many dimensions of a head are rotated. With Gemma 4's proportional rope all are counted, and some have
    the frequency 0."""
    if rope.get("rope_type") == "proportional":
        return width
    return int(width * (rope.get("partial_rotary_factor") or 1))
