"""SafeAILab's EAGLE, where it all comes from: flat Llama keys under ``LlamaForCausalLM``, the embedding left out, taps
always the inputs of layers 2, n // 2 and n - 3.

Source: SafeAILab/EAGLE, ``eagle/model/cnets.py`` (EAGLE-3) and ``cnets1.py`` (EAGLE 1 and 2); HASS has the same files.
"""

from collections.abc import Collection
from typing import Any

from eagle3.export.draft.dialects.dialect import Dialect


def recognizes(config: dict[str, Any], tensors: Collection[str]) -> bool:
    return "fc.weight" in {name.removeprefix("model.") for name in tensors}


DIALECT = Dialect("safeailab", recognizes)
