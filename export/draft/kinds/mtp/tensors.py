"""Reads the tensors of an MTP layer from a target's own checkpoint, with the names and shapes of the head's module.
Experts, which are separate tensors on the disk, are merged like the target's (``targets/conversion.py``).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.initialization import no_init_weights

from eagle3.export.checkpoints.source import Source, TensorHeader
from eagle3.targets.conversion import Conversion
from eagle3.targets.text_part import build, without_whole

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class LayerTensors(Source):
    """The tensors of ``source`` that ``names`` lists. ``names`` maps the checkpoint's name of a tensor to the head's,
    or to that of an expert below ``layers.0.``."""

    def __init__(self, source: Source, names: Mapping[str, str], config: "PreTrainedConfig"):
        super().__init__(source.path)
        self._source, self._conversion, self.names = source, conversion_of(config), names
        self._names = {name: self._converted(own) for name, own in names.items()}
        shapes = self._conversion.model.state_dict()
        self._shapes = {name: tuple(value.shape) for name, value in shapes.items()}

    @staticmethod
    def recognizes(path: Path) -> bool:  # noqa: ARG004 - always a part of another source
        return False

    def files(self) -> list[Path]:
        return self._source.files()

    def headers(self) -> dict[str, TensorHeader]:
        """Return the headers by the head's names. Experts are single or already merged. Raises ValueError for an expert
        that is missing, and for experts of another shape."""
        found, parts = {}, {}
        for name, header in self._source.headers().items():
            own = self._names.get(name)
            if own in self._conversion.parts:
                parts[own] = header
            elif own in self._conversion.replaced:
                place, _ = self._conversion.replaced[own]
                self._check_shape(own, header, tuple(self._conversion.own[own].shape))
                found[_head_name(place)] = TensorHeader(self._shapes[place], header.dtype, header.bytes)
            elif own is not None:
                found[_head_name(own)] = header
        return found | self._merged(parts)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        given = ((self._names[name], tensor) for name, tensor in self._source.tensors() if name in self._names)
        for own, tensor in self._conversion.joined(given):
            yield _head_name(own), tensor

    def _converted(self, own: str) -> str:
        """Return the name that the conversion uses for a tensor of the layer."""
        return (self._conversion.name(f"model.{own}") if own.startswith(LAYER) else None) or own

    def _merged(self, parts: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
        merged: dict[str, TensorHeader] = {}
        for name, part in self._conversion.parts.items() if parts else ():
            if name.startswith(f"model.{LAYER}"):
                header, place = parts.get(name), _head_name(name)
                if header is None:
                    raise ValueError(f"{self.path}: its MTP layer lacks {place}: is a shard missing?")
                self._check_shape(name, header, part.shape)
                own, _ = self._conversion.replaced[part.target]
                size = merged[_head_name(own)].bytes if _head_name(own) in merged else 0
                merged[_head_name(own)] = TensorHeader(self._shapes[own], header.dtype, size + header.bytes)
        return merged

    def _check_shape(self, own: str, header: TensorHeader, shape: tuple[int, ...]) -> None:
        if header.shape != shape:
            raise ValueError(
                f"{self.path}: {_head_name(own)} of its MTP layer is {list(header.shape)}, but config.json implies "
                f"{list(shape)}"
            )


def _head_name(own: str) -> str:
    return own.removeprefix("model.")


LAYER = "layers.0."


def one_layer_config(config: "PreTrainedConfig") -> "PreTrainedConfig":
    """Return the configuration of a model whose only layer is like one appended to ``config``: it has full attention,
    and experts if the last layers have them. It is the text model's, also if the target is multimodal."""
    fewer = without_whole(config)
    if getattr(fewer, "first_k_dense_replace", None) is not None:
        fewer.first_k_dense_replace = int(config.num_hidden_layers < config.first_k_dense_replace)
    if getattr(fewer, "mlp_layer_types", None):
        fewer.mlp_layer_types = config.mlp_layer_types[-1:]
    if getattr(fewer, "layer_types", None):
        fewer.layer_types = ["full_attention"]
    fewer.num_hidden_layers = 1
    return fewer


def one_layer_model(config: "PreTrainedConfig") -> "PreTrainedModel":
    """Return transformers' model of one layer, the MTP layer, on the meta device. ``config`` is the target's."""
    with torch.device("meta"), no_init_weights():
        return build(one_layer_config(config))


def layer_of(model: Any) -> Any:  # noqa: ANN401 - the class depends on the model type
    return model.model.layers[0]


def conversion_of(config: "PreTrainedConfig") -> Conversion:
    """Return the conversion of the one-layer model's checkpoints. It replaces the experts in its layer by ``Experts``
    of this package."""
    return Conversion(one_layer_model(config))
