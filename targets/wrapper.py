"""A multimodal model of transformers, as far as the text model in it is to be found: what of its tensors belongs to the
text model, and whether its head is tied. All of it is read from transformers' own class, on the meta device.
"""

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
import transformers
from torch import nn
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key


class Wrapper:
    """``model`` is on the meta device."""

    def __init__(self, model: PreTrainedModel):
        self.model, self.own = model, model.state_dict()
        transforms = get_model_conversion_mapping(model)
        self.renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        self.converters = [each for each in transforms if isinstance(each, WeightConverter)]
        self.text, self.head = (self._name(part) for part in (model.get_decoder(), model.get_output_embeddings()))

    def is_elsewhere(self, name: str) -> bool:
        """Whether a checkpoint's tensor of this name belongs to a part of the model that reads no text: a tower of
        images or sound, or what projects its states."""
        own, _ = rename_source_key(
            name, self.renamings, self.converters, self.model.base_model_prefix, dict.fromkeys(self.own, True)
        )
        texts = tuple(f"{part}." for part in (self.text, self.head) if part is not None)
        return self.text is not None and own in self.own and not own.startswith(texts)

    @property
    def ties(self) -> bool | None:
        """Whether the head is the embedding, as transformers' class ties them; None where there is no head to find."""
        return None if self.head is None else f"{self.head}.weight" in self.model.all_tied_weights_keys

    def _name(self, part: Any) -> str | None:
        """Of a module within the model, None for the model itself and for none."""
        return next((name for name, module in self.model.named_modules() if name and module is part), None)


def wrapper_of(config: Any, architectures: Iterable[str] = ()) -> Wrapper | None:
    """Of a checkpoint's whole configuration; None where it is a text model's, or transformers makes no model of it.

    ``architectures``: the names of classes in ``config.json``; the first that transformers has for ``config`` is taken.
    """
    if config is config.get_text_config():
        return None
    named = (getattr(transformers, name, None) for name in architectures)
    classes = [each for each in named if isinstance(each, type) and getattr(each, "config_class", None) is type(config)]
    own = classes[0] if classes else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    try:
        with torch.device("meta"):
            model: nn.Module | None = own and own(deepcopy(config))
    except Exception:  # some want packages that are not here; a tensor of theirs is then refused by name
        return None
    return Wrapper(model) if isinstance(model, PreTrainedModel) else None
