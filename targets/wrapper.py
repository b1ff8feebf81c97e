"""Finds the text model in a multimodal model of transformers: the tensors that belong to it, and whether its head is
tied.

All of this is read from transformers' own class, on the meta device.
"""

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from eagle3.targets.text_part import text_config_of, wrapper_model


class Wrapper:
    """A multimodal ``model`` on the meta device, with the names of its text decoder and head."""

    def __init__(self, model: PreTrainedModel):
        self.model, self.own = model, model.state_dict()
        transforms = get_model_conversion_mapping(model)
        self.renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        self.converters = [each for each in transforms if isinstance(each, WeightConverter)]
        self.text, self.head = (self._name(part) for part in (model.get_decoder(), model.get_output_embeddings()))

    def is_elsewhere(self, name: str) -> bool:
        """Return True if a checkpoint's tensor of this name belongs to a part of the model that does not read text,
        such as an image or audio tower or a projection of its states."""
        own, _ = rename_source_key(
            name, self.renamings, self.converters, self.model.base_model_prefix, dict.fromkeys(self.own, True)
        )
        texts = tuple(f"{part}." for part in (self.text, self.head) if part is not None)
        return self.text is not None and own in self.own and not own.startswith(texts)

    @property
    def ties(self) -> bool | None:
        """True if transformers' class ties the head to the embedding; None if no head is found."""
        return None if self.head is None else f"{self.head}.weight" in self.model.all_tied_weights_keys

    def _name(self, part: nn.Module | None) -> str | None:
        """Return the name of a module within the model; None for the model itself and for None."""
        return next((name for name, module in self.model.named_modules() if name and module is part), None)


def wrapper_of(config: PreTrainedConfig) -> Wrapper | None:
    """Return the wrapper for a checkpoint's whole configuration; None for a text model, or if none can be built."""
    try:
        model = wrapper_model(text_config_of(config))
    except Exception:  # some need packages that are not installed; their tensors are refused by name later
        return None
    return None if model is None else Wrapper(model)
