"""The small-M INT4 kernel, which reads weights in records, equals plain PyTorch in Triton's interpreter; its compiled
code is checked without a GPU."""

import re

import numpy as np
import pytest
import torch
import triton.language as tl
from cuda_lowered import lowered
from kernel_usage import usage
from machine_code.work import work_of
from small_m_weights import activations, int4_weight
from torch import Tensor, nn
from torch.export import Dim
from triton_interpreter import asked_of_l2, exact_dots, interpreted, loaded_before_waits, words_read

from eagle3.export.lowering.cuda.graph.shortcuts import analyzed_once, counters_unchanged
from eagle3.export.lowering.cuda.kernels import small_m, sums
from eagle3.export.lowering.cuda.kernels.int4.records import kernel as int4_records
from eagle3.export.lowering.cuda.kernels.int4.records import layout as record_layout
from eagle3.export.lowering.cuda.kernels.int4.records.kernel import shares
from eagle3.export.lowering.cuda.kernels.int4.records.layout import records, unpacked
from eagle3.export.lowering.cuda.kernels.int4.tiles import kernel as int4
from eagle3.runner.system.gpus import BY_ARCH

TYPES = ["*bf16", "*u8", "*u8", "*i32", "*fp32", "*bf16", "i32"]
LINEARS = {"gate_up": (43008, 5376), "down": (5376, 21504), "qkv": (16384, 5376), "o": (5376, 8192)}
"""Linears of Gemma 4 31B, N x K."""


def run(x: Tensor, packed: Tensor, activation: str = "", multiprocessors: int = 1, arrived=None, **asked) -> Tensor:
    arrived = sums.counters() if arrived is None else arrived
    with interpreted(sums, small_m, int4_records), sums.made_for(multiprocessors, False):
        return int4_records._launch_records(
            int4_records.int4_records_small_m_kernel, x, packed, arrived, activation, 8 if len(x) <= 8 else 16, **asked
        )


def assert_right(found: Tensor, x: Tensor, weight: tuple[Tensor, ...]) -> None:
    """Assert that the product is right up to rounding to bf16 and the errors of float32, by the weights' own
    dequantization."""
    (w,) = int4.dequantized([weight[0]], *int4.tiled(*weight[1:]))
    expected = x.double() @ w.double().T
    span = 15 * (weight[1].float().amax(1) * weight[2].float().amax(1)).double()  # [N]
    room = 1e-6 * x.double().abs().sum(1)[:, None] * span + 2**-8 * expected.abs()
    assert found.dtype == torch.bfloat16 and found.shape == expected.shape
    assert ((found.double() - expected).abs() <= room).all()


@pytest.mark.parametrize(("n", "k"), [(64, 256), (64, 1024), (192, 512), (320, 768)])
def test_packing_into_records_and_unpacking_returns_the_weight(n, k):
    weight = int4_weight(n, k)
    packed = records(*weight)
    assert packed.shape == (n // 32, k // 256, 4736)
    assert packed.numel() == sum(part.nbytes for part in weight)
    for found, expected in zip(unpacked(packed), weight, strict=True):
        assert found.is_contiguous() and found.dtype == expected.dtype
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))  # steps bit by bit


def test_each_code_has_a_place_of_its_own_in_a_record():
    """Codes, scales and steps are in the words that the kernel's docstring gives."""
    zeros = [torch.zeros_like(part) for part in int4_weight(64, 512)]
    for n, k in ((0, 0), (37, 300), (63, 511), (5, 257)):
        weight = [part.clone() for part in zeros]
        weight[0][n, k // 2] = 9 << 4 * (k % 2)
        weight[1][n, k // 32], weight[3][n, k // 32] = 7, 5
        weight[2][n, k // 256] = 2.0
        record = records(*weight)[n // 32, k // 256]
        words, codes, steps = record.split((4096, 512, 128))
        group, r, c, mid = k % 256 // 32, n % 32 // 4, k % 32 // 8, n % 4
        word = words.view(torch.int32).view(8, 8, 4, 4)[group, r, c, mid].item()
        assert word & 0xFFFFFFFF == 9 << (0, 16, 4, 20, 8, 24, 12, 28)[k % 8]
        assert codes.view(8, 32, 2)[group, n % 32].tolist() == [7, 5]
        assert steps.view(torch.float16).view(32, 2)[n % 32].tolist() == [2.0, 0.0]
        assert int((record != 0).sum()) == 4  # of the word one byte, two codes, and one byte of 2.0


@pytest.mark.parametrize(("n", "k", "group"), [(32, 256, 32), (96, 256, 32), (64, 256, 64), (64, 512, 256)])
def test_a_weight_of_a_shape_without_records_is_refused(n, k, group):
    assert not record_layout.fits(n, k, group)
    with pytest.raises(ValueError, match=rf"{n} x {k} in groups of {group}: records are of multiples of 64 x 256"):
        records(*int4_weight(n, k, group))


@pytest.mark.first(3)
@pytest.mark.parametrize("m", [1, 4, 8, 9, 16, 21])
@pytest.mark.parametrize(("n", "k", "multiprocessors"), [(128, 1024, 1), (64, 768, 2), (256, 512, 1), (192, 256, 132)])
def test_the_records_kernel_is_right_for_any_rows_and_share_of_blocks(m, n, k, multiprocessors):
    """The cases have tiles of one program, tiles of several, programs of several tiles, and of these one that begins
    with a tile. The counters are zero at the end."""
    x, weight, arrived = activations(m, k), int4_weight(n, k), sums.counters()
    for _ in range(2):  # the second call finds what the first one left
        assert_right(run(x, records(*weight), multiprocessors=multiprocessors, arrived=arrived), x, weight)
        assert not arrived.any()


@pytest.mark.parametrize("activation", [sums.SILU, sums.GELU_TANH])
def test_the_records_kernel_computes_gate_and_up_in_one_tile(activation):
    x, weight = activations(5, 512), int4_weight(256, 512)
    found, plain = run(x, records(*weight), activation), run(x, records(*weight))
    expected = sums.gated(plain, activation)
    assert found.shape == (5, 128)
    torch.testing.assert_close(found, expected, atol=0, rtol=2**-7)


def test_a_row_of_the_records_kernel_has_the_same_bits_with_any_other_rows():
    """The sums of the first half of K and of the second cancel out, so that the order of additions decides the bits."""
    half, x = int4_weight(128, 512), activations(17, 512)
    x, packed = torch.cat([x, -x], 1), records(*(torch.cat([part, part], 1) for part in half))
    for most, sizes in ((8, range(1, 9)), (16, (1, 7, 8, 9, 15, 16, 17))):
        with interpreted(sums, small_m, int4_records), exact_dots(), sums.made_for(1, False):
            found = [
                int4_records._launch_records(
                    int4_records.int4_records_small_m_kernel, x[:m], packed, sums.counters(), "", most
                )
                for m in sizes
            ]
        for rows in found:
            assert torch.equal(rows, found[-1][: len(rows)])


@pytest.mark.parametrize("q", [0x00, 0xFF, 0x0F, 0xF0])
@pytest.mark.parametrize("zero", [0, 255])
def test_the_records_kernel_is_right_for_extreme_codes(q, zero):
    x, weight = activations(3, 256), int4_weight(64, 256)
    weight[0].fill_(q)
    weight[3].fill_(zero)
    assert_right(run(x, records(*weight)), x, weight)


def test_zero_rows_give_zeros_and_too_large_rows_give_nan_or_infinity():
    """x is multiplied by powers of two, which is exact or gives infinities; nothing wraps around to a finite number."""
    weight = int4_weight(64, 256)
    x = activations(3, 256)
    x[0] = 0
    x[1, 8] = 2.0**28
    x[2, 9] = float("nan")
    found = run(x, records(*weight))
    assert not found[0].any()
    assert not found[1:].isfinite().any()
    small = activations(1, 256) * 2.0**-60
    assert_right(run(small, records(*weight)), small, weight)


def test_each_program_has_an_even_share_and_no_tile_exceeds_its_room_for_parts():
    for n, k in (*LINEARS.values(), (64, 256), (128, 768)):
        for programs in (1, 5, 264, 396):
            found, blocks = shares(n, k, programs), k // 256
            total = n // 64 * blocks
            assert found.count == min(programs, total)
            begins = [each * total // found.count for each in range(found.count + 1)]
            sizes = {after - before for before, after in zip(begins, begins[1:], strict=False)}
            assert max(sizes) - min(sizes) <= 1 and min(sizes) > 0
            parts = max(
                sum(a < (tile + 1) * blocks and b > tile * blocks for a, b in zip(begins, begins[1:], strict=False))
                for tile in range(min(n // 64, 97))
            )
            assert parts <= found.parts <= blocks


@pytest.mark.parametrize(
    ("asked", "any_asked"),
    [
        ({"AHEAD": 4}, True), ({"FIRST": 1}, True), ({"OF_NEXT": 128}, True), ({"AHEAD": 4, "FIRST": 2}, True),
        ({"FIRST": 12}, False),  # more than any program's share
    ],
)  # fmt: skip
def test_only_weights_are_prefetched_into_l2(asked, any_asked):
    """The program's own records and the next matmul's weights are prefetched, and nothing beyond their ends."""
    x, packed, following = activations(2, 4096), records(*int4_weight(128, 4096)), records(*int4_weight(64, 512))
    of_next = "OF_NEXT" in asked
    with asked_of_l2() as ranges:
        run(x, packed, following=following if of_next else None, **asked)
    homes = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in (packed, following)]
    first, last = homes[of_next]
    assert bool(ranges) == any_asked and all(first <= begin and end <= last for begin, end in ranges)
    assert all(begin % 16 == 0 and end % 16 == 0 for begin, end in ranges)


def within(addresses: list, *tensors: Tensor, size: int = 4) -> bool:
    """Return True if values of ``size`` bytes at all ``addresses`` lie in one of the tensors."""
    places = np.concatenate([each.ravel() for each in addresses])
    homes = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors]
    return bool(np.any([(places >= first) & (places + size <= last) for first, last in homes], 0).all())


@pytest.mark.parametrize("m", [3, 8, 11])
def test_the_records_kernel_reads_nothing_outside_the_records_and_the_inputs(m):
    """Both are in the middle of a tensor, whose other parts must not be read, though the next block's weights and
    inputs are loaded ahead."""
    weight, x = records(*int4_weight(128, 768)), activations(m, 768)
    room, around = torch.zeros(3, weight.numel(), dtype=torch.uint8), torch.zeros(3, m, 768).bfloat16()
    room[1], around[1] = weight.flatten(), x
    packed, x = room[1].view(weight.shape), around[1]
    with words_read() as read, words_read(tl.bfloat16) as inputs:
        run(x, packed)
    assert read and within(read, packed)
    assert inputs and within(inputs, x, size=2)


def test_an_early_launch_reads_only_weights_before_its_wait_and_writes_nothing():
    """Every program accesses memory that another launch may still write only after the wait."""
    x, packed = activations(3, 768), records(*int4_weight(128, 768))
    with loaded_before_waits() as loaded:
        found = run(x, packed, EARLY=True)
    assert loaded and within(loaded, packed)
    assert torch.equal(found, run(x, packed))


@pytest.mark.parametrize(("dtype", "k", "expected"), [
    (torch.float32, 512, "x is torch.float32"), (torch.bfloat16, 256, "x has K = 256, the records 512"),
])  # fmt: skip
def test_the_records_kernel_refuses_an_input_of_another_dtype_or_width(dtype, k, expected):
    with pytest.raises(ValueError, match=re.escape(expected)):
        run(torch.zeros(2, k, dtype=dtype), records(*int4_weight(64, 512)))


def test_the_records_kernel_refuses_more_rows_than_counters():
    x, packed = torch.zeros(8 * sums.COUNTERS // 2 + 1, 256).bfloat16(), records(*int4_weight(128, 256))
    with pytest.raises(ValueError, match="the kernel takes"):
        int4_records._launch_records(None, x, packed, sums.counters())


def constants_of(n: int, k: int, rows: int, activation: str = "", early: bool = False) -> dict:
    found = shares(n, k, 132 * int4_records.TOGETHER[rows])
    asked = {"AHEAD": 0, "FIRST": 0, "EARLY": False, "OF_NEXT": 4096 if early else 0}
    asked |= int4_records.LEVERS if early else {}
    blocks = {"BLOCK_M": rows, "BLOCK_N": 64, "BLOCK_K": 256}
    return {
        "N": n,
        "K": k,
        "PROGRAMS": found.count,
        "SHARED": found.parts > 1,
        "ACTIVATION": activation,
        **blocks,
        **asked,
    }


@pytest.mark.first(1)
@pytest.mark.parametrize(("arch", "rows", "most"), [(80, 8, 2.25), (90, 8, 2.2), (120, 8, 2.25), (90, 16, 3.0)])
def test_as_many_programs_as_planned_fit_with_a_short_loop_and_one_barrier(arch, rows, most, tmp_path):
    """``most`` is the most instructions of the loop for a weight. Inputs that passed from thread to thread would take
    two more barriers."""
    kernel, registers = int4_records.int4_records_small_m_kernel, int4_records.REGISTERS[rows]
    found = usage(kernel, TYPES, constants_of(5376, 21504, rows), arch, tmp_path, 8, registers=registers)
    assert found.registers <= registers and found.stack <= 16 and not {"LDL", "STL"} & set(found.loop)
    assert found.shared <= 100 * 1024 // int4_records.TOGETHER[rows] - 1024
    assert found.a_weight(64 * 256, 8) <= most
    assert found.loop.count("BAR") == 1
    assert "LDGSTS" not in found.loop


@pytest.mark.whole
@pytest.mark.parametrize("early", [False, True])
def test_the_records_kernel_does_not_spill_with_16_rows_and_gates(early, tmp_path):
    kernel = int4_records.int4_records_small_m_kernel
    for rows, activation in ((8, sums.GELU_TANH), (16, sums.GELU_TANH), (16, "")):
        constants = constants_of(43008, 5376, rows, activation, early and rows == 8)
        found = usage(kernel, TYPES, constants, 90, tmp_path, 8, registers=int4_records.REGISTERS[rows])
        assert found.registers <= int4_records.REGISTERS[rows]
        assert found.a_weight(64 * 256, 8) <= {8: 2.25, 16: 3.0}[rows]
        assert not {"LDL", "STL"} & set(found.loop)
        resident = BY_ARCH["sm_90"].resident(found.registers, found.shared, 256)
        assert resident >= int4_records.TOGETHER[rows]


def test_an_early_launch_loads_weights_before_its_wait_and_inputs_after_it(tmp_path):
    """Only weights are loaded and prefetched before the wait, no memory that another launch writes."""
    kernel = int4_records.int4_records_small_m_kernel
    ptx = usage(kernel, TYPES, constants_of(5376, 8192, 8, early=True), 90, tmp_path, 8, registers=80).ptx
    before, after = re.split(r"griddepcontrol\.wait;", ptx)
    assert "griddepcontrol.launch_dependents" in before
    assert before.count("cp.async.bulk.prefetch.L2") == 2 and "ld.global" in before
    assert "st.global" not in before and "atom" not in before and "atom" in after


class Twice(nn.Module):
    """Two products over records, of a weight whose tiles have one program each, and of one whose tiles are shared."""

    def __init__(self):
        super().__init__()
        for name, k in (("narrow", 256), ("wide", 1024)):
            self.register_buffer(name, records(*int4_weight(128, k)))
        self.register_buffer("arrived", sums.counters())

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        product = int4_records.int4_records_small_m
        return product(x * 2, self.narrow, self.arrived, 16), product(y * 2, self.wide, self.arrived, 16, sums.SILU)


@pytest.mark.whole
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: nothing is substituted")
def test_an_export_keeps_the_limits_of_registers_and_copies_no_weight():
    rows = Dim("rows", min=2, max=16)
    given = activations(4, 256), activations(4, 1024)
    with counters_unchanged(), analyzed_once(), sums.made_for(1, False):
        called, graph = lowered(Twice(), given, dynamic_shapes=({0: rows}, {0: rows}))
    calls = [(name, arguments) for name, arguments in called if name.startswith("int4_records_small_m")]
    assert [graph.blocks[name]["maxnreg"] for name, _ in calls] == [80, 128] * 2
    assert [arguments[1] for _, arguments in calls] == ["narrow"] * 2 + ["wide"] * 2
    assert all(arguments[3] == "arrived" for _, arguments in calls)
    products = [done for entry in graph.launches if (done := work_of(entry, 1)[0])]
    assert [(each.weights, each.iterations) for each in products] == [(64 * 256, 2), (64 * 256, 8)]
