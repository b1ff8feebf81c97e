"""SpecForge up to 0.2, which trains for SGLang. Its ``norm_output`` (default true) only makes lm_head take the normed
state, and never feeds that state back. Its layer ids mean outputs.

In later versions of SpecForge, ``norm_output`` has SGLang's meaning (its pull request 879). A configuration does not
show the version (``sglang.py``), so a file with ``norm_output`` needs ``--draft-dialect``. P-EAGLE heads are
``PEagleDraftModel`` with flat keys.

Source: SpecForge 0.2.0, ``modeling/draft/llama3_eagle.py`` and ``peagle.py``.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from eagle3.export.draft.dialects.dialect import EAGLE3, P_EAGLE, Dialect, refuse_unheeded, rope_of, rotary_part


def recognizes(config: dict[str, Any], _tensors: Collection[str]) -> bool:
    named = config.get("architectures") or []
    return "PEagleDraftModel" in named or ("LlamaForCausalLMEagle3" in named and "norm_output" not in config)


def refuse(config: dict[str, Any], file: Path) -> None:
    """Raise ValueError for RoPE settings that SpecForge's code ignores. A YaRN configuration without ``mscale`` is not
    from SpecForge, whose code fails on it."""
    rope = rope_of(config)
    yarn = rope if "mscale" in rope else {}
    said = {
        "partial_rotary_factor": rotary_part(config),
        "truncate": False if yarn.get("truncate") is False else None,
        "attention_factor": yarn.get("attention_factor"),
    }
    refuse_unheeded("SpecForge", said, file)


DIALECT = Dialect(
    "specforge",
    recognizes,
    refuse=refuse,
    trainer="SpecForge",
    heeds=lambda kind: ("norm_before_residual",) if kind == P_EAGLE else ("fc_norm", "use_aux_norm", "norm_output"),
    ropes=lambda kind: ("default",) if kind == P_EAGLE else ("default", "linear", "dynamic", "llama3", "mrope", "yarn"),
    heeds_base=lambda kind, _fields: None if kind == EAGLE3 else True,
    base_doubt="SpecForge's code has read it since 2025-10-30 and used base 10000 before; AngelSlim, which published "
    "heads under this name, uses base 10000",
    ids_are="output",
    norm_output_feeds=False,
    norm_output_doubt="sglang if anything but SpecForge 0.2",
    later_norm="hidden_norm",
)
