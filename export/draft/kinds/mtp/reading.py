"""Reads an MTP head, as speculators saves it or from its target's own checkpoint."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.export.checkpoints.json_fields import Fields
from eagle3.export.checkpoints.source import Source
from eagle3.export.checkpoints.target_config import check_rope
from eagle3.export.draft.common.description import DraftDescription
from eagle3.export.draft.common.field import STATE
from eagle3.export.draft.common.layer_config import one_rope
from eagle3.export.draft.common.speculators import ROPE_OF, SPECULATORS, layer_fields, proposal_of
from eagle3.export.draft.kinds import MTP
from eagle3.export.draft.kinds.mtp.own_layer import MODEL_TYPES, mtp_tensor, own_names, renamed
from eagle3.export.draft.kinds.mtp.tensors import LayerTensors

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

OWN, COUNT = "the target's own checkpoint", "num_nextn_predict_layers"
FIELDS = (STATE,)
_HYBRID = re.compile(r"qwen3_next|qwen3_5")
NAMES = {
    "mtp_layers.0.token_layernorm.": "enorm.",
    "mtp_layers.0.hidden_layernorm.": "hnorm.",
    "mtp_layers.0.input_proj.": "eh_proj.",
    "mtp_layers.0.final_layernorm.": "norm.",
    "mtp_layers.0.": "layers.0.",
}
_UNREAD = "verifier_lm_head.weight"  # speculators' class does not use it


@dataclass(frozen=True, kw_only=True)
class MTPDescription(DraftDescription):
    """The description of an MTP head. ``layer`` is transformers' configuration of the target, whose kind of layer the
    head has."""

    shares_lm_head: bool = True
    windows: tuple[int, ...] = (0,)

    @property
    def of_target(self) -> bool:
        """True if the head is the MTP layer of a target's own checkpoint."""
        return isinstance(self.source, LayerTensors)

    @property
    def key_size(self) -> int:
        config = self.layer
        if getattr(config, "qk_nope_head_dim", None):  # multi-head latent attention
            return max(config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
        return super().key_size


def read(config: Fields, source: Source) -> MTPDescription:
    """Describe the head with the configuration ``config``, a checkpoint of speculators' ``MTPDraftModel``. Raises
    ValueError with one line."""
    file, headers, fields = config.file, source.headers(), layer_fields(config)
    model_type = fields.get("model_type", "qwen2")  # speculators' default
    if model_type != "qwen3":
        reason = "hybrid layers (linear attention)" if _HYBRID.match(str(model_type)) else "layers of no known kind"
        raise ValueError(
            f"{file.parent} is an MTP head of a {model_type} model, which has {reason}: of speculators' MTP heads only "
            "qwen3 is supported"
        )
    layer, proposal = _layer(one_rope(fields, ROPE_OF)), proposal_of(config)
    if (layer.layer_types or ["full_attention"])[0] != "full_attention":
        raise ValueError(
            f"{file}: the first of layer_types is {layer.layer_types[0]}, which speculators' head computes as full "
            "attention and vLLM does not: not supported"
        )
    _check_count(config)
    names = {name: renamed(name, NAMES) for name in headers if name != _UNREAD}
    return MTPDescription(
        kind=MTP,
        dialect=SPECULATORS,
        source=source,
        layer=layer,
        tensor_names=names,
        headers={own: headers[name] for name, own in names.items()},
        target_vocab_size=layer.vocab_size,
        aux_layers=(layer.num_hidden_layers,),  # the last layer's output, before the target's norm
        convention_known=True,
        chain_len=proposal.chain_len,
        verifier=proposal.verifier,
        verifier_architectures=proposal.verifier_architectures,
    )


def read_own(source: Source, names: Mapping[str, str], config: "PreTrainedConfig", folder: Path) -> MTPDescription:
    """Describe the MTP layer in a target's checkpoint.

    Args:
        source: the target's tensors
        names: the checkpoint's names of the layer's tensors, mapped to the head's
        config: transformers' text configuration of the target
        folder: where the target's ``config.json`` is

    Raises ValueError with one line for more than one such layer, and for missing experts.
    """
    _check_count(Fields(folder / "config.json", config.to_dict()))
    tensors = LayerTensors(source, names, config)
    headers = tensors.headers()
    return MTPDescription(
        kind=MTP,
        dialect=OWN,
        source=tensors,
        layer=config,
        tensor_names={own: own for own in headers},
        headers=headers,
        target_vocab_size=config.vocab_size,
        takes_final_state=True,
    )


def read_own_layer(source: Source, config: "PreTrainedConfig", folder: Path) -> MTPDescription:
    """Describe the MTP layer in a target's tensors ``source``. ``config`` is transformers' text configuration of the
    target, ``folder`` has its ``config.json``. Raises ValueError with one line if there is none."""
    headers = source.headers()
    names = own_names(headers, config.num_hidden_layers)
    if not names and (other := mtp_tensor(headers)):
        raise ValueError(
            f"--draft mtp: {source.path} has an MTP layer of an unsupported form ({other}): those of "
            f"{', '.join(MODEL_TYPES)} are supported, type --draft with another head"
        )
    if not names:
        raise ValueError(
            f"--draft mtp: {source.path} has no MTP layer (model.layers.{config.num_hidden_layers}.eh_proj.weight or "
            "mtp.fc.weight): type --draft with a head's folder or its name on the hub"
        )
    if config.model_type not in MODEL_TYPES:
        raise ValueError(
            f"--draft mtp: the MTP layer of a {config.model_type} is not supported, but those of "
            f"{', '.join(MODEL_TYPES)} are: type --draft with another head"
        )
    return read_own(source, names, config, folder)


def check_pair(
    draft: MTPDescription, target_config: "PreTrainedConfig", taps: tuple[int, ...], trained_for: str
) -> None:
    """Raise ValueError if the head was made for another target. The head's own configuration tells, since speculators
    copies that of the target's layers."""
    named = taps not in ((), draft.aux_layers)  # --aux-layers selects it
    for key in ("model_type", "hidden_size", *(() if named else ("num_hidden_layers",))):
        theirs, given = getattr(draft.layer, key), getattr(target_config, key)
        if theirs != given:
            raise ValueError(
                f"the draft is an MTP head for a target with {key} {theirs}, but the target has {given}: likely not a "
                f"matched pair{trained_for}"
            )
    if len(taps) > 1:
        raise ValueError(
            f"an MTP head takes one state of its target, but {len(taps)} aux layers are named "
            f"({','.join(map(str, taps))}): leave --aux-layers out"
        )


def _check_count(fields: Fields) -> None:
    others = next((name for name in ("num_mtp_layers", "mtp_num_hidden_layers") if name in fields), COUNT)
    layers = fields.count(COUNT, fields.count(others, 1, least=0), least=0)
    if layers != 1:
        raise ValueError(f"{fields.file}: {COUNT} is {layers}, but only MTP heads of one layer are supported")


def _layer(fields: Fields) -> "PreTrainedConfig":
    from transformers import AutoConfig

    fields.number("rms_norm_eps", most=1)
    try:
        config = AutoConfig.for_model(**fields)
    except Exception as error:  # transformers validates field by field, with errors of its own kinds
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{fields.file}: transformers cannot build a decoder layer from it ({reason[:200]}): correct it"
        ) from error
    check_rope(config, fields.file)
    return config
