"""Maps the tensor names of a draft checkpoint of any system to ``Head``'s names.

The first layer is ``layers.0``, ``midlayer`` (SafeAILab, SpecForge) or ``transformer`` (speculators' EAGLE). Later
layers are ``layers.{i}``, ``additional_layers.{i - 1}`` (SGLang) or ``midlayer.{i}``, which then names the first as
well (Megatron's ModelOpt). Each may have the prefix ``model.`` (NeMo, vLLM).
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from eagle3.export.checkpoints.json_fields import Fields
from eagle3.export.checkpoints.source import TensorHeader
from eagle3.export.draft.common.checks import check_named_once
from eagle3.export.draft.kinds import EAGLE, EAGLE3, P_EAGLE

_PREFIXES = {
    r"midlayer\.(?=\d)": "layers.",
    r"midlayer\.": "layers.0.",
    r"transformer\.": "layers.0.",
    r"fusion_fc\.": "fc.",
    r"embedding_layernorm\.": "embed_norm.",
    r"embed_layernorm\.": "embed_norm.",
    r"hidden_layernorm\.": "layers.0.input_layernorm.",
    r"(pre_lm_head|lm_head)_layernorm\.": "norm.",
    r"aux_norm_low\.": "fc_norm.0.",
    r"aux_norm_mid\.": "fc_norm.1.",
    r"aux_norm_high\.": "fc_norm.2.",
}
_UNREAD = r"verifier_lm_head\.weight|verifier_norm\.weight|(.*\.)?rotary_emb\.inv_freq"
"""Tensors in checkpoints that are not read: parts of the target and rotary tables, which training leaves there."""

MASK = "mask_hidden"


def own_name(name: str) -> str | None:
    """Return ``Head``'s name of a tensor, None for a tensor that is not read."""
    name = name.removeprefix("model.")
    if re.fullmatch(_UNREAD, name):
        return None
    if later := re.match(r"additional_layers\.(\d+)\.", name):
        return f"layers.{int(later[1]) + 1}.{name[later.end() :]}"
    for prefix, own in _PREFIXES.items():
        if found := re.match(prefix, name):
            return own + name[found.end() :]
    return name


def has_midlayer(names: Iterable[str]) -> bool:
    """Return True if a layer of a checkpoint is ``midlayer`` without a number."""
    return any(re.match(r"(model\.)?midlayer\.(?!\d)", name) for name in names)


def layer_count(names: Iterable[str]) -> int:
    """Return the number of layers among ``Head``'s names."""
    return 1 + max((int(found[1]) for name in names if (found := re.match(r"layers\.(\d+)\.", name))), default=-1)


_MATRICES = ("_proj.weight", "fc.weight", "lm_head.weight", "embed_tokens.weight")


def own_tensors(folder: Path, headers: Mapping[str, TensorHeader]) -> tuple[dict[str, str], dict[str, TensorHeader]]:
    """Return a map from the checkpoint's names to ``Head``'s, and a map from ``Head``'s names to the headers."""
    names = {name: known for name in headers if (known := own_name(name)) is not None}
    own = {each: headers[name] for name, each in names.items()}
    check_named_once(folder, names)
    for name, each in names.items():
        shape, rank = headers[name].shape, 2 if each.endswith(_MATRICES) else None
        if 0 in shape or len(shape) != (rank or len(shape)):
            raise ValueError(f"{folder}: {name} is {list(shape)}: it is damaged, or of another kind of head")
    return names, own


PARD = "pard_token"
MASK_TOKENS = ("mask_token_id", PARD, "ptd_token_id")
"""Keys of the mask token, which stands for tokens that are not proposed yet: the key of speculators and NeMo, then the
two of vLLM. Of these, PARD, an independent draft model, has the second."""
_DECLARED = {
    r"P[Ee]agle|^peagle$": P_EAGLE,
    r"Eagle3|^eagle3$": EAGLE3,
    r"Eagle(Speculator|Llama|ForCausalLM|Model|DraftModel)|Eagle$|^eagle$": EAGLE,
}


def head_kind(config: Fields, width: int, own: Mapping[str, TensorHeader]) -> str:
    """Return the kind of a head with hidden size ``width``. ``own`` holds headers by ``Head``'s names.

    Raises ValueError if the tensors are of another kind than the configuration declares.
    """
    file, declared = config.file, _declared(config)
    query, fc = own["layers.0.self_attn.q_proj.weight"], own.get("fc.weight")
    if query.shape[1:] == (2 * width,):
        parallel = _drafts_in_parallel(config, own)
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


def _drafts_in_parallel(config: Fields, own: Mapping[str, TensorHeader]) -> bool:
    """Return True if the configuration's keys declare a P-EAGLE. Heads of NeMo and Amazon have the architectures of an
    EAGLE-3."""
    variants = config.changed(config.nested("eagle_config"))
    says = variants.boolean("parallel_drafting", False)
    if says and MASK not in own:
        raise ValueError(
            f"{config.file}: parallel_drafting is true, but there is no tensor {MASK}: is a shard missing?"
        )
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
