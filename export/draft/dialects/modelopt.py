"""NVIDIA ModelOpt: flat Llama keys, variants in ``eagle_config``.

Its layer ids mean outputs of layers (1, n // 2 - 1, n - 4 by default), as in TensorRT-LLM. Training by version 0.47
applies ``input_layernorm`` to the feature before ``hidden_norm``. Older versions did not, and neither do the engines
that run its heads. The files do not record the version. This package norms the feature once. Source: nvidia-modelopt
0.47.0, ``export/plugins/hf_spec_configs.py``, ``speculative/plugins/hf_eagle.py`` and ``modeling_eagle.py``.
"""

from collections.abc import Collection
from typing import Any

from eagle3.export.draft.dialects.dialect import Dialect

OWN: tuple[str, ...] = (
    "use_input_layernorm_in_first_layer",
    "use_last_layernorm",
    "use_mtp_layernorm",
    "next_layer_regular",
)
OWN += ("parallel_draft_step", "parallel_draft_heads_num_layers", "return_hidden_post_norm", "eh_proj_before_attn")


def recognizes(config: dict[str, Any], _tensors: Collection[str]) -> bool:
    variants = config.get("eagle_config")
    return isinstance(variants, dict) and any(key in variants for key in OWN)


HEEDS: tuple[str, ...] = ("use_aux_hidden_state", "use_last_layernorm", "use_input_layernorm_in_first_layer")
HEEDS += ("norm_before_fc", "return_hidden_post_norm")
"""Keys that the trainer's code uses; the last two only in older versions."""

DIALECT = Dialect("modelopt", recognizes, trainer="ModelOpt", heeds=lambda _kind: HEEDS, ids_are="output")
