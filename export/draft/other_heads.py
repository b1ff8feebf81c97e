"""Recognizes draft heads that are not EAGLE heads by architecture, keys or tensors, and refuses them by name."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from eagle3.export.draft.own_layer import MODEL_TYPES

_MTP = "an MTP head in a form other than speculators' or a target's own"
_BY_ARCHITECTURE = {
    r"DSpark": "a DSpark head in a form other than speculators' and DeepSpec's",
    r"XPress": "an xPress head in a form other than speculators'",
    r"Domino": "a Domino head in a form other than SpecForge's and speculators'",
    r"MuseGlimmerAssistant": "a Muse Glimmer assistant",
    r"Medusa": "a Medusa head",
    r"MTP|NextN": _MTP,
    r"Eagle3DeepseekV|Eagle3?Kimi|Eagle3MLA": "an EAGLE-3 head with MLA attention",
    r"ReDrafter": "a ReDrafter head",
}
_BY_TENSOR = {
    r".*kv_a_proj_with_mqa\..*|.*kv_b_proj\..*": "an EAGLE-3 head with MLA attention",
    r".*medusa.*|parallel_draft_heads\..*": "a head with Medusa's parallel layers",
    r".*\.experts\..*": "a head with experts",
    r"(.*\.)?(eh_proj|enorm|hnorm)\..*|mtp_layers\..*": _MTP,
}
_BY_KEY = {"dflash_config": "a head of the DFlash family of a class of its own", "medusa_num_heads": "a Medusa head"}
_SPECULATORS = ("eagle", "eagle3", "peagle")


def refuse_other_heads(file: Path, config: dict[str, Any], tensors: Collection[str]) -> None:
    """Raise ValueError, which names the kind of head, if the checkpoint is not an EAGLE head."""
    architectures = config.get("architectures") or []
    kind = config.get("speculators_model_type")
    named = " ".join(architectures)
    found = [
        *(what for pattern, what in _BY_ARCHITECTURE.items() if re.search(pattern, named)),
        *(what for key, what in _BY_KEY.items() if key in config),
        *(what for pattern, what in _BY_TENSOR.items() if any(re.fullmatch(pattern, name) for name in tensors)),
    ]
    if isinstance(kind, str) and kind not in _SPECULATORS:
        found.insert(0, f"a speculator of the kind {kind}")
    if _MTP in found and config.get("model_type") in MODEL_TYPES:
        raise ValueError(
            f"{file.parent} is a {config['model_type']} model with an MTP layer, no head by itself: type --checkpoint "
            f"{file.parent} --draft mtp"
        )
    if found:
        raise ValueError(
            f"{file.parent} is {found[0]} (architectures: {', '.join(architectures) or 'none'}), which is not "
            "supported: eagle3-export --list-drafts lists the kinds that are"
        )
