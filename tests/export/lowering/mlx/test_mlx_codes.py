"""Weights that another tool quantized keep their codes for MLX, and its quantized matmul computes with them."""

from dataclasses import replace

import pytest

pytest.importorskip("mlx.core", reason="pip install 'mlx[cpu]' computes programs for MLX")

import torch  # noqa: E402
from executorch.extension.llm.export.int4 import ExportableInt4Tensor  # noqa: E402
from executorch.extension.llm.export.quant import dequantize_weight  # noqa: E402
from gguf_files import as_read, write_gguf  # noqa: E402 - without MLX they are not needed
from packed_checkpoints import WIDE, linears, planned, save_packed  # noqa: E402
from places import TESTS  # noqa: E402
from torch import nn  # noqa: E402

from eagle3.export.checkpoints import open_source  # noqa: E402
from eagle3.export.checkpoints.gguf_file import GROUPS  # noqa: E402
from eagle3.export.lowering.mlx.backend import BACKEND  # noqa: E402
from eagle3.export.lowering.mlx.exact import InFloat32  # noqa: E402
from eagle3.export.lowering.mlx.lowering import lower  # noqa: E402
from eagle3.export.lowering.mlx.program import methods  # noqa: E402
from eagle3.export.lowering.mlx.quantization import GroupedWeight, grouped  # noqa: E402
from eagle3.export.pipeline import load_speculator  # noqa: E402
from eagle3.export.report import plan_text  # noqa: E402

GOLDEN = TESTS / "golden" / "quantized"
PACKED = ("gptq/v1_g32_asymmetric", "gptq/v2_8_bits_asymmetric", "awq/g64", "compressed_tensors/w4_g128")
WIDTH = 256


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """Weights [N, 256] as each format's reader returns them, by format, and their values in float32."""
    found = {}
    for case in PACKED:
        ((_, weight),) = open_source(GOLDEN / case).tensors()
        found[case] = weight, dequantize_weight(weight, torch.float32)
    half = found["compressed_tensors/w4_g128"][0]
    parts = half.qdata, half.scale.bfloat16(), half.zero_point.bfloat16(), half.group_size, torch.bfloat16
    found["bfloat16"] = ExportableInt4Tensor(*parts), dequantize_weight(ExportableInt4Tensor(*parts), torch.float32)
    drawn = {kind: torch.randn(48, WIDTH) / 16 for kind in GROUPS}
    fields = {"block_count": 2, "attention.head_count": 4, "attention.head_count_kv": 4}
    tensors = {f"blk.{number}.ffn_down.weight": (drawn[kind], kind) for number, kind in enumerate(GROUPS)}
    file = write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", "llama", fields, tensors)
    for kind, (_, weight) in zip(GROUPS, open_source(file).tensors(), strict=True):
        found[kind] = weight, as_read(drawn[kind], kind)
    return found


class Matrices(nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(1, 1, dtype=torch.bfloat16) for _ in weights)
        self.table = nn.Embedding(1, 1)
        for linear, weight in zip(self.linears, weights, strict=True):
            linear.weight = nn.Parameter(weight, requires_grad=False)
            linear.bias = nn.Parameter(torch.randn(weight.shape[0]).bfloat16(), requires_grad=False)
        self.table.weight = nn.Parameter(weights[-1], requires_grad=False)

    def forward(self, x, ids):
        return *(linear(x) for linear in self.linears), self.table(ids)


def test_kept_weights_have_the_values_of_their_tools_and_are_one_quantized_matmul_each(read, tmp_path):
    kept = [grouped(weight) for weight, _ in read.values()]
    for (name, (_, dense)), weight in zip(read.items(), kept, strict=True):
        exact = torch.equal if not name.endswith("_K") else lambda one, other: torch.allclose(one, other, atol=1e-7)
        assert exact(weight.to(dtype=torch.float32).dequantize(), dense), (
            name
        )  # a K-quant's offset is a product, which float32 rounds
    wide = {name for name, weight in zip(read, kept, strict=True) if weight.scale.dtype == torch.float32}
    assert wide == set(read) - {"bfloat16"}
    model, given = Matrices(kept), (torch.randn(1, 5, WIDTH).bfloat16(), torch.tensor([[3, 0, 7]]))
    program = torch.export.export(model, given, strict=False)
    lowered = lower({"all": program}, {})
    (tmp_path / "model.pte").write_bytes(lowered.buffer)
    method = methods(tmp_path / "model.pte")["all"]
    chain = method.graph["instruction_chains"][method.graph["main_chain_idx"]]["instructions"]
    nodes = [each["op_type"] for each in chain]
    assert nodes.count("QuantizedMatmulNode") == len(kept) and "DequantizeNode" in nodes
    method.clear(exact=True)
    found = method(*given)
    with InFloat32(), torch.no_grad():
        expected = model(*given)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_packed_checkpoint_keeps_its_codes_unless_a_recipe_is_typed(tmp_path):
    model = save_packed(tmp_path / "target", "gptq", 4, 32, False, **WIDE)
    plan, count = planned(tmp_path, model, "mlx"), len(linears(model))
    assert f"{count} are quantized already (ExportableInt4Tensor) and keep their codes" in plan_text(plan)
    convert = BACKEND.conversion(plan)
    target = load_speculator(plan, BACKEND.attention, BACKEND.dtype, convert).target
    assert convert.record() == {"kept_codes": count}
    assert sum(isinstance(weight, GroupedWeight) for weight in target.parameters()) == count
    again = replace(plan, config=replace(plan.config, qlinear="none"))
    assert "dequantized" in plan_text(again) and BACKEND.artifact_bytes(plan) < 0.7 * BACKEND.artifact_bytes(again)
    assert BACKEND.conversion(again).record() == {}
