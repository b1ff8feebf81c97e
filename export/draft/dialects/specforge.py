"""SpecForge up to 0.2, which trains for SGLang: its ``norm_output`` says only whether lm_head takes the normed state
(true unless said), and never feeds it back; its layer ids are outputs.

A later SpecForge means by ``norm_output`` what SGLang does (its pull request 879). A configuration does not tell the
one from the other (``sglang.py``), so that ``norm_output`` in it asks for ``--draft-dialect``. Its P-EAGLE heads are
``PEagleDraftModel`` with flat keys.

Source: SpecForge 0.2.0, ``modeling/draft/llama3_eagle.py`` and ``peagle.py``.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from eagle3.export.draft.dialects.dialect import P_EAGLE, Dialect, refuse_unheeded


def recognizes(config: dict[str, Any], _tensors: Collection[str]) -> bool:
    named = config.get("architectures") or []
    return "PEagleDraftModel" in named or ("LlamaForCausalLMEagle3" in named and "norm_output" not in config)


def refuse(config: dict[str, Any], file: Path) -> None:
    """Raise ValueError for parts of a rope that SpecForge's code knows nothing of; a yarn without ``mscale`` is not of
    its making, since it fails there."""
    rope: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        rope |= config[key] if isinstance(config.get(key), dict) else {}
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    yarn = rope if "mscale" in rope else {}
    said = {"partial_rotary_factor": None if part == 1 else part}
    said |= {
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
    ids_are="output",
    norm_output_feeds=False,
    later_norm="hidden_norm",
)
