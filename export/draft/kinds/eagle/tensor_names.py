"""Maps the tensor names of a draft checkpoint of any system to ``DraftHead``'s names.

The first layer is ``layers.0``, ``midlayer`` (SafeAILab, SpecForge) or ``transformer`` (speculators' EAGLE). Later
layers are ``layers.{i}``, ``additional_layers.{i - 1}`` (SGLang) or ``midlayer.{i}``, which then names the first as
well (Megatron's ModelOpt). Each may have the prefix ``model.`` (NeMo, vLLM).
"""

import re
from collections.abc import Iterable

_PREFIXES = {
    r"midlayer\.(?=\d)": "layers.",
    r"midlayer\.": "layers.0.",
    r"transformer\.": "layers.0.",
    r"fusion_fc\.": "fc.",
    r"embedding_layernorm\.": "embed_norm.",
    r"embed_layernorm\.": "embed_norm.",
    r"hidden_layernorm\.": "layers.0.input_layernorm.",
    r"(pre_lm_head|lm_head)_layernorm\.": "norm.",
    r"aux_norm_low\.": "fc_norm.0.",
    r"aux_norm_mid\.": "fc_norm.1.",
    r"aux_norm_high\.": "fc_norm.2.",
}
_UNREAD = r"verifier_lm_head\.weight|verifier_norm\.weight|(.*\.)?rotary_emb\.inv_freq"
"""Tensors in checkpoints that are not read: parts of the target and rotary tables, which training leaves there."""

MASK = "mask_hidden"


def own_name(name: str) -> str | None:
    """Return ``DraftHead``'s name of a tensor, None for a tensor that is not read."""
    name = name.removeprefix("model.")
    if re.fullmatch(_UNREAD, name):
        return None
    if later := re.match(r"additional_layers\.(\d+)\.", name):
        return f"layers.{int(later[1]) + 1}.{name[later.end() :]}"
    for prefix, own in _PREFIXES.items():
        if found := re.match(prefix, name):
            return own + name[found.end() :]
    return name


def has_midlayer(names: Iterable[str]) -> bool:
    """Return True if a layer of a checkpoint is ``midlayer`` without a number."""
    return any(re.match(r"(model\.)?midlayer\.(?!\d)", name) for name in names)


def layer_count(names: Iterable[str]) -> int:
    """Return the number of layers among ``DraftHead``'s names."""
    return 1 + max((int(found[1]) for name in names if (found := re.match(r"layers\.(\d+)\.", name))), default=-1)
