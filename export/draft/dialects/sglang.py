"""Heads written for SGLang: layer ids are outputs, a later layer norms its input by ``hidden_norm``, ``norm_output``
feeds the normed state back. ``midlayer`` and ``additional_layers`` are its older names. Many systems train for it, so
that whatever such a file says is taken as it stands.

Source: SGLang 0.5.23, ``models/llama_eagle3.py``, and sglang 24620 and 25454 on several layers and on ids.
"""

from collections.abc import Collection
from typing import Any

from eagle3.export.draft.dialects.dialect import Dialect


def recognizes(config: dict[str, Any], _tensors: Collection[str]) -> bool:
    return "LlamaForCausalLMEagle3" in (config.get("architectures") or [])


DIALECT = Dialect("sglang", recognizes, ids_are="output", later_norm="hidden_norm")
