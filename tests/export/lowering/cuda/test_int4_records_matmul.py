"""The large-M INT4 kernel over records is right in Triton's interpreter, and its compiled code is checked without a
GPU."""

import pytest
import torch
from kernel_usage import SHARED, usage
from machine_code.ptx import SECTOR, WARP, loads
from matmul_parts import assert_product, parts
from small_m_weights import activations, int4_weight
from torch import Tensor
from torch.export import Dim, export
from triton_interpreter import interpreted, words_read

from eagle3.export.lowering.cuda.kernels import large_m, small_m, sums
from eagle3.export.lowering.cuda.kernels.int4.records import kernel as int4_records
from eagle3.export.lowering.cuda.kernels.int4.records import matmul as int4_records_matmul
from eagle3.export.lowering.cuda.kernels.int4.records.layout import dequantized, records
from eagle3.export.lowering.cuda.kernels.int4.tiles import kernel as int4
from eagle3.export.lowering.cuda.kernels.int4.tiles import matmul as int4_matmul


def product(x: Tensor, packed: Tensor, most_rows: int = 8, count: int | None = None, arrived: Tensor | None = None):
    arrived = sums.counters() if arrived is None else arrived
    with interpreted(sums, small_m, int4_records, large_m, int4_matmul, int4_records_matmul), sums.made_for(1, False):
        kernels = int4_records_matmul._int4_records_matmul_kernel, int4_records.int4_records_small_m_kernel
        return int4_records_matmul._launch_matmul(*kernels, x, packed, arrived, most_rows, count)


@pytest.mark.first(3)
@pytest.mark.parametrize(("m", "n", "k"), [(33, 64, 256), (64, 192, 512), (65, 128, 1024), (130, 320, 256)])
def test_the_product_over_records_is_right_for_any_rows_and_outputs(m, n, k):
    x, packed = activations(m, k), records(*int4_weight(n, k))
    assert_product(product(x, packed), x, dequantized(packed).bfloat16())


@pytest.mark.parametrize("count", [1, 2])
def test_the_product_over_records_has_the_bits_of_the_one_over_tiles(count):
    x, weight = activations(70, 768), int4_weight(192, 768)
    with interpreted(sums, small_m, int4, large_m, int4_matmul):
        expected = int4_matmul._launch_matmul(
            int4_matmul._int4_matmul_kernel, None, x, *parts(weight), sums.counters(), count
        )
    assert torch.equal(product(x, records(*weight), count=count), expected)


@pytest.mark.parametrize("most", [8, 16])
@pytest.mark.parametrize("m", [1, 9, 17, 32])
def test_few_rows_use_the_small_m_kernel_in_tiles_of_16_and_have_its_bits(m, most):
    x, packed, arrived = activations(m, 768), records(*int4_weight(128, 768)), sums.counters()
    with interpreted(sums, small_m, int4_records), sums.made_for(1, False):
        expected = int4_records._launch_records(
            int4_records.int4_records_small_m_kernel, x, packed, arrived, most_rows=most
        )
    assert torch.equal(product(x, packed, most, arrived=arrived), expected)
    assert not arrived.any()


@pytest.mark.parametrize(("n", "count"), [(64, 2), (192, 3)])
def test_programs_that_divide_k_leave_no_counter(n, count):
    x, packed, arrived = activations(40, 768), records(*int4_weight(n, 768)), sums.counters()
    for _ in range(2):
        assert_product(product(x, packed, count=count, arrived=arrived), x, dequantized(packed).bfloat16())
        assert not arrived.any()


def test_the_product_reads_nothing_outside_the_records():
    """The records are in the middle of a tensor, whose other parts must not be read."""
    weight, x = records(*int4_weight(192, 512)), activations(40, 512)
    room = torch.zeros(3, weight.numel(), dtype=torch.uint8)
    room[1] = weight.flatten()
    packed = room[1].view(weight.shape)
    with words_read() as read:
        product(x, packed)
    homes = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in (room[0], room[2])]
    assert read and not any(((first <= at) & (at < last)).any() for at in read for first, last in homes)


class Linear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("packed", records(*int4_weight(64, 512)))
        self.register_buffer("arrived", sums.counters())

    def forward(self, x: Tensor) -> Tensor:
        return int4_records_matmul.int4_records_matmul(x, self.packed, self.arrived, 8)


def test_an_exported_product_over_records_stays_one_op_with_dynamic_rows():
    model = Linear()
    program = export(model, (activations(31, 512),), dynamic_shapes=({0: Dim("rows", min=9, max=64)},))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets == ["eagle3.int4_records_matmul.default"]
    x = activations(12, 512)
    assert torch.equal(program.module()(x), model(x))
    assert_product(model(x), x, dequantized(model.packed).bfloat16())


def test_bad_arguments_of_the_product_over_records_are_named():
    packed = records(*int4_weight(64, 256))
    with pytest.raises(ValueError, match="x has K = 128, the records 256"):
        int4_records_matmul.int4_records_matmul(activations(20, 128), packed, sums.counters(), 8)
    with pytest.raises(ValueError, match="torch.float32: the kernel takes torch.bfloat16"):
        product(torch.zeros(20, 256), packed)
    with pytest.raises(ValueError, match="an even number, of 4736 bytes each"):
        product(activations(20, 256), packed[:1])


TYPES = ["*bf16", "*u8", "*i32", "*fp32", "*bf16", "i32"]


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("arch", "divided"), [(80, True), (86, False), (89, True), (90, True), (100, True), (120, True)]
)
def test_two_programs_of_the_product_over_records_fit_and_do_not_spill(arch, divided, tmp_path):
    constants = {"N": 16384, "K": 5376, "DIVIDED": divided, "BLOCK_M": large_m.ROWS, "BLOCK_N": large_m.TILE}
    constants |= {"BLOCK_K": large_m.BLOCK_K, "STAGES": large_m.STAGES}
    kernel = int4_records_matmul._int4_records_matmul_kernel
    found = usage(kernel, TYPES, constants, arch, tmp_path, large_m.WARPS)
    assert found.stack == 0 and found.registers <= 255
    assert 2 * (found.shared + 1024) <= SHARED
    assert found.ptx.count("cp.async.cg.shared.global") > 0
    whole = {load.parameter: load.sectors * SECTOR == load.bytes * WARP for load in loads(found.ptx, (1, 1, 1), 64)}
    assert all(whole.values())
    if arch not in (90, 100):  # whose products are wgmma's and tcgen05's where the GPU is at hand
        assert "HMMA" in found.loop
        assert found.a_weight(large_m.TILE * large_m.BLOCK_K, large_m.WARPS) <= 7.4
