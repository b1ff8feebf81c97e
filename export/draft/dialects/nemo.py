"""NVIDIA NeMo: ``LlamaEagle3DraftModel``, every tensor under ``model.``; layer ids are inputs, as vLLM reads them.

Source: the class's name and prefix as vLLM and SGLang load them.
"""

from collections.abc import Collection
from typing import Any

from eagle3.export.draft.dialects.dialect import Dialect


def recognizes(config: dict[str, Any], tensors: Collection[str]) -> bool:
    return "LlamaEagle3DraftModel" in (config.get("architectures") or [])


DIALECT = Dialect("nemo", recognizes)
