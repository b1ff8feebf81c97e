"""Compares a checkpoint's tensors with its configuration: names, shapes, dtypes, from headers alone.

A tensor that no module reads is refused, since a model without it computes something else. The exceptions
follow.

Tensors of a target's checkpoint may be ignored if transformers ignores them too, or if they belong to parts of a
multimodal model that do not read text.

transformers lists by class the tensors that it ignores (``_keys_to_ignore_on_load_unexpected``), such as multi-token
prediction layers (MTP) and obsolete masks. ``check_target`` refuses all other tensors that have no place in the
model.
"""

import re
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.export.checkpoints.gguf_file import BLOCKS
from eagle3.export.checkpoints.source import Source, TensorHeader
from eagle3.export.draft.common.description import DraftDescription
from eagle3.targets.input_order import INPUT_ORDER
from eagle3.targets.spec import Skeleton

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

    from eagle3.targets.wrapper import Wrapper

QUANTIZED = ("Int4Tensor", "ExportableInt4Tensor", "IntxUnpackedToInt8Tensor")
"""The tensor classes of torchao and ExecuTorch that every backend takes, as they are or dequantized."""

FLOATS = ("F32", "F16", "BF16", "F64")
INTEGERS = ("I64", "I32")

_CAUSES = {
    r"lora_|\.adapter": (
        "belongs to an adapter that is not merged: merge it into the weights first (peft's merge_and_unload)"
    ),
    r"qweight|qzeros|g_idx|weight_packed|weight_scale|input_scale|weight_shape|\.scales$|absmax": (
        "belongs to weights that another tool quantized: name the original checkpoint"
    ),
    r"\.bias$": "is a bias that config.json does not imply, or that this target has no place for",
}


def check_target(
    source: Source,
    headers: dict[str, TensorHeader],
    skeleton: Skeleton,
    config: "PreTrainedConfig",
    described: Path | None = None,
) -> dict[str, TensorHeader]:
    """Check that every tensor of the target has the shape that its configuration implies. Returns the headers of the
    tensors that are read, by name. A bias of zeros that the model has no place for is ignored: AutoGPTQ writes one for
    each linear that it packs.

    ``config`` is transformers' text configuration, and ``described`` is the folder of ``config.json``. Raises
    ValueError for the first tensor that does not fit.
    """
    checkpoint, given = source.path, dict[str, TensorHeader]()
    names = {name: skeleton.key_map(name) for name in headers if is_read(name)}
    orders = {name for name in names if headers[name].dtype == INPUT_ORDER}
    expected = skeleton.expected(own for name, own in names.items() if own is not None and name not in orders)
    parts = skeleton.conversion.parts if skeleton.conversion else {}
    without = {name for name, own in names.items() if name not in orders and own not in expected}
    spare = unread(without, headers, skeleton.model, config, described or checkpoint) if without else set()
    spare |= {name for name in without - spare if _adds_nothing(source, name, headers)}
    names = {name: own for name, own in names.items() if name not in spare}
    for name, own in names.items():
        if name in orders:
            continue
        header = headers[name]
        if own not in expected:
            raise ValueError(f"{checkpoint} has {name}, which {_cause(name)}")
        if header.dtype not in (*FLOATS, *((*BLOCKS, *QUANTIZED) if own not in parts else ())):
            raise ValueError(f"{checkpoint}: {name} is {header.dtype}, quantized: name the original checkpoint")
        if header.shape != expected[own]:
            raise ValueError(
                f"{checkpoint}: {own} is {list(header.shape)}, but config.json implies {list(expected[own])}"
            )
        if own in given:
            raise ValueError(f"{checkpoint} has {own} twice, once as {name}: which one is meant?")
        given[own] = header
    tied = {to for source, (to, _) in skeleton.tie_map.items() if source in given}
    for name in expected:
        if name not in given and name not in tied:
            raise ValueError(f"{checkpoint} lacks {name}, which its config.json implies: is a shard missing?")
    return {name: headers[name] for name in names}


def _adds_nothing(source: Source, name: str, headers: dict[str, TensorHeader]) -> bool:
    """Return True for the bias of a packed linear that is all zeros."""
    linear, _, part = name.rpartition(".")
    weight = headers.get(f"{linear}.weight")
    return part == "bias" and weight is not None and weight.quantized and not source.tensor(name).any()


def _cause(name: str) -> str:
    for pattern, cause in _CAUSES.items():
        if re.search(pattern, name):
            return cause
    return "a model of its config.json has no place for"


def check_draft(draft: DraftDescription) -> None:
    """Check that every tensor of the head has the shape that its configuration implies. Raises ValueError for the first
    tensor that does not fit."""
    from eagle3.export.draft.loading import unfilled

    expected = unfilled(draft).state_dict()
    for name, value in expected.items():
        header = draft.headers.get(name)
        if header is None:
            raise ValueError(f"{draft.folder} lacks {name}, which its config.json implies")
        if header.shape != tuple(value.shape):
            raise ValueError(
                f"{draft.folder}: {name} is {list(header.shape)}, but config.json implies {list(value.shape)}"
            )
        fitting, kind = (FLOATS, "floating-point") if value.dtype.is_floating_point else (INTEGERS, "integer")
        if header.dtype not in fitting:
            raise ValueError(
                f"{draft.folder}: {name} is {header.dtype}, but must be {kind} ({', '.join(fitting)}): name the "
                "original checkpoint"
            )
    unread = sorted(set(draft.headers) - set(expected))
    if unread:
        raise ValueError(f"{draft.folder} has {unread[0]}, which a {draft.kind} with its config.json has no place for")


UNREAD = {
    r"(.*\.)?rotary_emb\.(original_)?inv_freq": "rotary tables, which are recomputed",
    r"(model\.)?(vision_tower|vision_model|visual|embed_vision|multi_modal_projector)\..*": "vision tower",
    r"(model\.)?(audio_tower|embed_audio)\..*": "audio tower",
    r"(model\.)?mtp(_layers)?\..*": "layers that predict further tokens (MTP)",
}
"""Patterns for the full names of a target's tensors that may be ignored, each with a description."""
_LAYER = re.compile(r"(.*\blayers)\.(\d+)\.(.*)")
_MTP = ("eh_proj", "enorm", "hnorm")
"""Modules that only a multi-token prediction layer has: DeepSeek V3's and GLM-4.5's."""


def is_read(name: str) -> bool:
    """Return True if no pattern of ``UNREAD`` allows a target's tensor of this name to be ignored."""
    return not any(re.fullmatch(pattern, name) for pattern in UNREAD)


def unread(
    without: Collection[str], headers: Collection[str], model: "nn.Module", config: "PreTrainedConfig", checkpoint: Path
) -> set[str]:
    """Return those tensors of ``without``, which have no place in ``model``, that may be ignored.

    Args:
        without: names of tensors in the checkpoint that have no place in the model
        headers: names of all tensors in the checkpoint
        model: transformers' text model, or ExecuTorch's
        config: its text configuration
        checkpoint: the folder of ``config.json``
    """
    layers = config.num_hidden_layers
    spare = _further_layers(headers, layers).intersection(without)
    wrapper = _wrapper(checkpoint) if len(spare) < len(without) else None
    own = list(model.state_dict())
    for owner in (model, wrapper and wrapper.model):
        listed = getattr(owner, "_keys_to_ignore_on_load_unexpected", None) or ()
        patterns = [pattern for pattern in listed if _is_of_no_layer(pattern, own)]
        spare |= {name for name in without if any(re.search(pattern, name) for pattern in patterns)}
    return spare | {name for name in without if wrapper is not None and wrapper.is_elsewhere(name)}


def _further_layers(names: Collection[str], layers: int) -> set[str]:
    """Return the tensors of MTP layers. These are layers ``model.layers.N`` with N past the model's last layer and with
    modules that only MTP layers have."""
    by_layer: dict[tuple[str, int], list[tuple[str, str]]] = defaultdict(list)
    for name in names:
        if (found := _LAYER.fullmatch(name)) and int(found[2]) >= layers:
            by_layer[found[1], int(found[2])].append((name, found[3]))
    return {
        name
        for tensors in by_layer.values()
        if any(part.startswith(_MTP) for _, part in tensors)
        for name, _ in tensors
    }


def _is_of_no_layer(pattern: str, own: Collection[str]) -> bool:
    """Return True if a pattern of transformers matches no tensor in the model's ``own`` layers. The pattern is checked
    because a class has one for each model size, and Gemma 4 has one for each layer that shares keys."""
    return re.search(r"\.\d+", pattern) is None or not any(re.search(pattern, name) for name in own)


def _wrapper(checkpoint: Path) -> "Wrapper | None":
    from transformers import AutoConfig

    from eagle3.targets.wrapper import wrapper_of

    config = AutoConfig.from_pretrained(checkpoint, local_files_only=True, trust_remote_code=False)
    return wrapper_of(config)
