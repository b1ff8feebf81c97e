"""Tencent's AngelSlim: flat keys that also name the target (``target_model_type``, ``modal_type``). Its heads run in
vLLM, so its layer ids mean inputs, as in vLLM.

Source: the heads that it publishes for Qwen3, and vLLM's name of them (``Eagle3LlamaForCausalLM``);
Tencent/AngelSlim, ``compressor/speculative/train/models/draft/llama_eagle3.py``.
"""

from collections.abc import Collection
from typing import Any

from eagle3.export.draft.dialects.dialect import Dialect


def recognizes(config: dict[str, Any], _tensors: Collection[str]) -> bool:
    named = config.get("architectures") or []
    return "modal_type" in config or "target_model_type" in config or any(name.startswith("Eagle3") for name in named)


DIALECT = Dialect("angelslim", recognizes, trainer="AngelSlim", heeds=lambda _kind: (), builds_midlayer=True)
