"""Chooses the transformers class for a configuration, and builds the part of a multimodal model that reads text.

A multimodal class (a wrapper) has a text decoder and a head, and its own forward computes the logits. That forward may
leave out scales or a softcap of the text model's class. Image and audio towers stay on the meta device.
"""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion

_WHOLE = "whole_config"
"""The attribute of a text configuration that holds the configuration containing it, and the path of field names that
leads to it."""


def text_config_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the text configuration in ``config``. If ``config`` is larger, the text configuration keeps a reference to
    it.

    Raises ValueError, as transformers does, for a configuration with several text configurations.
    """
    text = config.get_text_config()
    if text is not config:
        path = next(_paths(config, text), None)
        if path is None:  # transformers built it from fields of the containing configuration
            return text
        text.__dict__[_WHOLE] = (config, path)
    return text


def is_part(config: PreTrainedConfig) -> bool:
    """Return True if a text configuration is a part of a larger configuration."""
    return _WHOLE in config.__dict__


def like(config: PreTrainedConfig, other: PreTrainedConfig) -> PreTrainedConfig:
    """Make ``config`` the text part of the same larger configuration as ``other``, and return it."""
    if is_part(other):
        config.__dict__[_WHOLE] = other.__dict__[_WHOLE]
    return config


def without_whole(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of a text configuration that is no part of a larger one, so that the text model's class is used."""
    config = deepcopy(config)
    config.__dict__.pop(_WHOLE, None)
    return config


def whole_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of the configuration that contains a text configuration, with that text configuration in it.

    Some classes make the parts outside of the text model in the dtype of the containing configuration, so that is set
    to the text configuration's.
    """
    config = deepcopy(config)
    whole, path = config.__dict__.pop(_WHOLE, (config, ()))
    owner = whole
    for name in path[:-1]:
        owner = getattr(owner, name)
    if path:
        setattr(owner, path[-1], config)
        if config.dtype is not None:
            whole.dtype = config.dtype
    return whole


def fields_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the text configuration's own fields."""
    fields = config.to_dict()
    fields.pop(_WHOLE, None)
    return fields


def _paths(config: PreTrainedConfig, part: PreTrainedConfig) -> Iterator[tuple[str, ...]]:
    for name in config.sub_configs or ():
        inner = getattr(config, name, None)
        if inner is part:
            yield (name,)
        elif isinstance(inner, PreTrainedConfig):
            yield from ((name, *rest) for rest in _paths(inner, part))


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the class for a text configuration, or for the larger configuration that contains it.

    It is the first of ``architectures`` that accepts one of the two configurations and generates text, or else the
    class in transformers' mappings. Raises ValueError if there is none.
    """
    whole, _ = config.__dict__.get(_WHOLE, (config, ()))
    for name in whole.architectures or ():
        named: Any = getattr(transformers, name, None)
        generates = _is_model(named) and named.can_generate()
        if generates and named.config_class in (type(whole), type(config)):
            return named
    for kind in dict.fromkeys((type(whole), type(config))):
        for mapping in (
            MODEL_FOR_CAUSAL_LM_MAPPING,
            MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
            MODEL_FOR_MULTIMODAL_LM_MAPPING,
        ):
            found = mapping.get(kind, None)
            if found is not None:
                return found[0] if isinstance(found, tuple) else found
    raise ValueError(
        f"model_type {whole.model_type} has no class in transformers that generates text: "
        "eagle3-export --list-targets lists what is supported"
    )


def _is_model(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, PreTrainedModel)


def wrapper_model(config: PreTrainedConfig) -> PreTrainedModel | None:
    """Return the multimodal model that a text configuration belongs to, on the meta device; None for a text model.

    Raises ValueError if transformers has no class for it, and whatever that class raises.
    """
    kind, whole = model_class(config), whole_config(config)
    if type(whole) is type(config) or isinstance(config, kind.config_class):
        return None
    with torch.device("meta"):
        return kind._from_config(whole, attn_implementation="eager")


def build(config: PreTrainedConfig, real: bool = False) -> "PreTrainedModel | TextPart":
    """Build the model of a text configuration: transformers' own model, or the ``TextPart`` of a wrapper.

    The configuration is not changed. With ``real``, the text part gets initial weights, even if the current device is
    the meta device. Raises ValueError for a wrapper whose parts are not found, and any error that transformers raises.
    """
    kind, text = model_class(config), MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    try:
        wrapper = wrapper_model(config)
    except RuntimeError:  # a tower reads its values while it is built (Idefics 3), so the text class is used
        if text is None:
            raise
        wrapper, kind = None, text
    if wrapper is None:
        return kind._from_config(whole_config(config).get_text_config(), attn_implementation="eager")
    part = TextPart(wrapper)
    if real:
        part.initialize()
    return part


class TextPart(nn.Module):
    """The text decoder and the head of a ``wrapper`` on the meta device, under the names that a text model uses.

    The wrapper is not a submodule, so only its own forward sees its other parts.
    """

    base_model_prefix = "model"
    wrapper: PreTrainedModel

    def __init__(self, wrapper: PreTrainedModel):
        super().__init__()
        whole, head = wrapper.get_decoder(), wrapper.get_output_embeddings()
        decoder: Any = whole if hasattr(whole, "layers") else getattr(whole, "model", None)
        names = {id(module): name for name, module in wrapper.named_modules()}
        self.paths: dict[str, str] = {"model": names.get(id(decoder), ""), "lm_head": names.get(id(head), "")}
        if not all(self.paths.values()) or not self.paths["lm_head"].endswith("lm_head"):
            raise ValueError(
                f"{type(wrapper).__name__} has no text decoder and lm_head that could be told from the rest"
            )
        self.__dict__["wrapper"] = wrapper
        self.model, self.lm_head, self.config = decoder, head, decoder.config

    @property
    def owner(self) -> PreTrainedModel:
        """The model whose forward computes the logits: the wrapper, or a complete text model within it."""
        return self.wrapper.get_submodule(self.paths["lm_head"].rpartition(".")[0])

    @property
    def all_tied_weights_keys(self) -> dict[str, str]:
        """The tied weights of the text part, in the form of transformers' attribute of this name."""
        tied = {self.text_name(to): self.text_name(by) for to, by in self.wrapper.all_tied_weights_keys.items()}
        return {to: by for to, by in tied.items() if to and by}

    def text_name(self, name: str) -> str | None:
        """Return the text model's name of a tensor of the wrapper; None if it is not in the text part."""
        for own, path in self.paths.items():
            if name.startswith(f"{path}."):
                return own + name.removeprefix(path)
        return None

    def wrapped_name(self, name: str) -> str:
        own, _, rest = name.partition(".")
        return f"{self.paths[own]}.{rest}"

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def initialize_weights(self) -> None:
        self.model.initialize_weights()

    def initialize(self) -> None:
        """Build the text part again, with initial weights on the CPU."""
        self.model = type(self.model)._from_config(self.config, attn_implementation="eager")
        head = nn.Linear(self.lm_head.in_features, self.lm_head.out_features, self.lm_head.bias is not None)
        self.lm_head, self.config = head, self.model.config
        if "lm_head.weight" in self.all_tied_weights_keys:
            head.weight = self.model.embed_tokens.weight
        self.wrapper.set_submodule(self.paths["model"], self.model)
        self.wrapper.set_submodule(self.paths["lm_head"], head)

    def forward(self, *args: Any, **given: Any) -> Any:  # noqa: ANN401 - what the wrapper gives
        return self.wrapper(*args, **given)

    def saved(self) -> dict[str, Tensor]:
        """Return the text part's tensors with the names and shapes with which transformers saves the wrapper."""
        own = {self.wrapped_name(name): value for name, value in self.state_dict().items()}
        tied = set(map(self.wrapped_name, self.all_tied_weights_keys))
        own = {name: value for name, value in own.items() if name not in tied}
        return {name: value.contiguous() for name, value in revert_weight_conversion(self.wrapper, own).items()}
