"""The GGUF architectures that are read: the models that use each, and the names of their tensors.

llama.cpp's converter renames tensors and changes some (``conversion/`` there, per architecture). This module undoes
both, so that the tensors are those of the checkpoint that the file was made from, up to quantization.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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
_LFM2_MODEL = ("model.embed_tokens", "model.embedding_norm", "lm_head")
_LFM2_LAYER = (
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj", "q_layernorm", "k_layernorm")),
    *(f"conv.{name}" for name in ("conv", "in_proj", "out_proj")),
    *("feed_forward.w1", "feed_forward.w2", "feed_forward.w3", "operator_norm", "ffn_norm"),
)


def gemma4_names(architecture: str, layers: int) -> dict[str, str]:
    """Map GGUF names to transformers' names without ``model.``: ExecuTorch's map, and the tensors of per-layer inputs.
    ExecuTorch's map has no tensors of experts."""
    from executorch.examples.models.gemma4_31b.gguf_loader import _KEY_MAP, gguf_to_model_key

    patterns = [(pattern, range(layers) if "{}" in pattern else (None,)) for pattern in _KEY_MAP]
    names = [pattern.format(layer) for pattern, each in patterns for layer in each]
    inputs = transformers_names(
        architecture, layers, _PER_LAYER_INPUT, tuple(f"model.{name}" for name in _PER_LAYER_INPUTS)
    )
    inputs = {name: own.removeprefix("model.") for name, own in inputs.items()}
    return {name: gguf_to_model_key(name) for name in names} | inputs | OUTPUT


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
    return {
        f"{name}.{part}": f"{module}.{part}"
        for name, module in pairs
        if name is not None
        for part in ("weight", "bias")
    }


def delta_names(architecture: str, layers: int) -> dict[str, str]:
    """Return transformers' names of a model with layers of the gated delta rule."""
    own = {"ssm_a": "A_log", "ssm_dt.bias": "dt_bias"}  # parameters that belong to no submodule
    return transformers_names(architecture, layers, _LAYER + _DELTA_LAYER) | {
        f"blk.{layer}.{name}": f"model.layers.{layer}.linear_attn.{part}"
        for layer in range(layers)
        for name, part in own.items()
    }


def mtp_names(architecture: str, layers: int, blocks: int) -> dict[str, str]:
    """Return Qwen3.5's own names of its MTP layers, which are the blocks of a file from ``layers`` to ``blocks``."""
    names = transformers_names(architecture, blocks)
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
    cuts_vocabulary: bool = False
    """True if the converter leaves out the last rows of the embedding, which no token uses."""


ARCHITECTURES = {
    "gemma4": Architecture(("gemma4_text",), gemma4_names),
    "gemma3": Architecture(("gemma3_text",), norm_shift=1, cuts_vocabulary=True),
    "lfm2": Architecture(("lfm2",), partial(transformers_names, modules=_LFM2_LAYER, of_model=_LFM2_MODEL)),
    "llama": Architecture(("llama", "mistral"), rotary_rows=True),
    "phi3": Architecture(("phi3",), partial(transformers_names, modules=_FUSED_LAYER)),
    "qwen2": Architecture(("qwen2",)),
    "qwen3": Architecture(("qwen3",)),
    "qwen35": Architecture(("qwen3_5_text",), delta_names, norm_shift=1, mtp_names=mtp_names),
}
