"""The forms that XNNPACK takes whole are the functions they stand for."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from eagle3.export.lowering.xnnpack.forms import tanh_gelu, use_product_norms


def test_norms_keep_their_own_epsilon_and_weight():
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


def test_gelu_is_the_tanh_approximation_within_and_torchs_own_after():
    x, own = torch.linspace(-6, 6, 1001), F.gelu
    with tanh_gelu(nn.Module()):
        torch.testing.assert_close(F.gelu(x, approximate="tanh"), own(x, approximate="tanh"), atol=1e-6, rtol=1e-5)
        assert torch.equal(F.gelu(x), own(x))
    assert F.gelu is own


def test_a_reference_to_gelu_that_was_taken_before_is_the_approximation_too():
    """transformers' ``GELUTanh`` holds one; XNNPACK would compute the exact GELU for it, 4.7e-4 off."""
    mlp = nn.Sequential(nn.Linear(8, 8), ACT2FN["gelu_pytorch_tanh"], nn.GELU(approximate="tanh")).requires_grad_(False)
    x = torch.randn(3, 8)
    expected = mlp(x)
    with tanh_gelu(mlp):
        torch.testing.assert_close(mlp(x), expected, atol=1e-6, rtol=1e-5)
        program = torch.export.export(mlp, (x,), strict=False)
    assert not [node for node in program.graph.nodes if node.op == "call_function" and "gelu" in str(node.target)]
