"""The kernels of many rows, for each format of weights, give the products of the dequantized weights in Triton's
interpreter; and every op over quantized weights stays one op of an exported program."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from cuda_lowered import lowered
from kernel_inputs import (
    KINDS,
    Int4Linear,
    activations,
    assert_product,
    int4_weight,
    int8_weight,
    k_quant_weight,
    parts,
)
from kernel_usage import Recorded
from machine_code.work import work_of
from torch import Tensor
from torch.export import Dim, export
from triton_interpreter import interpreted, within, words_read

from eagle3.export.lowering.cuda.kernels import bf16, int8_matmul, k_quant_matmul, k_quants, large_m, small_m, sums
from eagle3.export.lowering.cuda.kernels.int4.records import kernel as int4_records
from eagle3.export.lowering.cuda.kernels.int4.records import matmul as int4_records_matmul
from eagle3.export.lowering.cuda.kernels.int4.records.layout import dequantized, records
from eagle3.export.lowering.cuda.kernels.int4.tiles import kernel as int4
from eagle3.export.lowering.cuda.kernels.int4.tiles import matmul as int4_matmul

MODULES = sums, small_m, int4, int4_records, large_m, int4_matmul, int4_records_matmul, int8_matmul, k_quant_matmul


class Format(NamedTuple):
    """``made(n, k)`` returns a random weight, ``launch(x, weight, arrived, count)`` runs its kernel with ``count``
    programs along K, ``dense`` returns the weight that it multiplies by, in float32 or bfloat16 [N, K]."""

    made: Callable[[int, int], Any]
    launch: Callable[..., Tensor]
    dense: Callable[[Any], Tensor]
    wgmma: bool = False

    def product(self, x: Tensor, weight: Any, count: int | None = None, arrived: Tensor | None = None) -> Tensor:
        arrived = sums.counters() if arrived is None else arrived
        with interpreted(*MODULES), sums.made_for(132 if self.wgmma else 1, self.wgmma, self.wgmma):
            return self.launch(x, weight, arrived, count)

    def assert_right(self, x: Tensor, weight: Any, count: int | None = None, arrived: Tensor | None = None) -> None:
        assert_product(self.product(x, weight, count, arrived), x, self.dense(weight))


class Plain:
    """The INT4 kernel as the portable image for sm_90 has it: the rows of a program 64 at a time."""

    def __getitem__(self, programs):
        return lambda *args, **options: int4_matmul._int4_matmul_kernel[programs](*args, **options | {"ROWS": 64})


def _int4(kernel: Any = None) -> Callable[..., Tensor]:
    def launch(x, weight, arrived, count):
        kernels = kernel or int4_matmul._int4_matmul_kernel, int4_matmul.int4_small_m_kernel
        return int4_matmul._launch_matmul(*kernels, x, *weight, arrived, count)

    return launch


def _records(x, weight, arrived, count, most_rows=8):
    kernels = int4_records_matmul._int4_records_matmul_kernel, int4_records.int4_records_small_m_kernel
    return int4_records_matmul._launch_matmul(*kernels, x, weight, arrived, most_rows, count)


def _int8(x, weight, arrived, count):
    return int8_matmul._launch_matmul(int8_matmul._int8_matmul_kernel, x, *weight, arrived, count)


def _k_quant(x, weight, arrived, count):
    kernel = k_quant_matmul._k_quant_matmul_kernel
    return k_quant_matmul._launch_k_quant_matmul(kernel, x, *weight[0].parts, arrived, count)


def of_int8(weight: tuple[Tensor, ...]) -> Tensor:
    """Weights with groups are rounded to bf16."""
    w = small_m.int8_dequantized(*weight)
    return w if weight[1].shape[1] == 1 else w.bfloat16()


def of_int4(weight: tuple) -> Tensor:
    return torch.cat(int4.dequantized(*weight)).bfloat16()


def int4_parts(n: int, k: int) -> tuple:
    return parts(int4_weight(n, k))


FORMATS = {
    "int4 with wgmma": Format(int4_parts, _int4(), of_int4, wgmma=True),
    "int4 in its portable image": Format(int4_parts, _int4(Plain()), of_int4, wgmma=True),
    "int4": Format(int4_parts, _int4(), of_int4),
    "int4 records": Format(
        lambda n, k: records(*int4_weight(-(-n // 64) * 64, k)), _records, lambda weight: dequantized(weight).bfloat16()
    ),
    "int8": Format(lambda n, k: int8_weight(n, k, 32), _int8, of_int8),
    "int8 by row": Format(lambda n, k: int8_weight(n, k, k), _int8, of_int8),
} | {
    kind: Format(lambda n, k, kind=kind: k_quant_weight(kind, n, k), _k_quant, lambda weight: weight[1].bfloat16())
    for kind in KINDS
}
INT4, INT8, RECORDS = FORMATS["int4"], FORMATS["int8"], FORMATS["int4 records"]


@pytest.fixture(params=FORMATS)
def format(request) -> Format:
    return FORMATS[request.param]


@pytest.mark.first(9)
@pytest.mark.parametrize(("m", "n", "k", "count"), [(65, 33, 512, None), (129, 129, 256, 1), (64, 130, 1280, 3)])
def test_products_are_right_for_any_rows_outputs_and_parts_of_k_and_leave_no_counter(m, n, k, count, format):
    x, weight, arrived = activations(m, k), format.made(n, k), sums.counters()
    for _ in range(2 if count else 1):  # the second call finds what the first one left
        format.assert_right(x, weight, count, arrived)
        assert not arrived.any()


@pytest.mark.first(3)
@pytest.mark.parametrize(
    ("name", "m", "n", "k", "group"),
    [("int4", 37, 40, 512, 64), ("int4", 37, 1, 512, 256)]
    + [
        ("int8", m, 20, k, group)
        for m, k, group in ((9, 16, 16), (70, 48, 48), (9, 288, 96), (70, 336, 336), (1, 2880, 32))
    ],
)
def test_products_are_right_for_any_group_and_k(name, m, n, k, group):
    """A K of 336 ends in a quarter of a block, and rows of x and of the weight begin within a cache line."""
    weight = parts(int4_weight(n, k, group)) if name == "int4" else int8_weight(n, k, group)
    FORMATS[name].assert_right(activations(m, k), weight)


@pytest.mark.parametrize("name", ["int4", "int8", "int8 by row", *KINDS])
def test_every_weight_equals_its_dequantized_value(name):
    """Each row of x selects one weight of each output, so the products equal the weights bit for bit."""
    format = FORMATS[name]
    weight = format.made(40, 256)
    if "int8" in name:  # all codes and zero points
        weight[0].copy_(torch.arange(-128, 128, dtype=torch.int8))
        weight[2][0], weight[2][1] = -128, 127
    found = torch.cat([format.product(rows, weight, 1) for rows in torch.eye(256).bfloat16().split(64)])
    assert torch.equal(found.T, format.dense(weight).bfloat16())


@pytest.mark.parametrize("m", [1, 9, 17, 32])
def test_few_rows_use_the_kernel_of_few_rows_in_tiles_of_16_and_have_its_bits(m):
    x, weight, arrived = activations(m, 512), int4_weight(128, 512), sums.counters()
    tiles, packed = parts(weight), records(*weight)
    with interpreted(*MODULES), sums.made_for(1, False):
        expected = int4._launch_int4(int4.int4_small_m_kernel, x, *tiles, arrived)
        kernel = int4_records.int4_records_small_m_kernel
        of_records = int4_records._launch_records(kernel, x, packed, arrived, most_rows=16)
        assert torch.equal(_records(x, packed, arrived, None, 16), of_records)
    assert torch.equal(INT4.product(x, tiles), expected) and not arrived.any()


@pytest.mark.parametrize("count", [1, 2])
def test_the_product_over_records_has_the_bits_of_the_one_over_tiles(count):
    x, weight = activations(70, 768), int4_weight(192, 768)
    assert torch.equal(RECORDS.product(x, records(*weight), count), INT4.product(x, parts(weight), count))


def test_the_outputs_of_several_int4_weights_are_side_by_side():
    weights, x = [int4_weight(n, 512) for n in (128, 40, 130)], activations(70, 512)
    alone = [INT4.product(x, parts(weight), 1) for weight in weights]
    assert torch.equal(INT4.product(x, parts(*weights), 1), torch.cat(alone, 1))


def test_the_product_reads_nothing_outside_the_records():
    """The records are in the middle of a tensor, whose other parts must not be read."""
    weight = records(*int4_weight(192, 512))
    room = torch.zeros(3, weight.numel(), dtype=torch.uint8)
    room[1] = weight.flatten()
    with words_read() as read:
        RECORDS.product(activations(40, 512), room[1].view(weight.shape))
    assert len(within(read, room[1])) and not len(within(read, room[0])) + len(within(read, room[2]))


# --- The launch


@pytest.mark.parametrize(("wgmma", "rows"), [(True, 128), (False, 64)])
def test_a_program_takes_128_rows_on_a_gpu_with_wgmma(wgmma, rows):
    recorded = Recorded()
    with sums.made_for(132, True, wgmma):
        int4_matmul._launch_matmul(recorded, None, activations(129, 256), *int4_parts(33, 256), sums.counters())
    ((_, constants),) = recorded.calls
    assert recorded.grids == [(-(-129 // rows), 1, 1)] and constants["BLOCK_M"] == constants["ROWS"] == rows
    for arch in ("sm_90",) if wgmma else ("sm_80", "sm_89", "sm_100", "sm_120"):
        with sums.made_for_named(arch):
            assert large_m.rows_of_program() == rows


def test_with_dynamic_rows_one_of_the_two_int4_kernels_has_an_empty_grid(monkeypatch):
    monkeypatch.setattr(large_m, "statically_known_true", lambda condition: False)
    for m in (1, 9, 16, 17, 32, 33, 64, 65, 1000):
        grids = []

        def run(grid, *_, grids=grids):
            grids.append(grid)

        large_m.launch(activations(m, 256), 512, 4, 1, sums.counters(), run, 1, (sums.Division(0, 2), run))
        short, long = (-(-m // 16), 0) if m <= 32 else (0, -(-m // 64))
        assert grids == [(short, 4, 2), (long, 4, 1)]


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

    x, weight, arrived = activations(130, 512), int4_parts(33, 512), sums.counters()
    Format(int4_parts, _int4(Dividing()), of_int4).assert_right(x, weight, 1, arrived)
    assert kept.item() == 7 and not arrived.any()


# --- The ops


class Op(torch.nn.Module):
    """A call of an op with weights."""

    def __init__(self, call: Callable[..., Tensor], *weights: Tensor):
        super().__init__()
        self.call = call
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(each, False) for each in weights])
        self.register_buffer("arrived", sums.counters())

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, *self.weights, self.arrived)


def tiles_of(n: int, k: int) -> tuple[Tensor, ...]:
    (qdata,), *rest = int4_parts(n, k)
    return qdata, *rest


def packed_of(n: int, k: int) -> tuple[Tensor]:
    return (RECORDS.made(n, k),)


OPS = {
    "int4_small_m": (lambda x, qdata, *rest: int4.int4_small_m(x, [qdata], *rest), tiles_of),
    "int4_matmul": (lambda x, qdata, *rest: int4_matmul.int4_matmul(x, [qdata], *rest), tiles_of),
    "int4_records_small_m": (lambda *given: int4_records.int4_records_small_m(*given, 8), packed_of),
    "int4_records_matmul": (lambda *given: int4_records_matmul.int4_records_matmul(*given, 8), packed_of),
    "int8_small_m": (small_m.int8_small_m, INT8.made),
    "int8_matmul": (int8_matmul.int8_matmul, INT8.made),
    "bf16_small_m": (bf16.bf16_small_m, lambda n, k: (torch.randn(n, k).bfloat16(),)),
    "k_quant_small_m": (k_quants.k_quant_small_m, lambda n, k: k_quant_weight("Q5_K", n, k)[0].parts),
    "k_quant_matmul": (k_quant_matmul.k_quant_matmul, lambda n, k: k_quant_weight("Q6_K", n, k)[0].parts),
}  # fmt: skip
"""The ops by name: a call, and its weights."""


@pytest.mark.first(5)
@pytest.mark.parametrize("name", OPS)
def test_an_exported_product_stays_one_op_with_dynamic_rows(name):
    call, made = OPS[name]
    model = Op(call, *made(48, 512))
    rows = Dim("rows", min=1 if "small_m" in name else 9, max=64)
    program = export(model, (activations(31, 512),), dynamic_shapes=({0: rows},), strict=False)
    for each in (program, program.run_decompositions({})):
        targets = [str(node.target) for node in each.graph.nodes if node.op == "call_function"]
        assert targets == [f"eagle3.{name}.default"]
        for m in (9, 33):
            x = activations(m, 512)
            assert torch.equal(each.module()(x), model(x))


def test_on_the_host_the_ops_are_the_references():
    x, (qdata, *tiled), eight, arrived = (
        activations(3, 256),
        tiles_of(8, 256),
        int8_weight(8, 256, 256),
        sums.counters(),
    )
    assert torch.equal(int4.int4_small_m(x, [qdata], *tiled, arrived), int4.int4_reference(x, [qdata], *tiled))
    assert torch.equal(small_m.int8_small_m(x, *eight, arrived), small_m.int8_reference(x, *eight))


@pytest.mark.parametrize("name", ["int4", "int4 records", "int8", "Q4_K"])
def test_bad_arguments_of_products_of_many_rows_are_named(name):
    call, _ = OPS[
        {"int4": "int4_matmul", "int4 records": "int4_records_matmul", "int8": "int8_matmul"}.get(
            name, "k_quant_matmul"
        )
    ]
    weight = FORMATS[name].made(64, 256)
    given = {"int4": lambda: (weight[0][0], *weight[1:]), "int4 records": lambda: (weight,), "int8": lambda: weight}
    with pytest.raises(ValueError, match="x has K = 128, (qdata|the records) 256"):
        call(activations(20, 128), *given.get(name, lambda: weight[0].parts)(), sums.counters())
    with pytest.raises(ValueError, match="torch.float32: the kernel takes torch.bfloat16"):
        FORMATS[name].product(torch.zeros(40, 256), weight)
    with pytest.raises(ValueError, match="group size is 8|an even number, of 4736 bytes each"):
        INT8.product(activations(20, 256), int8_weight(8, 256, 8)) if name == "int8" else (
            RECORDS.product(activations(20, 256), RECORDS.made(64, 256)[:1])
        )


class Scaled(Int4Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 2)


@pytest.mark.whole
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: nothing is substituted")
def test_both_int4_kernels_for_dynamic_rows_share_one_input():
    rows = {0: Dim("rows", min=9, max=1024)}
    called, graph = lowered(Scaled(48, 512), (activations(31, 512),), dynamic_shapes=(rows,), rows=20, longest=1024)
    (launch,) = (entry for entry in graph.launches if work_of(entry, 20)[0])
    assert "small_m" in launch["kernel"] and launch["grid"][0] == 2
    sums_of_parts = 4 * (1024 // large_m.WGMMA_ROWS * large_m.MOST_PARTS) * large_m.WGMMA_ROWS * large_m.TILE
    assert graph.recorded["workspace_bytes"] == sums_of_parts + 1024 * (512 + 48) * 2
