"""SafeAILab's EAGLE, where it all comes from: flat Llama keys under ``LlamaForCausalLM``, the embedding left out, taps
always the inputs of layers 2, n // 2 and n - 3.

Source: SafeAILab/EAGLE, ``eagle/model/cnets.py`` (EAGLE-3) and ``cnets1.py`` (EAGLE 1 and 2); HASS has the same files.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from eagle3.export.draft.dialects.dialect import Dialect


def recognizes(config: dict[str, Any], tensors: Collection[str]) -> bool:
    return "fc.weight" in {name.removeprefix("model.") for name in tensors}


def refuse(config: dict[str, Any], file: Path) -> None:
    """Raise ValueError for a scaled rope of a base of its own: SafeAILab's code then takes 10000 in silence."""
    scaling, base = config.get("rope_scaling"), config.get("rope_theta")
    if isinstance(scaling, dict) and scaling.get("type") == "linear" and base not in (None, 10000):
        raise ValueError(
            f"{file}: rope_theta is {base} beside a linear rope_scaling, which SafeAILab's code computes with 10000: "
            "write 10000 if it trained the head, else type --draft-dialect sglang"
        )


DIALECT = Dialect("safeailab", recognizes, refuse=refuse)
