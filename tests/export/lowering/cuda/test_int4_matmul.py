"""The large-M INT4 kernel is right in Triton's interpreter, and its compiled code is checked without a GPU."""

import pytest
import torch
from cuda_lowered import EDGE, short_cuts
from executorch.backends.cuda.cuda_backend import CudaBackend
from executorch.backends.cuda.cuda_partitioner import CudaPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.exir.backend.compile_spec_schema import CompileSpec
from kernel_usage import SHARED, usage
from machine_code.ptx import SECTOR, WARP, loads
from machine_code.work import work_of
from matmul_parts import Int4Linear, assert_product, parts
from small_m_weights import activations, int4_weight
from torch import Tensor
from torch._inductor import config as inductor
from torch.export import Dim, export
from triton_interpreter import interpreted

from eagle3.export.lowering.cuda.backend import OPTIONS
from eagle3.export.lowering.cuda.inductor.launches import recorded_launches
from eagle3.export.lowering.cuda.kernels import large_m, small_m, sums
from eagle3.export.lowering.cuda.kernels.int4.tiles import kernel as int4
from eagle3.export.lowering.cuda.kernels.int4.tiles import matmul as int4_matmul
from eagle3.export.lowering.cuda.named_gpu import named_gpu
from eagle3.runner.system.gpus import BY_ARCH

WGMMA, PLAIN, OTHER = "wgmma", "the same grid without wgmma", "another GPU"
FORMS = [WGMMA, PLAIN, OTHER]


class Plain:
    """The kernel as the portable image for sm_90 has it: the rows of a program 64 at a time."""

    def __getitem__(self, programs):
        return lambda *args, **options: int4_matmul._int4_matmul_kernel[programs](*args, **options | {"ROWS": 64})


def product(
    x: Tensor,
    *weight: Tensor | list[Tensor],
    arrived: Tensor | None = None,
    count: int | None = None,
    form: str = WGMMA,
) -> Tensor:
    arrived = sums.counters() if arrived is None else arrived
    here = sums.made_for(132, True, form != OTHER)
    with interpreted(sums, small_m, int4, large_m, int4_matmul), here:
        kernel = Plain() if form == PLAIN else int4_matmul._int4_matmul_kernel
        return int4_matmul._launch_matmul(kernel, int4_matmul.int4_small_m_kernel, x, *weight, arrived, count)


def assert_right(found: Tensor, x: Tensor, weight: tuple) -> None:
    assert_product(found, x, torch.cat(int4.dequantized(*weight)).bfloat16())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("m", [33, 64, 65, 127, 128, 129, 193])
def test_the_int4_product_is_right_for_any_number_of_rows(m, form):
    x, weight = activations(m, 256), parts(int4_weight(33, 256))
    assert_right(product(x, *weight, form=form), x, weight)


@pytest.mark.parametrize(("wgmma", "rows"), [(True, 128), (False, 64)])
def test_a_program_takes_128_rows_on_a_gpu_with_wgmma(wgmma, rows):
    seen = []

    class Noting:
        def __getitem__(self, programs):
            return lambda *_, **options: seen.append((programs, options["BLOCK_M"], options["ROWS"]))

    with sums.made_for(132, True, wgmma):
        weight = parts(int4_weight(33, 256))
        int4_matmul._launch_matmul(Noting(), None, activations(129, 256), *weight, sums.counters())
    assert seen == [((-(-129 // rows), 1, 1), rows, rows)]
    with sums.made_for_named("sm_90"):
        assert large_m.rows_of_program() == 128
    for arch in ("sm_80", "sm_89", "sm_100", "sm_120"):
        with sums.made_for_named(arch):
            assert large_m.rows_of_program() == 64


@pytest.mark.parametrize("m", [1, 9, 16, 17, 32])
def test_few_rows_of_the_int4_product_use_the_small_m_kernel_in_tiles_of_16(m):
    x, weight = activations(m, 512), parts(int4_weight(33, 512))
    with interpreted(sums, small_m, int4):
        expected = int4._launch_int4(int4.int4_small_m_kernel, x, *weight, sums.counters())
    assert torch.equal(product(x, *weight), expected)


def test_with_dynamic_rows_one_of_the_two_int4_kernels_has_an_empty_grid(monkeypatch):
    monkeypatch.setattr(large_m, "statically_known_true", lambda condition: False)
    for m in (1, 9, 16, 17, 32, 33, 64, 65, 1000):
        grids = []

        def run_few(grid, rows, *_, grids=grids):
            grids.append(grid)

        def run(grid, *_, grids=grids):
            grids.append(grid)

        large_m.launch(activations(m, 256), 512, 4, 1, sums.counters(), run, 1, (sums.Division(0, 2), run_few))
        short, long = (-(-m // 16), 0) if m <= 32 else (0, -(-m // 64))
        assert grids == [(short, 4, 2), (long, 4, 1)]


@pytest.mark.parametrize(("n", "group"), [(1, 32), (127, 64), (128, 128), (129, 256)])
def test_the_int4_product_is_right_for_any_outputs_and_group_size(n, group):
    x, weight = activations(37, 512), parts(int4_weight(n, 512, group))
    assert_right(product(x, *weight), x, weight)


def test_every_int4_weight_equals_its_dequantized_value():
    """Each row of x selects one weight of each output, so the products equal the weights bit for bit."""
    weight = parts(int4_weight(40, 256))
    found = torch.cat([product(rows, *weight, count=1) for rows in torch.eye(256).bfloat16().split(64)])
    assert torch.equal(found.T, int4.dequantized(*weight)[0].bfloat16())


def test_the_outputs_of_several_int4_weights_are_side_by_side():
    weights = [int4_weight(n, 512) for n in (128, 40, 130)]
    x = activations(70, 512)
    alone = [product(x, *parts(weight), count=1) for weight in weights]
    assert torch.equal(product(x, *parts(*weights), count=1), torch.cat(alone, 1))


@pytest.mark.first(1)
@pytest.mark.parametrize(("count", "form"), [(2, WGMMA), (3, PLAIN), (5, OTHER)])
def test_any_split_of_k_of_the_int4_product_is_right_and_leaves_the_counters_unchanged(count, form):
    x, weight, arrived = activations(140, 1280), parts(int4_weight(130, 1280)), sums.counters()
    for _ in range(2):  # the second call finds what the first one left
        assert_right(product(x, *weight, arrived=arrived, count=count, form=form), x, weight)
        assert not arrived.any()


def test_the_partial_sums_of_a_split_int4_product_fit_into_their_slots():
    for tiles in (1, 2, 42, 131, 132, 133, 2048):
        for rows in range(1, 40):
            count = large_m.parts_of_k(rows, tiles, 84)
            assert count == 1 or count * rows * tiles <= large_m.SLOTS
    assert large_m.parts_of_k(1, 42, 84) == 6 and large_m.parts_of_k(1, 8, 3) == 3


def test_an_int4_kernel_that_may_split_k_stores_no_partial_sums_if_it_does_not():
    """The kernel is compiled for a dynamic number of rows; with many rows K is not split."""
    kept = torch.full((1,), 7.0)

    class Dividing:
        def __getitem__(self, programs):
            def run(*args, **options) -> None:
                args = (*args[:-3], kept, *args[-2:])  # before OUT and M
                int4_matmul._int4_matmul_kernel[programs](*args, **options | {"DIVIDED": True})

            return run

    x, weight, arrived = activations(130, 512), parts(int4_weight(33, 512)), sums.counters()
    with interpreted(sums, large_m, int4_matmul):
        found = int4_matmul._launch_matmul(Dividing(), None, x, *weight, arrived, count=1)
    assert_right(found, x, weight)
    assert kept.item() == 7 and not arrived.any()


def test_an_exported_int4_product_stays_one_op_with_dynamic_rows():
    model = Int4Linear(48, 512)
    program = export(model, (activations(31, 512),), dynamic_shapes=({0: Dim("rows", min=9, max=64)},))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets == ["eagle3.int4_matmul.default"]
    x = activations(12, 512)
    assert torch.equal(program.module()(x), model(x))
    assert_right(model(x), x, ([model.qdata], model.codes, model.steps))


def test_bad_arguments_of_the_int4_product_are_named():
    weight = parts(int4_weight(8, 256))
    with pytest.raises(ValueError, match="x has K = 128, qdata 256"):
        int4_matmul.int4_matmul(activations(20, 128), *weight, sums.counters())
    with pytest.raises(ValueError, match="torch.float32: the kernel takes torch.bfloat16"):
        product(torch.zeros(20, 256), *weight)


TYPES = ["*bf16", "*u8", "*u8", "*u8", "*u8", "*fp16", "*i32", "*fp32", "*bf16", "i32"]


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("arch", "divided"), [(80, True), (86, False), (89, True), (90, True), (90, False), (100, True), (120, True)]
)
def test_two_programs_of_the_int4_product_fit_and_do_not_spill(arch, divided, tmp_path):
    constants = {"N0": 8192, "N1": 4096, "N2": 4096, "K": 5376, "G": 32, "BLOCK_M": large_m.ROWS}
    constants |= {"BLOCK_N": large_m.TILE, "BLOCK_K": large_m.BLOCK_K, "STAGES": large_m.STAGES}
    constants |= {"DIVIDED": divided, "ROWS": large_m.ROWS, "PLAIN_ROWS": 0}
    found = usage(int4_matmul._int4_matmul_kernel, TYPES, constants, arch, tmp_path, large_m.WARPS)
    assert found.stack == 0 and found.registers <= 255
    assert 2 * (found.shared + 1024) <= SHARED
    assert found.ptx.count("cp.async.cg.shared.global") > 0
    whole = {load.parameter: load.sectors * SECTOR == load.bytes * WARP for load in loads(found.ptx, (1, 1, 1), 64)}
    assert all(whole.values()) and (arch == 100 or len(whole) == 4)  # of tcgen05's PTX nothing is worked out
    # Each of a lane's 64 weights is decoded, the two of a byte by powers of their own: 2^124 and 2^120.
    assert all(str((127 + power) << 23) in found.ptx for power in (124, 120))
    if arch not in (90, 100):  # whose products are wgmma's and tcgen05's where the GPU is at hand
        assert found.loop.count("FFMA") >= 64 and "HMMA" in found.loop
        assert found.a_weight(large_m.TILE * large_m.BLOCK_K, large_m.WARPS) <= 7.1


@pytest.mark.first(1)
@pytest.mark.parametrize("divided", [False, True])
def test_with_wgmma_128_rows_fit_and_no_product_is_waited_for_alone(divided, tmp_path):
    """ptxas waits behind every wgmma, 8 of them, where a path leads past the loop."""
    constants = {"N0": 8192, "N1": 4096, "N2": 4096, "K": 5376, "G": 32} | large_m.PROGRAM
    constants |= {"BLOCK_M": large_m.WGMMA_ROWS, "ROWS": large_m.WGMMA_ROWS, "DIVIDED": divided}
    constants["PLAIN_ROWS"] = large_m.ROWS
    warps = constants.pop("num_warps")
    found = usage(int4_matmul._int4_matmul_kernel, TYPES, constants, 90, tmp_path, warps)
    assert found.stack == 0 and BY_ARCH["sm_90"].resident(found.registers, found.shared, 32 * warps) == 2
    assert found.loop.count("HGMMA") == 8 and found.loop.count("WARPGROUP") == 3  # two arrivals, one wait
    assert found.a_weight(large_m.TILE * large_m.BLOCK_K, warps) <= 6.6


class Scaled(Int4Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 2)


@pytest.mark.whole
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: nothing is substituted")
def test_both_int4_kernels_for_dynamic_rows_share_one_input():
    program = export(Scaled(48, 512), (activations(31, 512),), dynamic_shapes=({0: Dim("rows", min=9, max=1024)},))
    specs = [CudaBackend.generate_method_name_compile_spec("prefill"), CompileSpec("low_memory_mode", b"ON")]
    rows, options = ({"prefill": 20}, {"prefill": 1024}), inductor.patch(OPTIONS)
    with short_cuts(), named_gpu("sm_90"), options, recorded_launches(*rows) as found:
        to_edge_transform_and_lower(program, partitioner=[CudaPartitioner(specs)], compile_config=EDGE)
    (recorded,) = found.values()
    (launch,) = (entry for entry in recorded["launches"] if work_of(entry, 20)[0])
    assert "small_m" in launch["kernel"] and launch["grid"][0] == 2
    sums_of_parts = 4 * (1024 // large_m.WGMMA_ROWS * large_m.MOST_PARTS) * large_m.WGMMA_ROWS * large_m.TILE
    assert recorded["workspace_bytes"] == sums_of_parts + 1024 * (512 + 48) * 2
