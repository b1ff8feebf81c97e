"""Recognizes draft heads that are not EAGLE heads by architecture, keys or tensors, and refuses them by name."""

import re
from collections.abc import Collection
from pathlib import Path

from eagle3.export.checkpoints import SOURCES
from eagle3.export.checkpoints.gguf_file import SUFFIX
from eagle3.export.checkpoints.json_fields import Fields
from eagle3.export.draft.kinds.mtp.own_layer import MODEL_TYPES, has_target_layers, mtp_tensor

_MTP = "an MTP head in a form other than speculators' or a target's own"
_BY_NAME = {
    r"EagleLlama4": "an EAGLE head with Llama 4's layers",
    r"EagleMiniCPM": "an EAGLE head with MiniCPM's layers",
    r"MistralLarge3": "an EAGLE head with Mistral Large 3's layers (MLA)",
    r"EagleDeep[Ss]eek": "an EAGLE head with MLA attention",
    r"Vispec|MultimodalEagle": "an EAGLE head that takes images (ViSpec, MSD)",
    r"DSpark": "a DSpark head of an unknown class",
    r"XPress": "an xPress head in a form other than speculators'",
    r"Domino": "a Domino head in a form other than SpecForge's and speculators'",
    r"Medusa": "a Medusa head",
    r"Hydra": "a Hydra head",
    r"MTP|NextN": _MTP,
    r"Eagle3DeepseekV|Eagle3?Kimi|Eagle3MLA": "an EAGLE-3 head with MLA attention",
    r"ReDrafter|RecurrentDraft|recurrent_draft": "a ReDrafter head",
}
"""Maps patterns of the names in ``architectures`` and of ``model_type`` to the kind of head, in words."""
_BY_KEY = {
    "dflash_config": "a head of the DFlash family of an unknown class",
    "medusa_num_heads": "a Medusa head",
    "hydra_num_heads": "a Hydra head",
}
_VLLMS_EAGLE = "an EAGLE head in vLLM's own form (model_type eagle, the layer's keys under model)"
_BY_TENSOR = {
    r".*kv_a_proj_with_mqa\..*|.*kv_b_proj\..*": "an EAGLE-3 head with MLA attention",
    r".*medusa.*|parallel_draft_heads\..*": "a head with Medusa's parallel layers",
    r".*\.experts\..*": "a head with experts",
    r"(model\.)?fc\.(fc|mlp)\..*": "a GRIFFIN head",
}
_SPECULATORS = ("eagle", "eagle3", "peagle")
_LISTED = "which is not supported: eagle3-export --list-drafts lists the kinds that are"
GGUF_HEAD = "GGUF heads are not read: type --draft with the checkpoint that the head was converted from"
PARAMS = "params.json"
MISTRALS_FORM = f"is in Mistral's own form ({PARAMS}, no config.json), {_LISTED}"


def refuse_other_forms(folder: Path) -> None:
    """Raise ValueError for a head that is only available in an unsupported format: GGUF, or Mistral's own."""
    ggufs = sorted(path.name for path in folder.glob("*") if path.suffix.lower() == SUFFIX)
    if ggufs and not any(source.recognizes(folder) for source in SOURCES):
        raise ValueError(f"{folder} has only GGUF weights ({ggufs[0]}): {GGUF_HEAD}")
    if (folder / PARAMS).is_file() and not (folder / "config.json").is_file():
        raise ValueError(f"{folder} {MISTRALS_FORM}")


def refuse_named_heads(fields: Fields) -> None:
    """Raise ValueError, which names the kind of head, if ``config.json`` alone shows that the head is not an EAGLE
    head. ``refuse_other_heads`` handles MTP layers."""
    _refuse(fields, [what for what in _named(fields) if what != _MTP])


def refuse_other_heads(fields: Fields, tensors: Collection[str]) -> None:
    """Raise ValueError, which names the kind of head, if the checkpoint is not an EAGLE head."""
    found = [
        *_named(fields),
        *(what for pattern, what in _BY_TENSOR.items() if any(re.fullmatch(pattern, name) for name in tensors)),
        *([_MTP] if mtp_tensor(tensors) else []),
    ]
    if _MTP in found and isinstance(fields.get("model_type"), str):
        _refuse_own_layer(fields.file.parent, fields["model_type"], tensors)
    _refuse(fields, found)


def _named(config: Fields) -> list[str]:
    """Return the kinds of head that the configuration names."""
    kind = config.get("speculators_model_type")
    names = f"{' '.join(config.get('architectures') or [])} {config.get('model_type')}"
    return [
        *([f"a speculator of the kind {kind}"] if isinstance(kind, str) and kind not in _SPECULATORS else []),
        *(what for pattern, what in _BY_NAME.items() if re.search(pattern, names)),
        *(what for key, what in _BY_KEY.items() if key in config),
        *([_VLLMS_EAGLE] if config.get("model_type") == "eagle" and isinstance(config.get("model"), dict) else []),
    ]


def _refuse_own_layer(folder: Path, model_type: str, tensors: Collection[str]) -> None:
    """Raise ValueError for a target's checkpoint with an MTP layer, and for a single MTP layer of a supported
    target."""
    whole = has_target_layers(tensors)
    if whole and model_type in MODEL_TYPES:
        raise ValueError(
            f"{folder} is a {model_type} model with an MTP layer, no head by itself: type --checkpoint {folder} "
            "--draft mtp"
        )
    if whole:
        raise ValueError(
            f"{folder} is a {model_type} model with an MTP layer of an unsupported form, no head by itself: type "
            "--draft with a head"
        )
    if model_type in MODEL_TYPES:
        raise ValueError(
            f"{folder} is the MTP layer of a {model_type} model alone, but it is read from the whole model's "
            "checkpoint: type --checkpoint with its folder or its name on the hub, and --draft mtp"
        )


def _refuse(fields: Fields, found: list[str]) -> None:
    if found:
        architectures = ", ".join(fields.get("architectures") or ["none"])
        raise ValueError(f"{fields.file.parent} is {found[0]} (architectures: {architectures}), {_LISTED}")
