"""Determines the kind of head of a checkpoint: its tensors decide, and its configuration must agree.

If an EAGLE-3 head is run as an EAGLE, or the other way round, no token is accepted.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3.export.checkpoints.json_fields import boolean
from eagle3.export.checkpoints.source import TensorHeader
from eagle3.export.draft.dialects.dialect import EAGLE, EAGLE3, P_EAGLE
from eagle3.export.draft.kinds.eagle.tensor_names import MASK

PARD = "pard_token"
MASK_TOKENS = ("mask_token_id", PARD, "ptd_token_id")
"""Keys of the mask token, which stands for tokens that are not proposed yet: the key of speculators and NeMo, then the
two of vLLM. Of these, PARD, an independent draft model, has the second."""
_DECLARED = {
    r"P[Ee]agle|^peagle$": P_EAGLE,
    r"Eagle3|^eagle3$": EAGLE3,
    r"Eagle(Speculator|Llama|ForCausalLM|Model|DraftModel)|Eagle$|^eagle$": EAGLE,
}


def head_kind(file: Path, config: Mapping[str, Any], width: int, own: Mapping[str, TensorHeader]) -> str:
    """Return the kind of a head with hidden size ``width``. ``own`` holds headers by ``DraftHead``'s names.

    Raises ValueError if the tensors are of another kind than the configuration declares.
    """
    declared = _declared(config)
    query, fc = own["layers.0.self_attn.q_proj.weight"], own.get("fc.weight")
    if query.shape[1:] == (2 * width,):
        parallel = _drafts_in_parallel(file, config, own)
        kind = P_EAGLE if MASK in own and (parallel or declared != EAGLE3) else EAGLE3
        if kind == EAGLE3 and fc is None and not _takes_final_state(config):
            raise ValueError(f"{file.parent}: no tensor fc.weight, which fuses the taps: is a shard missing?")
    elif query.shape[1:] == (width,) and fc is not None:
        kind = EAGLE
    else:
        raise ValueError(
            f"{file.parent}: q_proj of the first layer takes {query.shape[-1]} inputs, but an EAGLE-3 head takes twice "
            f"its hidden_size {width}, an EAGLE its hidden_size after an fc: this head is neither"
        )
    if declared is not None and declared != kind and (declared, kind) != (EAGLE3, P_EAGLE):
        raise ValueError(
            f"{file} says {declared} (architectures: {_architectures(config)}), but the tensors are those of an {kind} "
            f"head (q_proj takes {query.shape[1]} inputs for a hidden_size of {width}): read as the wrong kind, none "
            "of its tokens would be accepted; correct architectures, or copy the files again"
        )
    return kind


def _drafts_in_parallel(file: Path, config: Mapping[str, Any], own: Mapping[str, TensorHeader]) -> bool:
    """Return True if the configuration's keys declare a P-EAGLE. Heads of NeMo and Amazon have the architectures of an
    EAGLE-3."""
    variants = {**config, **(config.get("eagle_config") or {})}
    says = boolean(variants, "parallel_drafting", False, file)
    if says and MASK not in own:
        raise ValueError(f"{file}: parallel_drafting is true, but there is no tensor {MASK}: is a shard missing?")
    return says or any(variants.get(key) is not None for key in MASK_TOKENS)


def _takes_final_state(config: Mapping[str, Any]) -> bool:
    variants = config.get("eagle_config")
    return isinstance(variants, dict) and variants.get("use_aux_hidden_state") is False


def _declared(config: Mapping[str, Any]) -> str | None:
    names = list(config.get("architectures") or [])
    names += [config["speculators_model_type"]] if isinstance(config.get("speculators_model_type"), str) else []
    for pattern, kind in _DECLARED.items():
        if any(re.search(pattern, name) for name in names):
            return kind
    return None


def _architectures(config: Mapping[str, Any]) -> str:
    return ", ".join(config.get("architectures") or ["none"])
