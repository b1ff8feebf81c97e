"""The GGUF architectures that are read: the models that use each, and the names of their tensors.

llama.cpp's converter renames tensors and changes some (``conversion/`` there, per architecture). This module undoes
both, so that the tensors are those of the checkpoint that the file was made from, up to quantization.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from eagle3.export.checkpoints.gguf_joined import EXPERTS, MLP, QUERY_TO_GATE, Join

OUTPUT = {"output.weight": "lm_head.weight"}
"""The output layer's GGUF name, and its name in the model; a file without it uses the embedding."""
UNREAD = frozenset({"rope_freqs.weight"})
"""Tensors that are not loaded, since the export computes them from the configuration; ``gguf_metadata`` compares the
two."""

_MODEL = ("model.embed_tokens", "model.norm", "lm_head")
_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_LAYER = (
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", *_NORMS),
)
_PER_LAYER_INPUTS = ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")
_PER_LAYER_INPUT = ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")
"""The modules for the per-layer inputs of Gemma 4 E2B and E4B: ``_PER_LAYER_INPUTS`` of the model, ``_PER_LAYER_INPUT``
of each layer."""
_FUSED_LAYER = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj", *_NORMS)
"""transformers' names of a layer's modules in families with fused projections."""
_DELTA_LAYER = tuple(f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b"))
_DELTA_LAYER += ("linear_attn.conv1d", "linear_attn.norm", "linear_attn.out_proj")
_NEXT_LAYER = (*_DELTA_LAYER, "linear_attn.in_proj_ba")
_EXPERTS = tuple(f"mlp.experts.{name}" for name in ("gate_proj", "up_proj", "gate_up_proj", "down_proj"))
_EXPERTS += ("mlp.gate",)
_SHARED_EXPERT = tuple(f"mlp.shared_expert.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
_SHARED_EXPERT += ("mlp.shared_expert_gate",)
_LFM2_MODEL = ("model.embed_tokens", "model.embedding_norm", "lm_head")
_LFM2_LAYER = (
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj", "q_layernorm", "k_layernorm")),
    *(f"conv.{name}" for name in ("conv", "in_proj", "out_proj")),
    *("feed_forward.w1", "feed_forward.w2", "feed_forward.w3", "operator_norm", "ffn_norm"),
)
_MAMBA_LAYER = tuple(f"mamba.{name}" for name in ("in_proj", "conv1d", "norm", "out_proj"))
_GRANITE_LAYER = (*(f"self_attn.{name}_proj" for name in "qkvo"), *_MAMBA_LAYER, *_NORMS[:2])
_GEMMA4_EXPERTS = {
    "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
    "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
    "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
    "ffn_gate_inp.weight": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
_NEMOTRON_STATE = {"in": "in_proj", "conv1d": "conv1d", "norm": "norm", "out": "out_proj"}
_STATE = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}
"""The parameters of a recurrent layer that belong to no submodule."""


def gemma4_names(architecture: str, layers: int) -> dict[str, str]:
    """Map GGUF names to transformers' names without ``model.``: ExecuTorch's map, and the tensors of per-layer inputs
    and of experts."""
    from executorch.examples.models.gemma4_31b.gguf_loader import _KEY_MAP, gguf_to_model_key

    patterns = [(pattern, range(layers) if "{}" in pattern else (None,)) for pattern in _KEY_MAP]
    names = [pattern.format(layer) for pattern, each in patterns for layer in each]
    inputs = transformers_names(
        architecture, layers, _PER_LAYER_INPUT, tuple(f"model.{name}" for name in _PER_LAYER_INPUTS)
    )
    others = inputs | of_layers(layers, _GEMMA4_EXPERTS)
    others = {name: own.removeprefix("model.") for name, own in others.items()}
    return {name: gguf_to_model_key(name) for name in names} | others | OUTPUT


def transformers_names(
    architecture: str, layers: int, modules: tuple[str, ...] = _LAYER, of_model: tuple[str, ...] = _MODEL
) -> dict[str, str]:
    """Map GGUF names to transformers' names by gguf-py's map, for the ``modules`` of each layer and the model's modules
    ``of_model``."""
    import gguf

    (kind,) = (kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    known = gguf.get_tensor_name_map(kind, layers)
    every = [*of_model, *(f"model.layers.{layer}.{name}" for layer in range(layers) for name in modules)]
    pairs = [(known.get_name(module), module) for module in every]
    names = {
        f"{name}.{part}": f"{module}.{part}"
        for name, module in pairs
        if name is not None
        for part in ("weight", "bias")
    }
    stacked = (".experts.down_proj.weight", ".experts.gate_up_proj.weight")  # parameters, not modules
    return {name: own.removesuffix(".weight") if own.endswith(stacked) else own for name, own in names.items()}


def of_layers(layers: int, names: dict[str, str]) -> dict[str, str]:
    """Return the names of all layers, given those within one."""
    pairs = names.items()
    return {f"blk.{layer}.{name}": f"model.layers.{layer}.{own}" for layer in range(layers) for name, own in pairs}


def delta_names(architecture: str, layers: int, modules: tuple[str, ...] = _LAYER + _DELTA_LAYER) -> dict[str, str]:
    """Return transformers' names of a model with layers of the gated delta rule."""
    own = {name: f"linear_attn.{part}" for name, part in _STATE.items()}
    return transformers_names(architecture, layers, modules) | of_layers(layers, own)


def lfm2_names(architecture: str, layers: int) -> dict[str, str]:
    """Return transformers' names of LFM2 with or without experts."""
    modules = _LFM2_LAYER if architecture == "lfm2" else (*_LFM2_LAYER, "feed_forward.gate")
    own = {"exp_probs_b.bias": "feed_forward.expert_bias"} | _experts_of("feed_forward")
    return transformers_names(architecture, layers, modules, _LFM2_MODEL) | of_layers(layers, own)


def granite_names(architecture: str, layers: int) -> dict[str, str]:
    """Return transformers' names of Granite 4. The MLP is called a shared one, whether there are experts or not."""
    own = {name: f"mamba.{part}" for name, part in _STATE.items()} | _experts_of("block_sparse_moe")
    own["ffn_gate_inp.weight"] = "block_sparse_moe.router.weight"
    for end in ("", "_shexp"):
        own |= {f"ffn_{part}{end}.weight": f"shared_mlp.{part}_proj.weight" for part in ("gate", "up")}
        own[f"ffn_down{end}.weight"] = "shared_mlp.output_linear.weight"
    return transformers_names(architecture, layers, _GRANITE_LAYER) | of_layers(layers, own)


def nemotron_names(_architecture: str, layers: int) -> dict[str, str]:
    """Return transformers' names of Nemotron-H. A layer is one mixer with a norm: Mamba 2, attention, an MLP, or
    experts without gates."""
    mixer = _STATE | {f"ssm_{name}.weight": f"{own}.weight" for name, own in _NEMOTRON_STATE.items()}
    mixer |= {f"attn_{part}.weight": f"{part}_proj.weight" for part in "qkv"} | {"attn_output.weight": "o_proj.weight"}
    mixer |= {"ssm_conv1d.bias": "conv1d.bias", "exp_probs_b.bias": "gate.e_score_correction_bias"}
    mixer |= {"ffn_gate_inp.weight": "gate.weight"}
    for part in ("up", "down"):
        mixer |= {f"ffn_{part}.weight": f"{part}_proj.weight", f"ffn_{part}_exps.weight": f"experts.{part}_proj"}
        mixer[f"ffn_{part}_shexp.weight"] = f"shared_experts.{part}_proj.weight"
    model = {"token_embd.weight": "model.embeddings.weight", "output_norm.weight": "model.norm_f.weight"}
    own = {name: f"mixer.{part}" for name, part in mixer.items()} | {"attn_norm.weight": "norm.weight"}
    return model | OUTPUT | of_layers(layers, own)


def _experts_of(mlp: str) -> dict[str, str]:
    """Return the names of a layer's experts, which are a part of ``mlp``."""
    parts = {f"ffn_{part}_exps.weight": f"{mlp}.experts.{part}_proj.weight" for part in ("gate", "up")}
    return parts | {"ffn_down_exps.weight": f"{mlp}.experts.down_proj"}


def mtp_names(architecture: str, layers: int, blocks: int, modules: tuple[str, ...] = _LAYER) -> dict[str, str]:
    """Return Qwen3.5's own names of its MTP layers, which are the blocks of a file from ``layers`` to ``blocks``."""
    names = transformers_names(architecture, blocks, modules)
    found: dict[str, str] = {}
    for block in range(layers, blocks):
        ours, own = f"model.layers.{block}.", f"mtp.layers.{block - layers}."
        found |= {name: model.replace(ours, own) for name, model in names.items() if model.startswith(ours)}
    parts = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}
    parts["shared_head_norm"] = "norm"
    return found | {f"blk.{layers}.nextn.{part}.weight": f"mtp.{own}.weight" for part, own in parts.items()}


@dataclass(frozen=True)
class Architecture:
    """The entry for one value of ``general.architecture``."""

    model_types: tuple[str, ...]
    """transformers' ``model_type`` of the models that have this architecture."""
    names: Callable[[str, int], dict[str, str]] = transformers_names
    """A function of the architecture's name and the number of layers that maps GGUF names to the model's."""
    rotary_rows: bool = False
    """True if the rows of q and k are in llama.cpp's order, the two rows of a rotated pair next to each other."""
    norm_shift: int = 0
    """The number that the converter added to the weights of norms, except for gated norms (``ssm_norm``)."""
    mtp_names: Callable[[str, int, int], dict[str, str]] | None = None
    """A function of the architecture's name, the number of decoder layers, and that of all blocks, that maps GGUF names
    of the MTP layers; None if those layers are not read."""
    joins: tuple[Join, ...] = (EXPERTS,)
    """The tensors that are in several parts in the file."""
    tiled_heads: bool = False
    """True if the value heads of a gated delta rule are in llama.cpp's order."""
    cuts_vocabulary: bool = False
    """True if the converter leaves out the last rows of the embedding, which no token uses."""


ARCHITECTURES = {
    "gemma4": Architecture(("gemma4_text",), gemma4_names),
    "gemma3": Architecture(("gemma3_text",), norm_shift=1, cuts_vocabulary=True),
    "granitehybrid": Architecture(("granitemoehybrid",), granite_names, rotary_rows=True, joins=(EXPERTS, MLP)),
    "lfm2": Architecture(("lfm2",), lfm2_names),
    "lfm2moe": Architecture(("lfm2_moe",), lfm2_names),
    "llama": Architecture(("llama", "mistral"), rotary_rows=True),
    "nemotron_h": Architecture(("nemotron_h",), nemotron_names, rotary_rows=True),
    "nemotron_h_moe": Architecture(("nemotron_h",), nemotron_names, rotary_rows=True),
    "phi3": Architecture(("phi3",), partial(transformers_names, modules=_FUSED_LAYER)),
    "qwen2": Architecture(("qwen2",)),
    "qwen3": Architecture(("qwen3",)),
    "qwen3moe": Architecture(("qwen3_moe",), partial(transformers_names, modules=_LAYER + _EXPERTS)),
    "qwen3next": Architecture(
        ("qwen3_next",),
        partial(delta_names, modules=_LAYER + _NEXT_LAYER + _EXPERTS + _SHARED_EXPERT),
        norm_shift=1,
        mtp_names=partial(mtp_names, modules=_LAYER + _EXPERTS + _SHARED_EXPERT),
        joins=(EXPERTS, QUERY_TO_GATE),
    ),
    "qwen35": Architecture(("qwen3_5_text",), delta_names, norm_shift=1, mtp_names=mtp_names, tiled_heads=True),
    "qwen35moe": Architecture(
        ("qwen3_5_moe_text",),
        partial(delta_names, modules=_LAYER + _DELTA_LAYER + _EXPERTS + _SHARED_EXPERT),
        norm_shift=1,
        mtp_names=partial(mtp_names, modules=_LAYER + _EXPERTS + _SHARED_EXPERT),
        tiled_heads=True,
    ),
}
