"""The large-M kernel for GGUF's K-quants is right in Triton's interpreter, and its compiled code is checked without a
GPU."""

import pytest
import torch
from k_quant_weights import KINDS, activations, weight
from kernel_usage import SHARED, usage
from torch import Tensor
from torch.export import Dim, export
from triton_interpreter import interpreted

from eagle3.export.lowering.cuda.kernels import k_quant_matmul, large_m, sums


def product(x: Tensor, *parts: Tensor | None, arrived: Tensor | None = None, count: int | None = None) -> Tensor:
    arrived = sums.counters() if arrived is None else arrived
    with interpreted(sums, large_m, k_quant_matmul):
        kernel = k_quant_matmul._k_quant_matmul_kernel
        return k_quant_matmul._launch_k_quant_matmul(kernel, x, *parts, arrived, count)


def assert_right(found: Tensor, x: Tensor, w: Tensor) -> None:
    """Assert that the product with weights rounded to bf16 is right up to rounding to bf16 and the errors of
    float32."""
    w = w.bfloat16().double()
    expected = x.double() @ w.T
    assert found.dtype == torch.bfloat16 and found.shape == expected.shape
    room = 1e-6 * x.double().abs() @ w.abs().T + 2**-8 * expected.abs()
    assert ((found.double() - expected).abs() <= room).all()


@pytest.mark.first(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("m", "n"), [(1, 33), (9, 1), (64, 127), (65, 128), (130, 129)])
def test_the_k_quant_product_is_right_for_any_rows_and_outputs(kind, m, n):
    x, (packed, w) = activations(m, 512), weight(kind, n, 512)
    assert_right(product(x, *packed.parts), x, w)


@pytest.mark.parametrize("kind", KINDS)
def test_every_k_quant_weight_equals_gguf_pys_bit_for_bit_and_is_rounded_once(kind):
    """Each row of x selects one weight of each output."""
    packed, w = weight(kind, 40, 256)
    found = torch.cat([product(rows, *packed.parts, count=1) for rows in torch.eye(256).bfloat16().split(64)])
    assert torch.equal(found.T, w.bfloat16())


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", KINDS)
def test_any_split_of_k_of_the_k_quant_product_is_right_and_leaves_the_counters_unchanged(kind):
    x, (packed, w), arrived = activations(70, 1280), weight(kind, 130, 1280), sums.counters()
    for count in (2, 3, 5):  # a later call finds what one before it left
        assert_right(product(x, *packed.parts, arrived=arrived, count=count), x, w)
        assert not arrived.any()


class Linear(torch.nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        packed, self.w = weight(kind, 48, 512)
        self.qdata, self.high, self.codes, self.steps = packed.parts
        self.arrived = sums.counters()

    def forward(self, x: Tensor) -> Tensor:
        return k_quant_matmul.k_quant_matmul(x, self.qdata, self.high, self.codes, self.steps, self.arrived)


def test_an_exported_k_quant_product_stays_one_op_with_dynamic_rows():
    model = Linear("Q5_K")
    program = export(model, (activations(31, 512),), dynamic_shapes=({0: Dim("rows", min=9, max=64)},))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets == ["eagle3.k_quant_matmul.default"]
    x = activations(12, 512)
    assert torch.equal(program.module()(x), model(x))
    assert_right(model(x), x, model.w)


def test_bad_arguments_of_the_k_quant_product_are_named():
    packed, _ = weight("Q4_K", 8, 256)
    with pytest.raises(ValueError, match="x has K = 128, qdata 256"):
        k_quant_matmul.k_quant_matmul(activations(20, 128), *packed.parts, sums.counters())
    with pytest.raises(ValueError, match="torch.float32: the kernel takes torch.bfloat16"):
        product(torch.zeros(20, 256), *packed.parts)


ROOM = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}
"""Bytes of shared memory of a multiprocessor that has more than others."""
TYPES = ["*bf16", "*u8", "*u8", "*u8", "*fp16", "*i32", "*fp32", "*bf16", "i32"]


COMPILED = [("Q4_K", 80, True), ("Q4_K", 90, True), ("Q5_K", 80, True), ("Q5_K", 90, True), ("Q6_K", 90, False)]
COMPILED += [("Q6_K", arch, True) for arch in (80, 89, 90, 100, 120)]


@pytest.mark.first(1)
@pytest.mark.parametrize(("kind", "arch", "divided"), COMPILED)
def test_two_programs_of_the_k_quant_product_fit_and_do_not_spill(kind, arch, divided, tmp_path):
    bits = KINDS[kind]
    constants = {"N": 16384, "K": 5376, "BITS": bits, "BLOCK_M": large_m.ROWS, "BLOCK_N": 128}
    constants |= {"BLOCK_K": large_m.BLOCK_K, "STAGES": large_m.STAGES, "DIVIDED": divided}
    types = [*TYPES]
    types[3] = "*i8" if bits == 6 else "*u8"
    kernel = k_quant_matmul._k_quant_matmul_kernel
    found = usage(kernel, types, constants, arch, tmp_path, large_m.WARPS)
    assert found.stack == 0 and found.registers <= 255
    assert 2 * (found.shared + 1024) <= ROOM.get(arch, SHARED)
    assert found.ptx.count("cp.async.cg.shared.global") > 0
    if arch not in (90, 100):  # whose products are wgmma's and tcgen05's where the GPU is at hand
        assert found.a_weight(128 * large_m.BLOCK_K, large_m.WARPS) <= {4: 7.2, 5: 8.7, 6: 8.7}[bits]
        assert found.loop.count("HMMA") == 64  # of 32 outputs a warp: each weight is decoded once
