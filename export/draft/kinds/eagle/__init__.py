"""EAGLE-3, P-EAGLE, and EAGLE 1 and 2 (HASS has the same files). ``reading.py`` reads them in any dialect, ``head.py``
computes them."""

from eagle3.export.draft.common.kind import Kind
from eagle3.export.draft.dialects.dialect import EAGLE, EAGLE3, P_EAGLE

_PARTS = "eagle3.export.draft.kinds.eagle.parts"

KINDS: dict[str, Kind] = {
    EAGLE3: Kind(
        "hidden states of several target layers (taps); a KV cache of its own; a step for each proposal", _PARTS
    ),
    P_EAGLE: Kind(
        "hidden states of several target layers (taps); a KV cache of its own; all proposals in one step",
        _PARTS,
        published=("RedHatAI/Qwen3-8B-speculator.peagle",),
    ),
    EAGLE: Kind(
        "the target's final state; a KV cache of its own; a step for each proposal",
        _PARTS,
        published=("yuhuili/EAGLE-LLaMA3.1-Instruct-8B",),
    ),
}
