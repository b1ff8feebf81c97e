"""Tencent's AngelSlim: flat keys that also name the target (``target_model_type``, ``modal_type``). Its heads run in
vLLM, so its layer ids mean inputs, as in vLLM. Without a multimodal RoPE, its code uses the base 10000 and never reads
``rope_theta``: with the base in their files, heads for Qwen3 have a 4 to 8% shorter acceptance length.

Source: the heads that it publishes for Qwen3, and vLLM's name for them (``Eagle3LlamaForCausalLM``); Tencent/AngelSlim,
``compressor/speculative/train/models/draft/llama_eagle3.py``; wejoncy/sfllm 32 for Qwen3-4B's and 1.7B's acceptance
with both bases.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from eagle3.export.draft.dialects.dialect import Dialect, rope_of

AUX_OUTPUTS = "aux_hidden_states_layer_ids"
"""AngelSlim's own key of the taps, with ids of layer outputs. For vLLM it adds the usual key, with each id one
higher."""
_CLASSES = re.compile("(CosyVoice3)?Eagle3")
_OF_A_FIXED_BASE = ("default", "linear", "dynamic")


def recognizes(config: dict[str, Any], _tensors: Collection[str]) -> bool:
    named = config.get("architectures") or []
    return "modal_type" in config or "target_model_type" in config or any(_CLASSES.match(name) for name in named)


def heeds_base(_kind: str, fields: Mapping[str, Any]) -> bool | None:
    """Return False if AngelSlim's code uses a fixed RoPE base. Return None if only the class name is AngelSlim's, since
    other systems save under that name."""
    rope = rope_of(fields)
    kind_of_rope = rope.get("type", rope.get("rope_type", "default"))
    if kind_of_rope not in _OF_A_FIXED_BASE or rope.get("mrope_interleaved") is True:
        return True
    own = "target_model_type" in fields or "modal_type" in fields
    return False if own or any(name.startswith("CosyVoice3") for name in fields.get("architectures") or []) else None


DIALECT = Dialect(
    "angelslim",
    recognizes,
    trainer="AngelSlim",
    second_ids_key=AUX_OUTPUTS,
    heeds=lambda _kind: (),
    heeds_base=heeds_base,
    marks={"modal_type": "LLM"},
    base_doubt="AngelSlim's code ignores it, but other systems save under the name of its class",
    builds_midlayer=True,
)
