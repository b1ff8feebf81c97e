"""Heads written for SGLang: layer ids mean outputs, a later layer applies ``hidden_norm`` to its input, and
``norm_output`` makes the normed state the next feature. ``midlayer`` and ``additional_layers`` are older names of
layers. Many systems train for SGLang, so all settings of such a file are used as they are.

Source: SGLang 0.5.23, ``models/llama_eagle3.py``, and sglang 24620 and 25454 on several layers and on ids.
"""

from collections.abc import Collection
from typing import Any

from eagle3.export.draft.dialects.dialect import Dialect


def recognizes(config: dict[str, Any], _tensors: Collection[str]) -> bool:
    return "LlamaForCausalLMEagle3" in (config.get("architectures") or [])


DIALECT = Dialect(
    "sglang",
    recognizes,
    ids_are="output",
    norm_output_doubt="specforge if SpecForge 0.2 or older",
    later_norm="hidden_norm",
)
