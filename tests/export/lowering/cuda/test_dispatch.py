"""The small-M dispatch chooses the right kernels, the exporter checks its choice, and ExecuTorch's dispatch is
restored."""

import gguf
import pytest
import torch
from executorch.extension.llm.export.gguf import ExportableGGUFTensor
from gguf_files import TYPES, random_blocks
from torch import nn
from torch.export import Dim
from torch.nn import functional as F
from torchao.quantization import IntxUnpackedToInt8Tensor
from transformers import LlamaConfig

from eagle3.export.lowering.cuda.graph.check import check_linears, quantized_uses
from eagle3.export.lowering.cuda.graph.dispatch import small_m_dispatch
from eagle3.export.lowering.cuda.kernels.int4.tiles.tensor import TiledInt4Tensor
from eagle3.export.lowering.cuda.weights.k_quants import KQuantTensor, laid_out
from eagle3.export.lowering.cuda.weights.quantization import fitted_recipe, lay_out, quantize
from eagle3.export.speculator.merged_linears import concatenated

KINDS = (TiledInt4Tensor, IntxUnpackedToInt8Tensor, KQuantTensor)


class Model(nn.Module):
    """A model with an INT8 embedding, an INT4 linear, and an INT4 head that runs on the last row only."""

    def __init__(self, last: bool):
        super().__init__()
        torch.manual_seed(3)
        self.last = last
        self.embed_tokens = nn.Embedding(32, 256, dtype=torch.bfloat16)
        self.proj = nn.Linear(256, 256, bias=True, dtype=torch.bfloat16)
        self.lm_head = nn.Linear(256, 32, bias=False, dtype=torch.bfloat16)
        self.requires_grad_(False)

    def forward(self, tokens):
        x = self.proj(self.embed_tokens(tokens))
        return self.lm_head(x[:, -1:] if self.last else x)


def packed(last: bool = False) -> Model:
    model = Model(last)
    quantize(model, fitted_recipe("default", LlamaConfig(hidden_size=256, num_hidden_layers=1)))
    lay_out(model)
    assert isinstance(model.proj.weight, TiledInt4Tensor) and model.proj.bias is not None
    assert isinstance(model.embed_tokens.weight, IntxUnpackedToInt8Tensor)
    return model


def traced(model: Model, shortest: int, longest: int):
    rows = {1: Dim("rows", min=shortest, max=longest)} if shortest < longest else None
    tokens = torch.zeros(1, longest - 1 | 1, dtype=torch.long)
    with torch.no_grad():
        return torch.export.export(model, (tokens,), dynamic_shapes=(rows,), strict=False)


def handlers() -> list:
    tables = [table for kind in KINDS for table in (kind._TORCH_FN_TABLE[kind], kind._ATEN_OP_TABLE[kind])]
    return [dict(table) for table in tables]


def test_executorchs_dispatch_is_restored_after_success_and_failure():
    before = handlers()
    with small_m_dispatch(8):
        assert handlers() != before
    assert handlers() == before
    with pytest.raises(KeyError), small_m_dispatch(8):
        raise KeyError
    assert handlers() == before
    uses = quantized_uses(traced(packed(), 3, 3))
    assert {use.kind for use in uses if use.layer == "proj"} == {"once a row"}


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (2, 4), (2, 8), (1, 64)])
def test_a_linear_that_may_have_few_rows_uses_the_small_m_kernel(shortest, longest):
    with small_m_dispatch(8):
        program = traced(packed(), shortest, longest)
    assert check_linears("target_verify", program) == {"small_m": 2, "large_m": 0, "dequantize": 0}


def test_a_prefill_chunk_uses_the_large_m_kernel_but_its_one_row_head_does_not():
    with small_m_dispatch(8):
        program = traced(packed(last=True), 9, 64)
    assert check_linears("prefill", program) == {"small_m": 1, "large_m": 1, "dequantize": 0}


def test_a_prefill_chunk_uses_the_large_m_kernel_for_int8():
    model = Model(last=True)
    model.proj.weight = nn.Parameter(
        IntxUnpackedToInt8Tensor.from_hp(model.proj.weight, (1, 32), torch.int8), requires_grad=False
    )
    with small_m_dispatch(8):
        program = traced(model, 9, 64)
    assert check_linears("prefill", program) == {"small_m": 0, "large_m": 1, "dequantize": 0}
    tokens = torch.arange(20)[None]
    expected = F.linear(model.embed_tokens(tokens), model.proj.weight.dequantize(), model.proj.bias)
    expected = F.linear(expected[:, -1:], model.lm_head.weight)
    torch.testing.assert_close(program.module()(tokens), expected, rtol=0.03, atol=0.03)


def test_the_embedding_gathers_rows_before_it_dequantizes():
    with small_m_dispatch(8):
        program = traced(packed(), 2, 4)
    assert [use.kind for use in quantized_uses(program) if use.layer == "embed_tokens"] == ["gather"]


@pytest.mark.parametrize("rows", [1, 5, 8, 17])
def test_dispatched_linears_give_the_numbers_of_dequantized_weights(rows):
    model = packed()
    tokens = torch.arange(rows)[None]
    table, proj, head = (m.weight.dequantize().float() for m in (model.embed_tokens, model.proj, model.lm_head))
    expected = F.linear(F.linear(table[tokens], proj, model.proj.bias.float()), head)
    with small_m_dispatch(8):
        torch.testing.assert_close(model(tokens).float(), expected, rtol=0.03, atol=0.03)


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_use_the_same_dispatch_and_give_the_same_numbers(kind):
    model = Model(last=True)
    weights = {}
    for name, rows in (("embed_tokens", 32), ("proj", 256), ("lm_head", 32)):
        raw = random_blocks(kind, rows, 256, seed=rows)
        weights[name] = torch.from_numpy(gguf.dequantize(raw, TYPES[kind]))
        blocks = ExportableGGUFTensor(torch.from_numpy(raw), kind.lower(), torch.float32)
        model.get_submodule(name).weight = nn.Parameter(laid_out(blocks), requires_grad=False)
    with small_m_dispatch(8):
        verify, prefill = traced(model, 2, 8), traced(model, 9, 64)
    assert check_linears("target_verify", verify) == {"small_m": 2, "large_m": 0, "dequantize": 0}
    assert check_linears("prefill", prefill) == {"small_m": 1, "large_m": 1, "dequantize": 0}
    assert [use.kind for use in quantized_uses(verify) if use.layer == "embed_tokens"] == ["gather"]
    for program, rows in ((verify, 5), (prefill, 20)):
        tokens = torch.arange(rows)[None]
        x = F.linear(
            weights["embed_tokens"][tokens[:, -1:]].bfloat16().float(), weights["proj"], model.proj.bias.float()
        )
        expected = F.linear(x, weights["lm_head"])
        found = program.module()(tokens).float()
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02 * expected.abs().max().item())


@pytest.mark.parametrize(
    ("method", "limit", "lengths", "last", "complaint"),
    [
        ("target_verify", 4, (5, 8), False, "proj would take the kernel for many rows"),
        ("prefill", 64, (9, 64), True, "proj would take the small-M kernel for every row"),
    ],
)
def test_a_linear_on_the_wrong_side_of_the_limit_is_refused_by_name(method, limit, lengths, last, complaint):
    with small_m_dispatch(limit):
        program = traced(packed(last), *lengths)
    with pytest.raises(ValueError, match=f"{method}: {complaint}"):
        check_linears(method, program)


def test_a_verify_that_uses_executorchs_own_dispatch_is_refused():
    with pytest.raises(ValueError, match="target_verify: embed_tokens would dequantize its whole matrix"):
        check_linears("target_verify", traced(packed(), 3, 3))
    model = packed()
    model.embed_tokens = nn.Embedding(32, 256, dtype=torch.bfloat16).requires_grad_(False)
    with pytest.raises(ValueError, match="target_verify: proj would read its weights once a row"):
        check_linears("target_verify", traced(model, 3, 3))


def test_bfloat16_linears_use_the_same_dispatch():
    model = Model(last=True)

    def products(program) -> list[str]:
        names = (str(node.target) for node in program.graph.nodes)
        return [name for name in names if name in ("eagle3.bf16_small_m.default", "aten.linear.default")]

    with small_m_dispatch(8):
        assert products(traced(model, 1, 64)) == ["eagle3.bf16_small_m.default"] * 2
        assert products(traced(model, 9, 64)) == ["aten.linear.default", "eagle3.bf16_small_m.default"]
        assert products(traced(model.float(), 1, 8)) == ["aten.linear.default"] * 2
        model = model.bfloat16()
        tokens = torch.arange(5)[None]
        torch.testing.assert_close(traced(model, 1, 8).module()(tokens), model(tokens))
    assert products(traced(model, 1, 8)) == ["aten.linear.default"] * 2


def test_several_int4_weights_with_one_input_use_one_product(tmp_path):
    model = packed()
    head = concatenated([model.proj.weight.data, model.lm_head.weight.data], tmp_path)
    model.lm_head.weight = nn.Parameter(head, requires_grad=False)
    with small_m_dispatch(8):
        verify, prefill = traced(model, 2, 8), traced(model, 9, 64)
    assert [str(node.target) for node in verify.graph.nodes].count("eagle3.int4_small_m.default") == 2
    for program, rows in ((verify, 5), (prefill, 20)):
        tokens = torch.arange(rows)[None]
        x = F.linear(model.embed_tokens.weight.dequantize()[tokens], model.proj.weight.dequantize(), model.proj.bias)
        expected = F.linear(x, head.dequantize())
        torch.testing.assert_close(program.module()(tokens), expected, rtol=0.03, atol=0.03)
