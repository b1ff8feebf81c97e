"""The architectures of GGUF files that are read: whose models they are, and what their tensors are called there.

llama.cpp's converter renames tensors and changes some (``conversion/`` there, per architecture): what it did is undone
here, so that a file's tensors are those of the checkpoint that it was made from, up to their quantization.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

OUTPUT = {"output.weight": "lm_head.weight"}
"""An output layer of its own; without one it is the embedding."""
UNREAD = frozenset({"rope_freqs.weight"})
"""Made from the configuration, as ours are; ``gguf_metadata`` compares the two."""

_MODEL = ("model.embed_tokens", "model.norm", "lm_head")
_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_LAYER = (
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", *_NORMS),
)
_PER_LAYER_INPUTS = ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")
_PER_LAYER_INPUT = ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")
"""Those of Gemma 4 E2B and E4B, of the model and of a layer."""
_FUSED_LAYER = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj", *_NORMS)
"""transformers' names of the modules that the families below are made of."""


def gemma4_names(architecture: str, layers: int) -> dict[str, str]:
    """Return names by ExecuTorch's own map, which has its model's names, and those of per-layer inputs in the same
    form: transformers' without ``model.``. Tensors of experts have none."""
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
    """Return transformers' names by gguf-py's own map: of the ``modules`` of each layer, and of those ``of_model``."""
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


@dataclass(frozen=True)
class Architecture:
    """An entry for a value of ``general.architecture``."""

    model_types: tuple[str, ...]
    """transformers' ``model_type`` of the models whose files have it."""
    names: Callable[[str, int], dict[str, str]] = transformers_names
    """Takes the architecture's name and the number of layers; maps GGUF names to the model's."""
    rotary_rows: bool = False
    """The rows of q and k are in the order of llama.cpp's rotation, pairs beside each other."""
    norm_shift: int = 0
    """The number that the converter added to the weights of norms."""
    cuts_vocabulary: bool = False
    """The converter leaves out the last rows of an embedding that no token has."""


ARCHITECTURES = {
    "gemma4": Architecture(("gemma4_text",), gemma4_names),
    "gemma3": Architecture(("gemma3_text",), norm_shift=1, cuts_vocabulary=True),
    "llama": Architecture(("llama", "mistral"), rotary_rows=True),
    "phi3": Architecture(("phi3",), partial(transformers_names, modules=_FUSED_LAYER)),
    "qwen2": Architecture(("qwen2",)),
    "qwen3": Architecture(("qwen3",)),
}
