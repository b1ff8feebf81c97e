"""Weight quantization by ExecuTorch's own recipes, fitted to a model's sizes, and by its quantizer.

The recipes are those of Gemma 4 31B, written for its 60 layers of width 5376. Per-row scales and the sensitive layers
(the first and the last quarter) are scaled to the sizes of the model at hand.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from executorch.examples.models.gemma4_31b.cuda_packers import convert_quantized_tensors_for_cuda
from executorch.examples.models.gemma4_31b.quantize_and_save import _RECIPES
from executorch.extension.llm.export.load import assign_state_dict
from executorch.extension.llm.export.quant import QuantConfig, QuantRecipe, QuantRule, quantize_model
from torch import nn

from eagle3.export.checkpoints.gguf_file import BLOCKS, K_QUANTS
from eagle3.export.checkpoints.source import TensorHeader
from eagle3.export.lowering.cuda.kernels.int4.tiles.tensor import lay_out_int4
from eagle3.export.lowering.cuda.weights.experts import expert_rules, fused_linears
from eagle3.targets.spec import Skeleton

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_WRITTEN_FOR_WIDTH, _WRITTEN_FOR_LAYERS = 5376, 60
INT8 = QuantConfig(bits=8, group_size=32, symmetric=True, method="min_max")
# the number of weights that share a step of CUDA's INT4 layout; a linear's width must be a multiple of it
INT4_BLOCK = 256


def fitted_recipe(name: str, config: "PreTrainedConfig", model: nn.Module | None = None) -> QuantRecipe:
    """Return the recipe ``default`` or ``sensitive`` for a model of transformers' ``config``. With ``model``, it also
    has rules for experts, for a table of per-layer inputs and for widths that INT4 has no layout for."""
    width, layers = config.hidden_size, config.num_hidden_layers

    def fitted(rule: QuantRule) -> QuantRule:
        config, sensitive = rule.config, rule.layers
        if config is not None and config.group_size == _WRITTEN_FOR_WIDTH:
            config = replace(config, group_size=width)
        if sensitive is not None:
            sensitive = {layer for layer in range(layers) if layer * _WRITTEN_FOR_LAYERS // layers in sensitive}
        return QuantRule(rf"(.*\.)?{rule.pattern}", config, sensitive)

    own = [] if model is None else [*_rules_of_tables(model, config), *expert_rules(model), *_rules_of_widths(model)]
    return QuantRecipe([*own, *(fitted(rule) for rule in _RECIPES[name].rules)])


def _rules_of_tables(model: nn.Module, config: "PreTrainedConfig") -> list[QuantRule]:
    """Return rules that use INT8 for embedding tables other than the token embedding: the table of per-layer inputs,
    with a scale for each layer's part of a row, and a draft head's own tables, with a scale for each row. The recipes
    give INT4 to every other weight, but CUDA has no look-up in INT4."""
    part = getattr(config, "hidden_size_per_layer_input", 0)
    tables = {name: part for name, _ in model.named_modules() if name.endswith("embed_tokens_per_layer")}
    tables |= {
        name: module.embedding_dim
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and name not in tables and not name.endswith("embed_tokens")
    }
    patterns = {rf"(.*\.)?{re.escape(name)}\.weight": width for name, width in tables.items()}
    return [QuantRule(pattern, replace(INT8, group_size=width)) for pattern, width in patterns.items()]


def _rules_of_widths(model: nn.Module) -> list[QuantRule]:
    """Return rules that use INT8 for widths for which INT4 would need padding (gpt-oss is 2,880 wide). INT8 takes any
    multiple of 32."""
    linears = ((name, module.in_features) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    names = [re.escape(name) for name, width in linears if width % INT4_BLOCK and width % INT8.group_size == 0]
    return [QuantRule(rf"(.*\.)?({'|'.join(names)})\.weight", INT8)] if names else []


def check_recipe(flag: str, name: str, model: nn.Module, config: "PreTrainedConfig") -> None:
    """Raise ValueError for a linear that INT4 has no layout for, or if quantizing needs a GPU and there is none."""
    recipe, fused = fitted_recipe(name, config, model), fused_linears(model)
    for linear, module in model.named_modules(remove_duplicate=False):
        laid_out = isinstance(module, nn.Linear) and linear not in fused
        rule = recipe.get_config(f"{linear}.weight") if laid_out else None
        if rule is not None and rule.bits == 4:
            _check_int4_width(linear, module.in_features, f"type {flag} none")
    asymmetric_hqq = any(r.config and r.config.method == "hqq" and not r.config.symmetric for r in recipe.rules)
    if asymmetric_hqq and not torch.cuda.is_available():
        raise ValueError(
            f"{flag} {name} quantizes by HQQ, which ExecuTorch runs on a GPU, and there is none: type {flag} default, "
            "or name a checkpoint that is quantized already"
        )


def check_quantized_headers(headers: dict[str, TensorHeader], skeleton: Skeleton) -> None:
    """Raise ValueError for a weight of a quantized checkpoint that CUDA has no layout for."""
    embeddings = {f"{name}.weight" for name, m in skeleton.model.named_modules() if isinstance(m, nn.Embedding)}
    for name, header in headers.items():
        if header.dtype in BLOCKS and len(header.shape) == 3:
            raise ValueError(
                f"{name} is {header.dtype}, but CUDA has no kernel for experts in GGUF's blocks: name the model's "
                "Hugging Face folder, whose experts become INT4, or type --backend xnnpack"
            )
        if header.dtype in BLOCKS and header.dtype not in K_QUANTS:
            raise ValueError(
                f"{name} is {header.dtype}, but {', '.join(K_QUANTS)} are the quantized types of GGUF that CUDA has "
                "kernels for: name a file of another quantization, such as Q4_K_M"
            )
        four_bits = header.dtype in ("Int4Tensor", "ExportableInt4Tensor")
        if four_bits:
            _check_int4_width(name.removesuffix(".weight"), header.shape[1], "leave it unquantized, or in INT8")
        if four_bits and skeleton.key_map(name) in embeddings:
            raise ValueError(f"{name} is a 4-bit embedding, but CUDA looks up 8-bit ones: leave it unquantized")
        group, least = header.group, 32 if four_bits else 16
        if group and (group % least or (four_bits and group > INT4_BLOCK and group % INT4_BLOCK)):
            sizes = "32, 64, 128 and multiples of 256" if four_bits else "multiples of 16"
            raise ValueError(
                f"{name} has scales for groups of {group} columns, but the kernels take {sizes}: name a checkpoint "
                "with coarser groups, or type --backend xnnpack, which dequantizes"
            )


def _check_int4_width(linear: str, width: int, advice: str) -> None:
    if width % INT4_BLOCK:
        raise ValueError(
            f"{linear} takes {width} inputs, but INT4 for CUDA needs a multiple of {INT4_BLOCK}, INT8 one of 32: "
            f"{advice}"
        )


def quantize(model: nn.Module, recipe: QuantRecipe, spare: Iterable[nn.Parameter] = ()) -> None:
    """Quantize in place the weights of linears and embeddings that the recipe names, except ``spare``.

    A head tied to the embedding is quantized separately, because the recipes store the two in different types.
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


def lay_out(model: nn.Module, spare: Iterable[nn.Parameter] = ()) -> None:
    """Convert the quantized weights of ``model`` to the layouts of their CUDA kernels, in place, except ``spare``."""
    spared = set(map(id, spare))
    for module in model.modules():
        if id(getattr(module, "weight", None)) not in spared and not any(module.children()):
            convert_quantized_tensors_for_cuda(module)
            lay_out_int4(module)
