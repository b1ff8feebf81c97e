"""Weight quantization: ExecuTorch's own recipes, fitted to a model's sizes, and its quantizer.

The recipes are Gemma 4 31B's, written for its 60 layers of width 5376: per-row scales and the layers that they call
sensitive (the first and the last quarter) are moved to the sizes of the model at hand.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from executorch.examples.models.gemma4_31b.quantize_and_save import _RECIPES
from executorch.extension.llm.export.load import assign_state_dict
from executorch.extension.llm.export.quant import QuantRecipe, QuantRule, quantize_model
from torch import nn

from eagle3.export.checkpoints.gguf_file import BLOCKS, K_QUANTS
from eagle3.export.checkpoints.source import TensorHeader

_WRITTEN_FOR_WIDTH, _WRITTEN_FOR_LAYERS = 5376, 60
INT4_BLOCK = 256  # weights that share a step of CUDA's INT4 layout: the width of a linear is a multiple of it


def fitted_recipe(name: str, config: Any) -> QuantRecipe:
    """The recipe ``default`` or ``sensitive`` for a model of transformers' ``config``."""
    width, layers = config.hidden_size, config.num_hidden_layers

    def fitted(rule: QuantRule) -> QuantRule:
        config, sensitive = rule.config, rule.layers
        if config is not None and config.group_size == _WRITTEN_FOR_WIDTH:
            config = replace(config, group_size=width)
        if sensitive is not None:
            sensitive = {layer for layer in range(layers) if layer * _WRITTEN_FOR_LAYERS // layers in sensitive}
        return QuantRule(rf"(.*\.)?{rule.pattern}", config, sensitive)

    return QuantRecipe([fitted(rule) for rule in _RECIPES[name].rules])


def check_recipe(flag: str, name: str, model: nn.Module, config: Any) -> None:
    """Raise ValueError for a linear that INT4 has no layout for, and where quantizing needs a GPU and there is none."""
    recipe = fitted_recipe(name, config)
    for linear, module in model.named_modules(remove_duplicate=False):
        rule = recipe.get_config(f"{linear}.weight") if isinstance(module, nn.Linear) else None
        if rule is not None and rule.bits == 4:
            _check_int4_width(linear, module.in_features, f"type {flag} none")
    asymmetric_hqq = any(r.config and r.config.method == "hqq" and not r.config.symmetric for r in recipe.rules)
    if asymmetric_hqq and not torch.cuda.is_available():
        raise ValueError(
            f"{flag} {name} quantizes by HQQ, which ExecuTorch runs on a GPU, and there is none: type {flag} default, "
            "or name a checkpoint that is quantized already"
        )


def check_headers(headers: dict[str, TensorHeader]) -> None:
    """Raise ValueError for a weight of a quantized checkpoint that CUDA has no layout for."""
    for name, header in headers.items():
        if header.dtype in BLOCKS and header.dtype not in K_QUANTS:
            raise ValueError(
                f"{name} is {header.dtype}, but {', '.join(K_QUANTS)} are the quantized types of GGUF that CUDA has "
                "kernels for: name a file of another quantization, such as Q4_K_M"
            )
        if header.dtype == "Int4Tensor":
            _check_int4_width(name.removesuffix(".weight"), header.shape[1], "leave it unquantized, or in INT8")


def _check_int4_width(linear: str, width: int, cure: str) -> None:
    if width % INT4_BLOCK:
        raise ValueError(f"{linear} takes {width} inputs, but INT4 for CUDA wants a multiple of {INT4_BLOCK}: {cure}")


def quantize(model: nn.Module, recipe: QuantRecipe, spare: Iterable[nn.Parameter] = ()) -> None:
    """Quantize in place the weights of linears and embeddings that the recipe names, except ``spare``.

    A head tied to the embedding is quantized apart from it: the recipes store the two differently.
    """
    modules = list(model.modules())
    embeddings = {id(module.weight) for module in modules if isinstance(module, nn.Embedding)}
    matrices = {*embeddings, *(id(module.weight) for module in modules if isinstance(module, nn.Linear))}
    left = matrices - {id(parameter) for parameter in spare}
    for module in modules:
        if isinstance(module, nn.Linear) and id(module.weight) in embeddings & left:
            module.weight = nn.Parameter(module.weight.data, requires_grad=False)
            left.add(id(module.weight))
    kept = [re.escape(name) for name, parameter in model.named_parameters() if id(parameter) not in left]
    rules = [QuantRule("|".join(kept), None), *recipe.rules]
    assign_state_dict(model, quantize_model(model, QuantRecipe(rules)))
