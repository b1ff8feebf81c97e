"""Makes the decoder layer of an MTP head: a layer of transformers' own model of the target's type, unmodified."""

from typing import TYPE_CHECKING, Any

import torch
from transformers.initialization import no_init_weights

from eagle3.targets.conversion import Conversion
from eagle3.targets.text_part import build, without_whole

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

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
