"""Finds the MTP layer that a target's own checkpoint holds after its last layer (``--draft mtp``), and the names of its
tensors. ``head.py`` computes it."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from eagle3.export.checkpoints import open_source
from eagle3.export.checkpoints.json_fields import Fields, read_object

ZERO_CENTERED = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Targets whose norms, including those around the MTP layer, multiply by 1 + weight (vLLM's qwen3_next_mtp.py)."""
MODEL_TYPES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3", *ZERO_CENTERED)
"""Targets whose MTP layers are supported."""
OF_DEEPSEEK = {"shared_head.norm.": "norm.", **{f"{name}.": f"{name}." for name in ("enorm", "hnorm", "eh_proj")}}
"""Maps names in DeepSeek V3 and GLM-4.5 after the prefix ``model.layers.N.``, with N the number of the target's layers,
to the head's names. All other names belong to the decoder layer."""
OF_QWEN = {
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.fc.": "eh_proj.",
    "mtp.norm.": "norm.",
    "mtp.layers.0.": "layers.0.",
}
_OF_MTP = r"(.*\.)?(eh_proj|enorm|hnorm|mtp(_\w+)?)\."
"""A pattern of the names of all MTP layers, supported or not: MiMo's are ``model.mtp_layers.0``, Ernie's
``model.mtp_block.0``."""
_SHARED = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the target's tensors, which are not read: SGLang and transformers use the target's own."""


def has_own_layer(folder: Path) -> bool:
    """Return True if ``folder`` holds a target's checkpoint with an MTP layer."""
    if not (folder / "config.json").is_file():
        return False
    fields = Fields(folder / "config.json", read_object(folder / "config.json"))
    text = fields.nested("text_config")  # of a multimodal model
    layers = text.get("num_hidden_layers", fields.get("num_hidden_layers"))
    return isinstance(layers, int) and bool(own_names(open_source(folder).headers(), layers))


def own_names(names: Collection[str], layers: int) -> dict[str, str]:
    """Map the tensors of the MTP layer of a target of ``layers`` layers to the head's names; empty if it has none."""
    of_layer = re.compile(rf"(model|model\.language_model|language_model\.model)\.layers\.{layers}\.eh_proj\.weight")
    if fusing := next(filter(of_layer.fullmatch, names), None):
        behind = fusing.removesuffix("eh_proj.weight")
        found = {name: name.removeprefix(behind) for name in names if name.startswith(behind)}
        found = {name: rest for name, rest in found.items() if rest not in _SHARED}
        return {name: renamed(rest, OF_DEEPSEEK, "layers.0.") for name, rest in found.items()}
    if "mtp.fc.weight" in names:
        return {name: renamed(name, OF_QWEN) for name in names if name.startswith("mtp.")}
    return {}


def mtp_tensor(names: Collection[str]) -> str | None:
    """Return the first name that belongs to an MTP layer, supported or not; None if there is none."""
    return next((name for name in names if re.match(_OF_MTP, name)), None)


def has_target_layers(names: Collection[str]) -> bool:
    """Return True if ``names`` has several layers that are not MTP layers, as a complete target has."""
    layers = {found[0] for name in names if (found := re.match(r"model\.(language_model\.)?layers\.\d+\.", name))}
    return sum(f"{layer}eh_proj.weight" not in names for layer in layers) > 1


def renamed(name: str, names: Mapping[str, str], otherwise: str = "") -> str:
    """Return ``name`` with its prefix replaced as ``names`` says, or with ``otherwise`` put in front if no prefix
    matches."""
    for before, after in names.items():
        if name.startswith(before):
            return after + name.removeprefix(before)
    return otherwise + name
