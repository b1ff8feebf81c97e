"""NVIDIA NeMo: ``LlamaEagle3DraftModel``, most tensors under ``model.``, and ``LlamaEagleDraftModel``, an EAGLE 1.

The configuration of an EAGLE-3 head is its target's, including the target's depth, although the head has one layer. The
configuration of a P-EAGLE has ``parallel_drafting`` and the head's own depth. Training taps the outputs of layers, by
default 1, n // 2 - 1 and n - 4, and writes no ids. Ids in a file are read as outputs of layers too. The layer types in
the configuration are the target's as well; the head itself has full attention.

NeMo's EAGLE 1 differs from SafeAILab's: every layer has an ``input_layernorm``, and logits and the next feature both
come from the state after the last ``norm``. The depth of NeMo's EAGLE 1 is ``draft_num_hidden_layers``.

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
