"""Linears with one input are merged into one product with the same numbers, for any family, kind of weight and
input."""

import pytest
import torch
from executorch.extension.llm.export.gguf import ExportableGGUFTensor
from gguf_files import random_blocks
from torch import nn
from torchao.utils import TorchAOBaseTensor
from transformers import LlamaConfig

from eagle3.export.lowering.cuda.weights.k_quants import laid_out
from eagle3.export.lowering.cuda.weights.quantization import fitted_recipe, lay_out, quantize
from eagle3.export.speculator import tensor_files
from eagle3.export.speculator.merged_linears import Slice, concatenated, form, merge_linears


@pytest.mark.parametrize("name", ["gemma4-31B", "gpt-oss-20b", "llama4-scout"])
def test_every_family_gives_the_same_numbers_with_merged_linears(eager_target, name, tmp_path):
    target, merged = eager_target(name), eager_target(name)
    merge_linears(merged, tmp_path)
    linears = [sum(isinstance(module, nn.Linear) for module in model.modules()) for model in (target, merged)]
    assert linears[1] < linears[0]
    tokens, positions = torch.arange(5, 14)[None], torch.arange(9)
    with torch.no_grad():
        (state, _), (again, _) = target(tokens, positions, ()), merged(tokens, positions, ())
    assert torch.allclose(state, again, atol=1e-5)


class Attention(nn.Module):
    """Attention projections; with ``crossed``, keys and values have a separate input."""

    def __init__(self, bias: bool = False, crossed: bool = False):
        super().__init__()
        torch.manual_seed(5)
        self.crossed = crossed
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(256, n, bias=bias) for n in (256, 128, 64))
        self.requires_grad_(False)

    def forward(self, x):
        other = x.flip(-1) if self.crossed else x
        return torch.cat((self.q_proj(x), self.k_proj(other), self.v_proj(other)), dim=-1)


@pytest.mark.parametrize(("bias", "crossed"), [(False, False), (True, True)])
def test_linears_with_another_input_are_merged_separately(bias, crossed, tmp_path):
    model, merged = Attention(bias, crossed), Attention(bias, crossed)
    merge_linears(merged, tmp_path)
    x = torch.randn(3, 256)
    assert isinstance(merged.v_proj, Slice)
    assert torch.allclose(model(x), merged(x), atol=1e-5)
    products = [node for node in torch.export.export(merged, (x,)).graph.nodes if "linear" in str(node.target)]
    assert len(products) == (2 if crossed else 1)


def test_linears_that_do_not_match_are_not_merged(tmp_path):
    model = Attention()
    model.k_proj = model.k_proj.to(torch.bfloat16)
    merge_linears(model, tmp_path)
    assert isinstance(model.k_proj, nn.Linear) and isinstance(model.q_proj, Slice) and isinstance(model.v_proj, Slice)
    model = Attention()
    model.other = nn.Linear(256, 256, bias=False)
    model.other.weight = model.q_proj.weight  # for example a tied head
    merge_linears(model, tmp_path)
    assert isinstance(model.q_proj, nn.Linear) and isinstance(model.k_proj, Slice)


def recipe() -> list[torch.Tensor]:
    model = Attention().to(torch.bfloat16)
    quantize(model, fitted_recipe("default", LlamaConfig(hidden_size=256, num_hidden_layers=1)))
    lay_out(model)
    return [linear.weight.data for linear in (model.q_proj, model.k_proj)]


def k_quant(kind: str, rows: int) -> torch.Tensor:
    blocks = torch.from_numpy(random_blocks(kind, rows, 256))
    return laid_out(ExportableGGUFTensor(blocks, kind.lower(), torch.bfloat16))


@pytest.mark.parametrize("large", [tensor_files.LARGE, 0])
@pytest.mark.parametrize(
    ("kind", "outputs"),
    [("plain", ()), ("quantized", ()), ("Q5_K", (50, 7)), ("Q6_K", (128, 65, 2))],
)
def test_joined_weights_have_the_values_of_their_parts(kind, outputs, large, tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "LARGE", large)
    if kind == "plain":
        weights = [torch.randn(n, 256) for n in (8, 24)]
    elif kind == "quantized":
        weights = recipe()
    else:
        weights = [k_quant(kind, rows) for rows in outputs]
    one = concatenated(weights, tmp_path)
    plain = [w.dequantize() if isinstance(w, TorchAOBaseTensor) else w for w in (one, *weights)]
    assert one.shape == plain[0].shape and torch.equal(plain[0], torch.cat(plain[1:]))
    assert not list(tmp_path.iterdir())


def test_weights_of_different_kinds_are_not_merged():
    plain = torch.zeros(8, 256, dtype=torch.bfloat16)
    kinds = [k_quant("Q4_K", 64), k_quant("Q6_K", 64), *recipe()[:1], plain, plain.float(), plain[:, :128]]
    assert len(set(map(form, kinds))) == len(kinds)
    assert form(k_quant("Q4_K", 128)) == form(kinds[0])
