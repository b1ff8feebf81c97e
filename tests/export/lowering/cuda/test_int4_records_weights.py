"""INT4 weights of a model are packed into records without loss, and its linears use the kernels that read them."""

import pytest
import torch
from commands import fail_command
from records_models import Mlp, linear, tiles, traced
from torch import nn
from torch.nn import functional as F

from eagle3.export.cli import main as export_main
from eagle3.export.configuration.config import INT4_LAYOUTS, ExportConfig
from eagle3.export.lowering.cuda.backend import BACKEND as backend
from eagle3.export.lowering.cuda.gpu_memory import gpu_memory
from eagle3.export.lowering.cuda.graph.check import check_linears
from eagle3.export.lowering.cuda.graph.dispatch import small_m_dispatch
from eagle3.export.lowering.cuda.graph.gates import gate_in_products
from eagle3.export.lowering.cuda.kernels.int4.layouts import LAYOUTS, layout_of
from eagle3.export.lowering.cuda.kernels.int4.records.tensor import RecordsInt4Tensor, pack_records
from eagle3.export.lowering.cuda.kernels.int4.tiles.tensor import TiledInt4Tensor
from eagle3.export.lowering.cuda.kernels.sums import SILU
from eagle3.export.planning.plan import make_plan
from eagle3.export.speculator.merged_linears import concatenated


@pytest.fixture
def model(tmp_path) -> Mlp:
    made = Mlp(tmp_path)
    assert pack_records(made, tmp_path) == {"records": 2, "tiles": 0}
    return made


def products(program) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if "eagle3.int4" in str(node.target)]


@pytest.mark.parametrize("widths", [(64,), (128, 192), (64, 64, 320)])
def test_weights_merged_or_not_are_unpacked_from_records_bit_for_bit(widths, tmp_path):
    weights = [tiles(width, 512) for width in widths]
    model = nn.Sequential(linear(concatenated(weights, tmp_path) if len(weights) > 1 else weights[0]))
    pack_records(model, tmp_path)
    held = model[0].weight.data
    assert isinstance(held, RecordsInt4Tensor) and held.qdata.nbytes == round(sum(widths) * 512 * 0.578125)
    found = held.coalesced()
    for part in ("qdata", "scale", "scale_step", "zero_point", "zero_point_step"):
        expected = torch.cat([getattr(each, part) for weight in weights for each in weight.coalesced()])
        assert torch.equal(getattr(found, part).view(torch.uint8), expected.view(torch.uint8)), part
    dense = torch.cat([weight.dequantize(torch.float32) for weight in weights])
    assert torch.equal(held.dequantize(torch.float32), dense)


def test_weights_that_records_cannot_hold_keep_their_tiles(tmp_path):
    model = nn.ModuleList([linear(tiles(64, 256)), linear(tiles(96, 256)), linear(tiles(64, 256, 64))])
    assert pack_records(model, tmp_path) == {"records": 1, "tiles": 2}
    assert [type(each.weight.data) for each in model] == [RecordsInt4Tensor, TiledInt4Tensor, TiledInt4Tensor]


def test_a_shared_weight_is_packed_once_and_a_large_one_into_a_file(tmp_path):
    first, second = linear(tiles(1024, 2048)), nn.Linear(1, 1)
    second.weight = first.weight
    assert pack_records(nn.ModuleList([first, second]), tmp_path) == {"records": 1, "tiles": 0}
    assert first.weight is second.weight
    assert first.weight.data.qdata.untyped_storage().filename is not None


@pytest.mark.parametrize(("shortest", "longest", "few"), [(1, 8, 2), (2, 16, 2), (9, 64, 0)])
def test_linears_over_records_use_their_kernels_and_give_the_numbers_of_the_weights(shortest, longest, few, model):
    with small_m_dispatch(16 if longest == 16 else 8):
        program = traced(model, shortest, longest)
    method = "target_verify" if few else "prefill"
    assert check_linears(method, program) == {"small_m": few, "large_m": 2 - few, "dequantize": 0}
    assert products(program) == [f"eagle3.int4_records_{'small_m' if few else 'matmul'}.default"] * 2
    x = torch.randn(1, longest - 2, 256).bfloat16()
    gate, up = F.linear(x.float(), model.gate_up.weight.dequantize(torch.float32)).bfloat16().chunk(2, -1)
    inner = (F.silu(gate) * up).repeat(1, 1, 4)
    expected = F.linear(inner.float(), model.down.weight.dequantize(torch.float32)) + model.down.bias
    torch.testing.assert_close(
        program.module()(x).float(), expected, rtol=0.03, atol=0.03 * expected.abs().max().item()
    )


def test_a_linear_outside_an_export_computes_with_the_dequantized_weight(model):
    x = torch.randn(20, 256).bfloat16()
    expected = F.linear(x, model.down.weight.dequantize(), model.down.bias)
    torch.testing.assert_close(model.down(x), expected, rtol=0.03, atol=0.03 * expected.abs().max().item())


def test_the_gate_of_a_product_over_records_is_fused_at_any_whole_number_of_records(model):
    with small_m_dispatch(8):
        program = traced(model, 1, 8)
    x = torch.randn(1, 5, 256).bfloat16()
    expected = program.module()(x)
    gate_in_products(program)
    assert torch.equal(program.module()(x), expected)
    nodes = program.graph.find_nodes(op="call_function", target=torch.ops.eagle3.int4_records_small_m.default)
    assert [node.kwargs.get("activation", "") for node in nodes] == [SILU, ""]


def planned(**flags):
    return make_plan(ExportConfig("gemma4-tiny", output_dir=None, cuda_arch="sm_90", **flags))


def test_records_take_the_memory_of_tiles():
    takes, tiled = (gpu_memory(planned(int4_layout=layout, draft_qlinear="default")) for layout in ("records", "tiles"))
    assert takes.target == tiled.target and takes.draft == tiled.draft


def test_an_export_that_packs_records_counts_them_as_memory_that_it_makes():
    assert backend.held_bytes(planned(int4_layout="records")) == backend.held_bytes(planned())
    plan = planned(qlinear="none", draft_qlinear="default")
    assert backend.held_bytes(plan) == 0
    assert backend.held_bytes(planned(qlinear="none", draft_qlinear="default", int4_layout="records")) > 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--backend", "xnnpack"), "--int4-layout records has no effect with --backend xnnpack"),
        (("--cuda-arch", "sm_90", "--qlinear", "none"), "is for INT4 weights, and this export has none"),
    ],
)
def test_records_without_int4_weights_are_refused(flags, says, tmp_path):
    given = "--target-model", "gemma4-tiny", "--int4-layout", "records", "--output-dir", tmp_path / "out"
    code, line = fail_command(export_main, *given, *flags)
    assert code == 1 and says in line and not (tmp_path / "out").exists()


def test_the_flag_offers_the_layouts_that_there_are_with_the_default_first():
    assert tuple(LAYOUTS) == INT4_LAYOUTS and layout_of(None) is layout_of(INT4_LAYOUTS[0])
