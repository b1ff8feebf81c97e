"""Finds the tensors of a target's checkpoint that may be ignored: those that transformers ignores too, and those of a
multimodal model's parts that do not read text.

transformers lists by class the tensors that it ignores (``_keys_to_ignore_on_load_unexpected``), such as multi-token
prediction layers (MTP) and obsolete masks. ``tensors.check_target`` refuses all other tensors that have no place in the
model.
"""

import re
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

    from eagle3.targets.wrapper import Wrapper

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
