"""A multimodal model of transformers, as far as the text model in it is to be found: what of its tensors belongs to the
text model, and whether its head is tied. All of it is read from transformers' own class, on the meta device.
"""

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from eagle3.targets.text_part import text_config_of, wrapper_model


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

    def _name(self, part: nn.Module | None) -> str | None:
        """Of a module within the model, None for the model itself and for none."""
        return next((name for name, module in self.model.named_modules() if name and module is part), None)


def wrapper_of(config: PreTrainedConfig) -> Wrapper | None:
    """The wrapper of a checkpoint's whole configuration; None where it is a text model's, or none can be made of it."""
    try:
        model = wrapper_model(text_config_of(config))
    except Exception:  # some want packages that are not here; a tensor of theirs is then refused by name
        return None
    return None if model is None else Wrapper(model)
