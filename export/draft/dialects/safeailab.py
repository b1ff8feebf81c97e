"""SafeAILab's EAGLE, the original: flat Llama keys under ``LlamaForCausalLM``, no embedding. The taps are always the
inputs of layers 2, n // 2 and n - 3.

Source: SafeAILab/EAGLE, ``eagle/model/cnets.py`` (EAGLE-3) and ``cnets1.py`` (EAGLE 1 and 2); HASS has the same files.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from eagle3.export.draft.dialects.dialect import EAGLE, EAGLE3, Dialect, refuse_unheeded, rotary_part

_LINEARS = r"self_attn\.[qkvo]_proj\.weight|mlp\.(gate|up|down)_proj\.weight"
PLACES = {
    EAGLE3: r"(embed_tokens|lm_head|fc|norm)\.weight|d2t|t2d|"
    rf"layers\.0\.({_LINEARS}|(input_layernorm|hidden_norm|post_attention_layernorm)\.weight)",
    EAGLE: r"embed_tokens\.weight|fc\.(weight|bias)|layers\.[1-9]\d*\.input_layernorm\.weight|"
    rf"layers\.\d+\.({_LINEARS}|self_attn\.[qkv]_proj\.bias|post_attention_layernorm\.weight)",
}
"""Patterns of the tensors of SafeAILab's two modules, for EAGLE and EAGLE-3. It trains no P-EAGLE, but files of P-EAGLE
heads look similar."""


def recognizes(_config: dict[str, Any], tensors: Collection[str]) -> bool:
    return "fc.weight" in {name.removeprefix("model.") for name in tensors}


def refuse(config: dict[str, Any], file: Path) -> None:
    """Raise ValueError for a RoPE that SafeAILab's code computes differently: a scaled RoPE always has the base 10000,
    and every RoPE applies to all dimensions of a head."""
    scaling, base = (config.get(key) for key in ("rope_scaling", "rope_theta"))
    scaled = isinstance(scaling, dict) and scaling.get("type", scaling.get("rope_type")) == "linear"
    said = {"rope_theta beside a linear rope_scaling": base if scaled and base != 10000 else None}
    refuse_unheeded("SafeAILab", said | {"partial_rotary_factor": rotary_part(config)}, file)


DIALECT = Dialect(
    "safeailab",
    recognizes,
    refuse=refuse,
    trainer="SafeAILab",
    heeds=lambda kind: () if kind == EAGLE3 else None,
    ropes=lambda _kind: ("default", "linear", "dynamic"),
    heeds_base=lambda kind, _fields: None if kind == EAGLE3 else True,
    base_doubt="SafeAILab's code reads it when it runs a head (eagle/model/cnets.py) but not when it trains one "
    "(eagle/traineagle3, base 10000)",
    places=PLACES.get,
    names_taps=False,
    builds_midlayer=True,
)
