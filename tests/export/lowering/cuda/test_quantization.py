"""ExecuTorch's recipes, fitted to a model, quantize the right weights, and refuse others before any weight is read."""

import pytest
import torch
from executorch.examples.models.gemma4_31b.quantize_and_save import _RECIPES
from executorch.extension.llm.export.int4 import ExportableInt4Tensor
from published import gemma4_config
from torch import nn
from torchao.quantization import IntxUnpackedToInt8Tensor
from transformers import LlamaConfig

from eagle3.export.lowering.cuda.weights.quantization import check_recipe, fitted_recipe, quantize
from eagle3.targets.gemma4 import skeleton


@pytest.mark.parametrize("name", ["default", "sensitive"])
def test_the_recipe_fitted_to_gemma4_31b_is_executorchs_own(name):
    config = gemma4_config(60)
    names = list(skeleton(config, 64).model.state_dict())
    fitted = fitted_recipe(name, config)
    assert {n: fitted.get_config(n) for n in names} == {n: _RECIPES[name].get_config(n) for n in names}
    assert fitted.get_config("model.embed_tokens.weight") == fitted.get_config("embed_tokens.weight")


def test_sensitive_layers_are_the_first_and_last_quarter_of_any_depth():
    recipe = fitted_recipe("sensitive", LlamaConfig(hidden_size=256, num_hidden_layers=8))
    bits = [recipe.get_config(f"base.layers.{layer}.mlp.down_proj.weight").bits for layer in range(8)]
    assert bits == [8, 8, 4, 4, 4, 4, 8, 8]


class Tied(nn.Module):
    def __init__(self, embedding: nn.Embedding | None = None):
        super().__init__()
        self.embed_tokens = embedding or nn.Embedding(8, 256, dtype=torch.bfloat16)
        self.lm_head = nn.Linear(256, 8, bias=False, dtype=torch.bfloat16)
        self.fc_norm = nn.ModuleList([nn.RMSNorm(256, dtype=torch.bfloat16)])


def recipe():
    return fitted_recipe("default", LlamaConfig(hidden_size=256, num_hidden_layers=1))


def test_a_tied_lm_head_is_quantized_separately_from_the_embedding():
    model = Tied()
    model.lm_head.weight = model.embed_tokens.weight
    quantize(model, recipe())
    assert isinstance(model.lm_head.weight, ExportableInt4Tensor)
    assert isinstance(model.embed_tokens.weight, IntxUnpackedToInt8Tensor)
    assert type(model.fc_norm[0].weight.data) is torch.Tensor  # no matrix, whatever its name


def test_an_embedding_of_another_name_is_quantized_to_8_bits():
    """CUDA has no INT4 embedding; this concerns the token tables of xPress and DSpark."""
    model = Tied()
    model.markov_w1 = nn.Embedding(8, 64, dtype=torch.bfloat16)
    config = LlamaConfig(hidden_size=256, num_hidden_layers=1)
    quantize(model, fitted_recipe("default", config, model))
    assert isinstance(model.markov_w1.weight, IntxUnpackedToInt8Tensor)
    assert model.markov_w1.weight.block_size == (1, 64)


def test_modules_shared_with_another_model_are_not_quantized():
    target = Tied()
    draft = Tied(target.embed_tokens)
    quantize(draft, recipe(), spare=target.parameters())
    assert draft.embed_tokens is target.embed_tokens and type(target.embed_tokens.weight.data) is torch.Tensor
    assert isinstance(draft.lm_head.weight, ExportableInt4Tensor)


def test_a_width_that_int4_has_no_layout_for_is_refused_by_name():
    model = Tied()
    model.lm_head = nn.Linear(336, 8, device="meta")
    with pytest.raises(
        ValueError, match="lm_head takes 336 inputs, .* multiple of 256, INT8 one of 32: type --qlinear none"
    ):
        check_recipe("--qlinear", "default", model, LlamaConfig(hidden_size=256, num_hidden_layers=1))


def test_a_width_between_the_blocks_of_int4_is_quantized_to_int8():
    model = Tied()
    model.lm_head = nn.Linear(320, 8, bias=False, dtype=torch.bfloat16)  # gpt-oss is 2,880 wide
    config = LlamaConfig(hidden_size=256, num_hidden_layers=1)
    check_recipe("--qlinear", "default", model, config)
    quantize(model, fitted_recipe("default", config, model))
    assert isinstance(model.lm_head.weight, IntxUnpackedToInt8Tensor)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to quantize on")
def test_hqq_without_a_gpu_says_what_to_type():
    with pytest.raises(ValueError, match="--draft-qlinear sensitive quantizes by HQQ, .* type --draft-qlinear default"):
        check_recipe("--draft-qlinear", "sensitive", Tied(), LlamaConfig(hidden_size=256, num_hidden_layers=1))
