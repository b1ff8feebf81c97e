"""The dialects of EAGLE heads: for each system a function that recognizes its files and one that reads them.

A dialect is a function that calls the steps of ``Reader`` (``steps.py``) with the values in which its trainer's code
differs, and a line of ``DIALECTS``, whose order is that of the names in ``kinds/__init__.py``. Tensor names are
read in the same way for all (``tensor_names.py``).
"""

import re
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from eagle3.export.checkpoints.json_fields import Fields
from eagle3.export.draft.common.layer_config import full_attention_fields, names_gemma4
from eagle3.export.draft.common.speculators import LAYER, ROPE_OF, Proposal, layer_fields, proposal_of
from eagle3.export.draft.kinds import DIALECTS as NAMES
from eagle3.export.draft.kinds import EAGLE, EAGLE3, P_EAGLE
from eagle3.export.draft.kinds.eagle.description import EagleDescription
from eagle3.export.draft.kinds.eagle.rope_reading import (
    ANGELSLIM,
    RopeOfTrainer,
    angelslim_heeds_base,
    rope_of,
    rotary_part,
)
from eagle3.export.draft.kinds.eagle.settings import Heeded, refuse_ignored
from eagle3.export.draft.kinds.eagle.steps import AUX_OUTPUTS, Files, Reader

Tensors = Collection[str]


def _named(config: Fields, *names: str) -> bool:
    return not {*names}.isdisjoint(config.get("architectures") or [])


def of_speculators(config: Fields, _tensors: Tensors) -> bool:
    return LAYER in config


def read_speculators(files: Files) -> EagleDescription:
    """Read a head of vLLM's speculators, new (``Eagle3DraftModel``, ``PEagleDraftModel``) or old
    (``Eagle3Speculator``, ``EagleSpeculator``); sources: ``common/speculators.py``."""
    layers = layer_fields(files.fields)
    head = Reader(files, "speculators", layers, any_type=False, rope_type=ROPE_OF)
    head.read_rope(RopeOfTrainer(heeds_part=False))
    head.check_depth()
    head.check_settings()
    head.read_norms()
    return head.described(known=True, proposal=proposal_of(files.fields), doubts_residual=True)


def of_deepspec(config: Fields, _tensors: Tensors) -> bool:
    return "ttt_length" in config


def read_deepspec(files: Files) -> EagleDescription:
    """Read a head of DeepSeek's DeepSpec: the target's own flat keys, with ``ttt_length`` and the taps in
    ``target_layer_ids``. A head has one layer, Qwen3's or Gemma 4's, an embedding and an lm_head of the whole
    vocabulary.

    Raises ValueError for more than one layer: in DeepSpec's code later layers take the embedding as well. Source:
    deepseek-ai/DeepSpec, ``deepspec/modeling/eagle3/qwen3/modeling.py`` and ``deepspec/eval/eagle3/evaluator.py``.
    """
    fields, gemma4 = files.fields, names_gemma4(files.fields)
    layers = full_attention_fields(fields) if gemma4 else None
    if fields.count("num_hidden_layers", 1) > 1:
        raise ValueError(
            f"{fields.file}: num_hidden_layers is {fields['num_hidden_layers']}, but DeepSpec's own evaluation takes "
            "only heads of one layer: this head is not read"
        )
    head = Reader(files, "deepspec", layers, any_type=False, gemma4=gemma4)
    head.read_rope()
    head.check_depth()
    head.check_settings(Heeded("DeepSpec", ()))
    head.read_norms()
    verifier = fields.get("target_model_name_or_path")
    steps = fields.count("ttt_length", Proposal().chain_len)
    proposal = Proposal(steps, verifier if isinstance(verifier, str) else None)
    return head.described("output", "target_layer_ids", known=True, proposal=proposal)


OF_MODELOPT: tuple[str, ...] = (
    *("use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm", "next_layer_regular"),
    *("parallel_draft_step", "parallel_draft_heads_num_layers", "return_hidden_post_norm", "eh_proj_before_attn"),
)


def of_modelopt(config: Fields, _tensors: Tensors) -> bool:
    variants = config.get("eagle_config")
    return isinstance(variants, dict) and any(key in variants for key in OF_MODELOPT)


def read_modelopt(files: Files) -> EagleDescription:
    """Read a head of NVIDIA ModelOpt: flat Llama keys, variants in ``eagle_config``.

    Its layer ids mean outputs of layers (1, n // 2 - 1, n - 4 by default), as in TensorRT-LLM. Training by version 0.47
    applies ``input_layernorm`` to the feature before ``hidden_norm``. Older versions did not, and neither do the
    engines that run its heads. The files do not record the version. This package norms the feature once. Source:
    nvidia-modelopt 0.47.0, ``export/plugins/hf_spec_configs.py``, ``speculative/plugins/hf_eagle.py`` and
    ``modeling_eagle.py``.
    """
    heeds = ["use_aux_hidden_state", "use_last_layernorm", "use_input_layernorm_in_first_layer"]
    heeds += ["norm_before_fc", "return_hidden_post_norm"]  # only in older versions
    head = Reader(files, "modelopt")
    head.read_rope()
    head.check_depth()
    head.check_settings(Heeded("ModelOpt", heeds))
    head.read_norms()
    return head.described("output")


def of_nemo(config: Fields, _tensors: Tensors) -> bool:
    return _named(config, "LlamaEagle3DraftModel", "LlamaEagleDraftModel")


def read_nemo(files: Files) -> EagleDescription:
    """Read a head of NVIDIA NeMo: ``LlamaEagle3DraftModel``, most tensors under ``model.``, or
    ``LlamaEagleDraftModel``, an EAGLE 1.

    The configuration of an EAGLE-3 head is its target's, including the target's depth, although the head has one layer.
    The configuration of a P-EAGLE has ``parallel_drafting`` and the head's own depth. Training taps the outputs of
    layers, by default 1, n // 2 - 1 and n - 4, and writes no ids. Ids in a file are read as outputs of layers too. The
    layer types in the configuration are the target's as well; the head itself has full attention.

    NeMo's EAGLE 1 differs from SafeAILab's: every layer has an ``input_layernorm``, and logits and the next feature
    both come from the state after the last ``norm``. Its depth is ``draft_num_hidden_layers``.

    Source: NVIDIA-NeMo/Automodel, ``components/speculative/eagle`` (``target.py``, ``draft_llama.py``,
    ``draft_llama_v12.py``, ``core_v12.py``, ``draft_gpt_oss.py``, ``peagle_draft.py``), ``recipes/llm/train_eagle3.py``
    and ``train_eagle1.py``.
    """
    head = Reader(files, "nemo")
    head.read_rope()
    head.check_depth("draft_num_hidden_layers", of_target="NeMo")
    head.check_settings(Heeded("NeMo", ("fc_norm", "norm_output", "partial_rotary_factor")))
    for name in ("norm", *(f"layers.{index}.input_layernorm" for index in range(head.layers))):
        if head.kind == EAGLE and f"{name}.weight" not in head.own:
            raise ValueError(f"{head.folder} lacks {name}.weight, which every {EAGLE} head of NeMo has: copy it again")
    head.read_norms(feeds_normed=head.kind == EAGLE)
    return head.described("output")


def of_specforge(config: Fields, _tensors: Tensors) -> bool:
    flat = _named(config, "LlamaForCausalLMEagle3") and "norm_output" not in config
    return flat or _named(config, "PEagleDraftModel")


def read_specforge(files: Files) -> EagleDescription:
    """Read a head of SpecForge up to 0.2, which trains for SGLang. Its ``norm_output`` (default true) only makes
    lm_head take the normed state, and never feeds that state back. Its layer ids mean outputs.

    In later versions of SpecForge, ``norm_output`` has SGLang's meaning (its pull request 879). A configuration does
    not show the version, so a file with ``norm_output`` needs ``--draft-dialect``. P-EAGLE heads are
    ``PEagleDraftModel`` with flat keys. A YaRN configuration without ``mscale`` is not from SpecForge, whose code fails
    on it.

    Source: SpecForge 0.2.0, ``modeling/draft/llama3_eagle.py`` and ``peagle.py``.
    """
    config = files.without_decided()
    yarn = rope if "mscale" in (rope := rope_of(config)) else {}
    said = {
        "partial_rotary_factor": rotary_part(config),
        "truncate": False if yarn.get("truncate") is False else None,
        "attention_factor": yarn.get("attention_factor"),
    }
    refuse_ignored(config, "SpecForge", said)
    head = Reader(files, "specforge")
    parallel = head.kind == P_EAGLE
    doubt = "SpecForge's code has read it since 2025-10-30 and used base 10000 before; AngelSlim, which published "
    doubt += "heads under this name, uses base 10000"
    head.read_rope(RopeOfTrainer("SpecForge", None if head.kind == EAGLE3 else True, doubt))
    head.check_depth()
    keys = ("norm_before_residual",) if parallel else ("fc_norm", "use_aux_norm", "norm_output")
    ropes = ("default",) if parallel else ("default", "linear", "dynamic", "llama3", "mrope", "yarn")
    head.check_settings(Heeded("SpecForge", keys, ropes))
    head.read_norms_of_specforge("sglang if anything but SpecForge 0.2")
    return head.described("output")


def of_sglang(config: Fields, _tensors: Tensors) -> bool:
    return _named(config, "LlamaForCausalLMEagle3")


def read_sglang(files: Files) -> EagleDescription:
    """Read a head written for SGLang: layer ids mean outputs, a later layer applies ``hidden_norm`` to its input, and
    ``norm_output`` makes the normed state the next feature. ``midlayer`` and ``additional_layers`` are older names of
    layers. Many systems train for SGLang, so all settings of such a file are used as they are.

    Source: SGLang 0.5.23, ``models/llama_eagle3.py``, and sglang 24620 and 25454 on several layers and on ids.
    """
    head = Reader(files, "sglang")
    head.read_rope()
    head.check_depth()
    head.check_settings()
    head.read_norms("hidden_norm", doubt="specforge if SpecForge 0.2 or older")
    return head.described("output")


def of_angelslim(config: Fields, _tensors: Tensors) -> bool:
    named = config.get("architectures") or []
    own = "modal_type" in config or "target_model_type" in config
    return own or any(re.match("(CosyVoice3)?Eagle3", name) for name in named)


def read_angelslim(files: Files) -> EagleDescription:
    """Read a head of Tencent's AngelSlim: flat keys that also name the target (``target_model_type``, ``modal_type``).
    Its heads run in vLLM, so its layer ids mean inputs, as in vLLM. Without a multimodal RoPE, its code uses the base
    10000 and never reads ``rope_theta``: with the base in their files, heads for Qwen3 have a 4 to 8% shorter
    acceptance length.

    Source: the heads that it publishes for Qwen3, and vLLM's name for them (``Eagle3LlamaForCausalLM``);
    Tencent/AngelSlim, ``compressor/speculative/train/models/draft/llama_eagle3.py``; wejoncy/sfllm 32 for Qwen3-4B's
    and 1.7B's acceptance with both bases.
    """
    head = Reader(files, "angelslim")
    doubt = "AngelSlim's code ignores it, but other systems save under the name of its class"
    head.read_rope(RopeOfTrainer(ANGELSLIM, angelslim_heeds_base(head.of_layers), doubt))
    head.check_depth(one_midlayer=True)
    head.check_settings(Heeded(ANGELSLIM, ()))
    head.read_norms()
    return head.described(second_key=AUX_OUTPUTS)


_LINEARS = r"self_attn\.[qkvo]_proj\.weight|mlp\.(gate|up|down)_proj\.weight"
OF_SAFEAILAB = {
    EAGLE3: r"(embed_tokens|lm_head|fc|norm)\.weight|d2t|t2d|"
    rf"layers\.0\.({_LINEARS}|(input_layernorm|hidden_norm|post_attention_layernorm)\.weight)",
    EAGLE: r"embed_tokens\.weight|fc\.(weight|bias)|layers\.[1-9]\d*\.input_layernorm\.weight|"
    rf"layers\.\d+\.({_LINEARS}|self_attn\.[qkv]_proj\.bias|post_attention_layernorm\.weight)",
}
"""Patterns of the tensors of SafeAILab's two modules. It trains no P-EAGLE, but files of P-EAGLE heads look similar."""


def of_safeailab(_config: Fields, tensors: Tensors) -> bool:
    return "fc.weight" in {name.removeprefix("model.") for name in tensors}


def read_safeailab(files: Files) -> EagleDescription:
    """Read a head of SafeAILab's EAGLE, the original: flat Llama keys under ``LlamaForCausalLM``, no embedding. The
    taps are always the inputs of layers 2, n // 2 and n - 3. A scaled RoPE always has the base 10000, and every RoPE
    applies to all dimensions of a head.

    Source: SafeAILab/EAGLE, ``eagle/model/cnets.py`` (EAGLE-3) and ``cnets1.py`` (EAGLE 1 and 2); HASS has the same
    files.
    """
    config = files.without_decided()
    scaling, base = config.get("rope_scaling"), config.get("rope_theta")
    scaled = isinstance(scaling, dict) and scaling.get("type", scaling.get("rope_type")) == "linear"
    said: dict[str, Any] = {"rope_theta beside a linear rope_scaling": base if scaled and base != 10000 else None}
    refuse_ignored(config, "SafeAILab", said | {"partial_rotary_factor": rotary_part(config)})
    head = Reader(files, "safeailab")
    of_eagle3 = head.kind == EAGLE3
    doubt = "SafeAILab's code reads it when it runs a head (eagle/model/cnets.py) but not when it trains one "
    doubt += "(eagle/traineagle3, base 10000)"
    head.read_rope(RopeOfTrainer("SafeAILab", None if of_eagle3 else True, doubt))
    head.check_depth(one_midlayer=True)
    ropes = ("default", "linear", "dynamic")
    head.check_settings(Heeded("SafeAILab", () if of_eagle3 else None, ropes, OF_SAFEAILAB.get(head.kind)))
    head.read_norms()
    return head.described(always_taps="SafeAILab")


class Dialect(NamedTuple):
    """Recognizes and reads the files of a system."""

    recognizes: Callable[[Fields, Tensors], bool]
    """Takes the configuration and the names of the tensors."""
    read: Callable[[Files], EagleDescription]


DIALECTS = {
    "speculators": Dialect(of_speculators, read_speculators),
    "deepspec": Dialect(of_deepspec, read_deepspec),
    "modelopt": Dialect(of_modelopt, read_modelopt),
    "nemo": Dialect(of_nemo, read_nemo),
    "specforge": Dialect(of_specforge, read_specforge),
    "sglang": Dialect(of_sglang, read_sglang),
    "angelslim": Dialect(of_angelslim, read_angelslim),
    "safeailab": Dialect(of_safeailab, read_safeailab),
}
assert tuple(DIALECTS) == NAMES
