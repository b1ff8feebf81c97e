"""NVIDIA NeMo: ``LlamaEagle3DraftModel``, most tensors under ``model.``.

An EAGLE-3 head has its target's configuration, including the depth, and one layer. A P-EAGLE has ``parallel_drafting``
and a depth of its own. Training taps the outputs of layers (1, n // 2 - 1, n - 4 by default) and writes no ids. Ids in
a file are read in the same sense. Source: NVIDIA-NeMo/Automodel, ``components/speculative/eagle`` (``target.py``,
``draft_llama.py``, ``peagle_draft.py``) and ``recipes/llm/train_eagle3.py``.
"""

from collections.abc import Collection
from typing import Any

from eagle3.export.draft.dialects.dialect import Dialect


def recognizes(config: dict[str, Any], _tensors: Collection[str]) -> bool:
    return "LlamaEagle3DraftModel" in (config.get("architectures") or [])


DIALECT = Dialect(
    "nemo",
    recognizes,
    trainer="NeMo",
    heeds=lambda _kind: ("fc_norm", "norm_output", "partial_rotary_factor"),
    ids_are="output",
    depth_is_targets=True,
)
