"""The large-M INT8 kernel is right in Triton's interpreter, and its compiled code is checked without a GPU."""

import pytest
import torch
from kernel_usage import usage
from machine_code.ptx import SECTOR, WARP, loads
from matmul_parts import assert_product
from small_m_weights import activations, int8_weight
from torch import Tensor
from torch.export import Dim, export
from triton_interpreter import interpreted

from eagle3.export.lowering.cuda.kernels import int8_matmul, large_m, small_m, sums
from eagle3.runner.system.gpus import gpus_of


def product(x: Tensor, *weight: Tensor, arrived: Tensor | None = None, count: int | None = None) -> Tensor:
    arrived = sums.counters() if arrived is None else arrived
    with interpreted(sums, large_m, int8_matmul):
        return int8_matmul._launch_matmul(int8_matmul._int8_matmul_kernel, x, *weight, arrived, count)


def assert_right(found: Tensor, x: Tensor, weight: tuple[Tensor, ...]) -> None:
    """Assert that the product is right; weights with groups are rounded to bf16."""
    w = small_m.int8_dequantized(*weight)
    assert_product(found, x, w if weight[1].shape[1] == 1 else w.bfloat16())


@pytest.mark.parametrize("m", [1, 9, 63, 64, 65, 130])
def test_the_int8_product_is_right_for_any_number_of_rows(m):
    x = activations(m, 256)
    for group in (32, 256):
        weight = int8_weight(33, 256, group)
        assert_right(product(x, *weight), x, weight)


@pytest.mark.parametrize("n", [1, 127, 128, 129, 260])
def test_the_int8_product_is_right_for_any_number_of_outputs(n):
    x, weight = activations(17, 320), int8_weight(n, 320, 64)
    assert_right(product(x, *weight), x, weight)


@pytest.mark.first(3)
@pytest.mark.parametrize(
    ("k", "group"), [(16, 16), (48, 48), (80, 16), (96, 48), (288, 96), (336, 336), (384, 128), (2880, 32)]
)
def test_the_int8_product_is_right_for_any_group_and_k(k, group):
    """A K of 336 ends in a quarter of a block, and rows of x and of the weight begin within a cache line."""
    for m in (9, 70):
        x, weight = activations(m, k), int8_weight(20, k, group)
        assert_right(product(x, *weight), x, weight)


@pytest.mark.parametrize("group", [16, 32, 256])
def test_every_int8_weight_equals_its_dequantized_value(group):
    """Each row of x selects one weight of each output, so the products equal the weights bit for bit. All codes and
    zero points occur."""
    q = torch.arange(-128, 128, dtype=torch.int8).expand(40, 256).contiguous()
    _, scale, zero = int8_weight(40, 256, group)
    zero[0], zero[1] = -128, 127
    found = torch.cat([product(rows, q, scale, zero, count=1) for rows in torch.eye(256).bfloat16().split(64)])
    assert torch.equal(found.T, small_m.int8_dequantized(q, scale, zero).bfloat16())


@pytest.mark.first(1)
@pytest.mark.parametrize("count", [2, 3, 5])
def test_any_split_of_k_of_the_int8_product_is_right_and_leaves_the_counters_unchanged(count):
    x, weight, arrived = activations(70, 1296), int8_weight(130, 1296, 48), sums.counters()
    for _ in range(2):  # the second call finds what the first one left
        assert_right(product(x, *weight, arrived=arrived, count=count), x, weight)
        assert not arrived.any()


class Linear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.ParameterList([torch.nn.Parameter(part, False) for part in int8_weight(48, 512, 32)])
        self.register_buffer("arrived", sums.counters())

    def forward(self, x: Tensor) -> Tensor:
        return int8_matmul.int8_matmul(x, *self.weight, self.arrived)


def test_an_exported_int8_product_stays_one_op_with_dynamic_rows():
    model = Linear()
    program = export(model, (activations(31, 512),), dynamic_shapes=({0: Dim("rows", min=9, max=64)},))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets == ["eagle3.int8_matmul.default"]
    x = activations(12, 512)
    assert torch.equal(program.module()(x), model(x))
    assert_right(model(x), x, tuple(model.weight))


def test_bad_arguments_of_the_int8_product_are_named():
    weight = int8_weight(8, 256, 32)
    with pytest.raises(ValueError, match="x has K = 128, qdata 256"):
        int8_matmul.int8_matmul(activations(20, 128), *weight, sums.counters())
    with pytest.raises(ValueError, match="torch.float32: the kernel takes torch.bfloat16"):
        product(torch.zeros(20, 256), *weight)
    with pytest.raises(ValueError, match="group size is 8: the kernel takes multiples of 16"):
        product(activations(20, 256), *int8_weight(8, 256, 8))


TYPES = ["*bf16", "*i8", "*bf16", "*i8", "*i32", "*fp32", "*bf16", "i32"]
GROUPS = {(5376, 32): 7.5, (5376, 5376): 5.4, (2880, 32): 7.5}
"""Instructions a weight at most, by K and group."""


COMPILED = [(arch, 5376, 32) for arch in (80, 89, 90, 100, 120)]
COMPILED += [(arch, *sizes) for arch in (80, 90) for sizes in ((5376, 5376), (2880, 32))]


@pytest.mark.first(1)
@pytest.mark.parametrize(("arch", "k", "group"), COMPILED)
def test_two_programs_of_the_large_m_int8_kernel_fit_and_do_not_spill(arch, k, group, tmp_path):
    constants = {"N": 4096, "K": k, "G": group, "BLOCK_M": large_m.ROWS, "BLOCK_N": large_m.TILE}
    constants |= {"BLOCK_K": large_m.BLOCK_K, "STAGES": large_m.STAGES, "DIVIDED": True}
    found = usage(int8_matmul._int8_matmul_kernel, TYPES, constants, arch, tmp_path, large_m.WARPS)
    assert found.stack == 0
    assert all(gpu.resident(found.registers, found.shared, 128) >= 2 for gpu in gpus_of(f"sm_{arch}"))
    if arch not in (90, 100):  # whose products are wgmma's and tcgen05's where the GPU is at hand
        assert found.a_weight(large_m.TILE * large_m.BLOCK_K, large_m.WARPS) <= GROUPS[k, group]
        assert "HMMA" in found.loop
    copied = [load for load in loads(found.ptx, (1, 1, 1), 64) if load.parameter < 2]
    assert all(load.sectors * SECTOR == load.bytes * WARP for load in copied)
    assert {load.parameter for load in copied} == ({0, 1} if arch != 100 else set())  # nor is tcgen05's PTX read
