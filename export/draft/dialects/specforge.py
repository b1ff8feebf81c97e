"""SpecForge, which trains for SGLang: its ``norm_output`` says only whether lm_head takes the normed state (true unless
said), and never feeds it back; its layer ids are outputs.

A configuration does not tell it from one that was written for SGLang (``sglang.py``), so that ``norm_output`` in one
asks for ``--draft-dialect``. Its P-EAGLE heads are ``PEagleDraftModel`` with flat keys.

Source: SpecForge 0.2.0, ``modeling/draft/llama3_eagle.py`` and ``peagle.py``.
"""

from collections.abc import Collection
from typing import Any

from eagle3.export.draft.dialects.dialect import Dialect


def recognizes(config: dict[str, Any], tensors: Collection[str]) -> bool:
    named = config.get("architectures") or []
    return "PEagleDraftModel" in named or ("LlamaForCausalLMEagle3" in named and "norm_output" not in config)


DIALECT = Dialect("specforge", recognizes, ids_are="output", norm_output_feeds=False, later_norm="hidden_norm")
