"""The kernel of few rows that reads INT4 weights in records equals plain PyTorch in Triton's interpreter, reads nothing
else, and asks L2 for weights alone."""

import re

import numpy as np
import pytest
import torch
import triton.language as tl
from kernel_inputs import activations, assert_product, int4_weight
from torch import Tensor
from triton_interpreter import asked_of_l2, exact_dots, interpreted, loaded_before_waits, within, words_read

from eagle3.export.lowering.cuda.kernels import small_m, sums
from eagle3.export.lowering.cuda.kernels.int4.records import kernel as int4_records
from eagle3.export.lowering.cuda.kernels.int4.records.kernel import shares
from eagle3.export.lowering.cuda.kernels.int4.records.layout import dequantized, fits, records, unpacked

LINEARS = {"gate_up": (43008, 5376), "down": (5376, 21504), "qkv": (16384, 5376), "o": (5376, 8192)}
"""Linears of Gemma 4 31B, N x K."""


def run(x: Tensor, packed: Tensor, activation: str = "", multiprocessors: int = 1, arrived=None, **asked) -> Tensor:
    arrived = sums.counters() if arrived is None else arrived
    with interpreted(sums, small_m, int4_records), sums.made_for(multiprocessors, False):
        given = x, packed, arrived, activation, 8 if len(x) <= 8 else 16
        return int4_records._launch_records(int4_records.int4_records_small_m_kernel, *given, **asked)


def assert_right(x: Tensor, weight: tuple[Tensor, ...], **given) -> None:
    packed = records(*weight)
    span = 15 * (weight[1].double().amax(1) * weight[2].double().amax(1))
    assert_product(run(x, packed, **given), x, dequantized(packed), x.double().abs().sum(1)[:, None] * span)


@pytest.mark.parametrize(("n", "k"), [(64, 256), (320, 768)])
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


@pytest.mark.parametrize(("n", "k", "group"), [(32, 256, 32), (96, 256, 32), (64, 512, 256)])
def test_a_weight_of_a_shape_without_records_is_refused(n, k, group):
    assert not fits(n, k, group)
    with pytest.raises(ValueError, match=rf"{n} x {k} in groups of {group}: records are of multiples of 64 x 256"):
        records(*int4_weight(n, k, group))


@pytest.mark.first(4)
@pytest.mark.parametrize(
    ("m", "n", "k", "multiprocessors"),
    [(4, 128, 1024, 1), (9, 64, 768, 2), (1, 256, 512, 1), (21, 192, 256, 132), (8, 64, 768, 2), (16, 128, 1024, 1)],
)
def test_the_records_kernel_is_right_for_any_rows_and_share_of_blocks(m, n, k, multiprocessors):
    """The cases have tiles of one program, tiles of several, programs of several tiles, and of these one that begins
    with a tile. The counters are zero at the end."""
    x, weight, arrived = activations(m, k), int4_weight(n, k), sums.counters()
    for _ in range(2):  # the second call finds what the first one left
        assert_right(x, weight, multiprocessors=multiprocessors, arrived=arrived)
        assert not arrived.any()


@pytest.mark.parametrize("activation", [sums.SILU, sums.GELU_TANH])
def test_the_records_kernel_computes_gate_and_up_in_one_tile(activation):
    x, packed = activations(5, 512), records(*int4_weight(256, 512))
    found, expected = run(x, packed, activation), sums.gated(run(x, packed), activation)
    assert found.shape == (5, 128)
    torch.testing.assert_close(found, expected, atol=0, rtol=2**-7)


def test_a_row_of_the_records_kernel_has_the_same_bits_with_any_other_rows():
    """The sums of the first half of K and of the second cancel out, so that the order of additions decides the bits."""
    half, x = int4_weight(128, 512), activations(17, 512)
    x, packed = torch.cat([x, -x], 1), records(*(torch.cat([part, part], 1) for part in half))
    for most, sizes in ((8, (1, 2, 7, 8)), (16, (1, 8, 9, 16, 17))):
        with interpreted(sums, small_m, int4_records), exact_dots(), sums.made_for(1, False):
            kernel = int4_records.int4_records_small_m_kernel
            found = [int4_records._launch_records(kernel, x[:m], packed, sums.counters(), "", most) for m in sizes]
        for rows in found:
            assert torch.equal(rows, found[-1][: len(rows)])


@pytest.mark.parametrize(("q", "zero"), [(0x00, 255), (0xFF, 255), (0x0F, 0)])
def test_the_records_kernel_is_right_for_extreme_codes(q, zero):
    weight = int4_weight(64, 256)
    weight[0].fill_(q)
    weight[3].fill_(zero)
    assert_right(activations(3, 256), weight)


def test_zero_rows_give_zeros_and_too_large_rows_give_nan_or_infinity():
    """x is multiplied by powers of two, which is exact or gives infinities; nothing wraps around to a finite number."""
    weight, x = int4_weight(64, 256), activations(3, 256)
    x[0] = 0
    x[1, 8], x[2, 9] = 2.0**28, float("nan")
    found = run(x, records(*weight))
    assert not found[0].any() and not found[1:].isfinite().any()
    assert_right(activations(1, 256) * 2.0**-60, weight)


def test_each_program_has_an_even_share_and_no_tile_exceeds_its_room_for_parts():
    for n, k in (*LINEARS.values(), (64, 256), (128, 768)):
        for programs in (1, 5, 264, 396):
            found, blocks = shares(n, k, programs), k // 256
            total = n // 64 * blocks
            assert found.count == min(programs, total)
            begins = [each * total // found.count for each in range(found.count + 1)]
            ranges = list(zip(begins, begins[1:], strict=False))
            sizes = {after - before for before, after in ranges}
            assert max(sizes) - min(sizes) <= 1 and min(sizes) > 0
            tiles = range(min(n // 64, 97))
            parts = max(sum(a < (tile + 1) * blocks and b > tile * blocks for a, b in ranges) for tile in tiles)
            assert parts <= found.parts <= blocks


@pytest.mark.parametrize(
    ("asked", "any_asked"),
    [
        ({"AHEAD": 4, "FIRST": 2}, True),
        ({"OF_NEXT": 128}, True),
        ({"FIRST": 12}, False),  # more than any program's share
    ],
)
def test_only_weights_are_prefetched_into_l2(asked, any_asked):
    """The program's own records and the next matmul's weights are prefetched, and nothing beyond their ends."""
    x, packed, following = activations(2, 4096), records(*int4_weight(128, 4096)), records(*int4_weight(64, 512))
    of_next = "OF_NEXT" in asked
    with asked_of_l2() as ranges:
        run(x, packed, following=following if of_next else None, **asked)
    home = following if of_next else packed
    first, last = home.data_ptr(), home.data_ptr() + home.nbytes
    assert bool(ranges) == any_asked and all(first <= begin and end <= last for begin, end in ranges)


@pytest.mark.parametrize("m", [3, 11])
def test_the_records_kernel_reads_nothing_outside_the_records_and_the_inputs(m):
    """Both are in the middle of a tensor, whose other parts must not be read, though the next block's weights and
    inputs are loaded ahead."""
    weight, x = records(*int4_weight(128, 768)), activations(m, 768)
    room, around = torch.zeros(3, weight.numel(), dtype=torch.uint8), torch.zeros(3, m, 768).bfloat16()
    room[1], around[1] = weight.flatten(), x
    with words_read() as read, words_read(tl.bfloat16) as inputs:
        run(around[1], room[1].view(weight.shape))
    for addresses, home in ((read, room[1]), (inputs, around[1])):
        assert len(within(addresses, home)) == sum(each.size for each in addresses) > 0


def test_an_early_launch_reads_only_weights_before_its_wait_and_writes_nothing():
    """Every program accesses memory that another launch may still write only after the wait."""
    x, packed = activations(3, 768), records(*int4_weight(128, 768))
    with loaded_before_waits() as loaded:
        found = run(x, packed, EARLY=True)
    assert len(within(loaded, packed)) == np.concatenate(loaded).size > 0
    assert torch.equal(found, run(x, packed))


def test_the_records_kernel_refuses_other_inputs_and_more_rows_than_counters():
    packed = records(*int4_weight(128, 512))
    for x, says in (
        (torch.zeros(2, 512), "x is torch.float32"),
        (torch.zeros(2, 256).bfloat16(), "x has K = 256, the records 512"),
        (torch.zeros(8 * sums.COUNTERS // 2 + 1, 512).bfloat16(), "the kernel takes"),
    ):
        with pytest.raises(ValueError, match=re.escape(says)):
            int4_records._launch_records(None, x, packed, sums.counters())
