"""The forms of norms, activations and rotations for XNNPACK equal the functions that they replace."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.models.cohere import modeling_cohere
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.mistral.modeling_mistral import MistralRMSNorm

from eagle3.export.lowering.xnnpack.forms import product_rotary, tanh_gelu, use_product_norms


def test_norms_in_xnnpacks_form_keep_their_epsilon_and_weight():
    norms = nn.Sequential(*(nn.RMSNorm(8, eps=eps) for eps in (1e-1, 1.2e-1, 1e-6)), nn.RMSNorm(4, 1e-6, False))
    norms = norms.requires_grad_(False)
    for norm in norms[:3]:
        norm.weight.normal_()
    x = torch.randn(3, 8)
    expected = [norm(x[..., : norm.normalized_shape[0]]) for norm in norms]
    sizes = [norm.normalized_shape[0] for norm in norms]
    use_product_norms(norms)
    for norm, size, wanted in zip(list(norms.children()), sizes, expected, strict=True):
        assert type(norm).__name__ == "ProductRMSNorm"
        torch.testing.assert_close(norm(x[..., :size]), wanted, atol=1e-6, rtol=1e-6)


def test_gelu_is_the_tanh_approximation_within_the_context_and_torchs_own_after_it():
    x, own = torch.linspace(-6, 6, 1001), F.gelu
    with tanh_gelu(nn.Module()):
        torch.testing.assert_close(F.gelu(x, approximate="tanh"), own(x, approximate="tanh"), atol=1e-6, rtol=1e-5)
        assert torch.equal(F.gelu(x), own(x))
    assert F.gelu is own


def test_an_earlier_reference_to_gelu_is_the_tanh_approximation_too():
    """transformers' ``GELUTanh`` holds an earlier reference to ``F.gelu``. XNNPACK would compute the exact GELU for it,
    which is off by 4.7e-4."""
    mlp = nn.Sequential(nn.Linear(8, 8), ACT2FN["gelu_pytorch_tanh"], nn.GELU(approximate="tanh")).requires_grad_(False)
    x = torch.randn(3, 8)
    expected = mlp(x)
    with tanh_gelu(mlp):
        torch.testing.assert_close(mlp(x), expected, atol=1e-6, rtol=1e-5)
        program = torch.export.export(mlp, (x,), strict=False)
    assert not [node for node in program.graph.nodes if node.op == "call_function" and "gelu" in str(node.target)]


@pytest.mark.parametrize("kind", [MistralRMSNorm, Gemma3RMSNorm])
def test_a_norm_of_any_family_is_recognized_by_its_results(kind):
    norm = kind(8, eps=1e-3).requires_grad_(False)
    norm.weight.normal_()
    owner, x = nn.Sequential(norm), torch.randn(3, 8)
    use_product_norms(owner)
    assert type(owner[0]).__name__ == "ProductRMSNorm"
    torch.testing.assert_close(owner(x), norm(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [nn.LayerNorm, CohereLayerNorm])
def test_a_norm_of_another_kind_is_not_replaced(kind):
    owner = nn.Sequential(kind(8))
    use_product_norms(owner)
    assert type(owner[0]) is kind


@pytest.mark.parametrize("family", [modeling_llama, modeling_cohere], ids=["halves", "neighbours"])
def test_a_rotation_as_a_product_equals_the_familys_own(family):
    owner = nn.Module()
    owner.layer = family.__dict__["LlamaRMSNorm" if family is modeling_llama else "CohereLayerNorm"](8)
    x, own = torch.randn(1, 2, 3, 8), family.rotate_half
    with product_rotary(owner, {8}):
        assert family.rotate_half is not own
        torch.testing.assert_close(family.rotate_half(x), own(x), atol=1e-6, rtol=1e-6)
        assert torch.equal(family.rotate_half(x[..., :4]), own(x[..., :4]))  # a partial rotation is not replaced
    assert family.rotate_half is own
