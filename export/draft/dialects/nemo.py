"""NVIDIA NeMo: ``LlamaEagle3DraftModel``, most tensors under ``model.``, and ``LlamaEagleDraftModel``, an EAGLE 1.

An EAGLE-3 head has its target's configuration, including the depth, and one layer. A P-EAGLE has ``parallel_drafting``
and a depth of its own. Training taps the outputs of layers (1, n // 2 - 1, n - 4 by default) and writes no ids. Ids in
a file are read in the same sense. The layer types in such a file are the target's too: the head attends to everything.

Its EAGLE 1 differs from SafeAILab's: every layer has an ``input_layernorm``, and logits and the next feature both come
from the state after the last ``norm``. Its depth is ``draft_num_hidden_layers``.

Source: NVIDIA-NeMo/Automodel, ``components/speculative/eagle`` (``target.py``, ``draft_llama.py``,
``draft_llama_v12.py``, ``core_v12.py``, ``draft_gpt_oss.py``, ``peagle_draft.py``), ``recipes/llm/train_eagle3.py`` and
``train_eagle1.py``.
"""

from collections.abc import Collection
from typing import Any

from eagle3.export.draft.dialects.dialect import EAGLE, Dialect

EAGLE1 = "LlamaEagleDraftModel"


def recognizes(config: dict[str, Any], _tensors: Collection[str]) -> bool:
    return not {"LlamaEagle3DraftModel", EAGLE1}.isdisjoint(config.get("architectures") or [])


DIALECT = Dialect(
    "nemo",
    recognizes,
    trainer="NeMo",
    heeds=lambda _kind: ("fc_norm", "norm_output", "partial_rotary_factor"),
    feeds_normed=lambda kind: kind == EAGLE,
    ids_are="output",
    depth_is_targets=True,
    depth_of_eagle="draft_num_hidden_layers",
)
