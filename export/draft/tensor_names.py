"""``DraftHead``'s names of a draft checkpoint's tensors, whatever system wrote them.

A first layer is ``layers.0``, ``midlayer`` (SafeAILab, SpecForge) or ``transformer`` (speculators' EAGLE), later ones
are ``layers.{i}``, ``additional_layers.{i - 1}`` (SGLang) or, as the first, ``midlayer.{i}`` (Megatron's ModelOpt);
each may stand under ``model.`` (NeMo, vLLM).
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
"""What training leaves in a checkpoint: parts of the target, rotary tables."""

SELECTOR, MASK = "t2d", "mask_hidden"


def own_name(name: str) -> str | None:
    """None for a tensor that is not read."""
    name = name.removeprefix("model.")
    if re.fullmatch(_UNREAD, name):
        return None
    if later := re.match(r"additional_layers\.(\d+)\.", name):
        return f"layers.{int(later[1]) + 1}.{name[later.end() :]}"
    for prefix, own in _PREFIXES.items():
        if found := re.match(prefix, name):
            return own + name[found.end() :]
    return name


def layer_count(names: Iterable[str]) -> int:
    """Of ``DraftHead``'s names."""
    return 1 + max((int(found[1]) for name in names if (found := re.match(r"layers\.(\d+)\.", name))), default=-1)
