"""The CUDA attention kernels, run by the interpreter, give the numbers of eager attention."""

from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as some
from machine_code.bounds import chunks
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F
from triton.runtime.interpreter import InterpreterBuilder
from triton_interpreter import exact_dots, interpreted

from eagle3.export.lowering.cuda.backend import ranges
from eagle3.export.lowering.cuda.graph.rotations import CudaAttention
from eagle3.export.lowering.cuda.kernels import attention as kernels
from eagle3.export.lowering.cuda.kernels import attention_chunk, attention_sums
from eagle3.export.lowering.cuda.kernels.sums import counters
from eagle3.targets.attention import Block, EagerAttention, KVCacheShape

SLOTS, WINDOW, DIM = 300, 100, 16


def by_interpreter(query: Tensor, *rest, keys: int = 16, **chunked: int) -> Tensor:
    """Run ``eagle3::attention`` by its kernels, on a cache rounded to bfloat16, or on one of codes with scales.
    ``chunked`` are constants of the kernel for a chunk of prefill."""
    given = [x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x for x in (query, *rest[:10])]
    given += rest[10:]
    with interpreted(kernels, attention_sums, attention_chunk):
        if given[8]:
            found = kernels.launch((kernels._attention_kernel, kernels.attention_sum_kernel), *given, BLOCK_N=keys)
        else:
            found = of_a_chunk(attention_chunk._attention_chunk_kernel, *given, BLOCK_N=keys, **chunked)
    return found.to(query.dtype)


def of_a_chunk(kernel: Any, *given: Any, **constants: int) -> Tensor:
    """Launch the kernel for a chunk with the arguments of ``eagle3::attention``."""
    query, keys, values, first, last, _, scale, _, _, softcap, sinks, *scales = given
    rest = query, keys, values, first, last, scale, softcap, sinks, *scales
    return attention_chunk.launch_chunk(kernel, *rest, **{"BLOCK_M": 64} | constants)


class Attend(nn.Module):
    """Attention with ``heads`` query heads and 2 heads of keys and values."""

    def __init__(self, kind, window=0, chunked=False, softcap=None, sinks=None, width=DIM, slots=SLOTS, int8=False):
        super().__init__()
        self.softcap, self.sinks = softcap, sinks
        shape = KVCacheShape(2, width, slots, window, sinks=sinks is not None, chunked=chunked, int8=int8)
        self.attention = kind(shape)

    def forward(self, query, key, value, input_pos):
        rows = self.attention.rows(input_pos)
        return self.attention(query, key, value, rows, 0.25, softcap=self.softcap, sinks=self.sinks)


def inputs(first: int, rows: int, heads: int = 4, width: int = DIM):
    torch.manual_seed(first + rows)
    shapes = (1, rows, heads, width), (1, rows, 2, width), (1, rows, 2, width)
    return *(torch.randn(shape).bfloat16().float() for shape in shapes), torch.arange(first, first + rows)


def assert_equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1.5e-2, rtol=1e-2)  # softmax's weights and the output in bfloat16


def assert_equals_eager(
    groups=2, width=DIM, window=0, chunked=False, softcap=None, with_sinks=False, keys=16, calls=((8, 3), (1, 0)),
    start=140, int8=False, slots=SLOTS,
):  # fmt: skip
    """Compare the kernels with the eager reference. The cache holds ``start`` positions; then each of ``calls`` has its
    number of rows, of which the last ones are written again by the next call."""
    sinks = torch.linspace(-2, 3, 2 * groups).bfloat16().float() if with_sinks else None
    eager, ours = (
        Attend(kind, window, chunked and window > 0, softcap, sinks, width, slots, int8 and not window)
        for kind in (EagerAttention, CudaAttention)
    )
    with patch(
        "eagle3.export.lowering.cuda.graph.rotations.attention", lambda *given: by_interpreter(*given, keys=keys)
    ):
        for begin in range(0, start, window or start or 1):  # what the cache holds
            filled = inputs(begin, min(window or start, start - begin), 2 * groups, width)
            for each in (eager, ours):
                each.attention.kv_cache.update(filled[3], filled[1].transpose(1, 2), filled[2].transpose(1, 2))
        first = start
        for rows, again in calls:
            rows = min(rows, window or rows, slots - first)
            if rows < 1:
                break
            given_now = inputs(first, rows, 2 * groups, width)
            assert_equal(ours(*given_now), eager(*given_now))
            first = max(first + rows - again, 0) if not window else first + rows - min(again, rows)


@pytest.mark.parametrize(
    "case",
    [
        {"window": WINDOW, "with_sinks": True, "start": 240},
        {"window": WINDOW, "softcap": 2.0, "start": 240},
        {"window": 16, "chunked": True, "start": 40},
        {"softcap": 2.0, "with_sinks": True, "int8": True, "keys": 32},
        {"with_sinks": True, "slots": 100, "start": 60},
        {"softcap": 2.0, "with_sinks": True, "int8": True, "keys": 32, "calls": ((40, 3), (70, 0)), "width": 24},
        {"window": WINDOW, "groups": 3, "calls": ((40, 3), (70, 0)), "start": 240},
    ],
    ids=str,
)
def test_the_attention_kernels_have_windows_softcaps_sinks_and_codes(case):
    assert_equals_eager(**case)


@pytest.mark.whole
@settings(max_examples=8, deadline=None)
@given(
    groups=some.sampled_from([1, 2, 3, 8]),
    width=some.sampled_from([8, 16, 24, 64]),
    window=some.sampled_from([0, 5, 16, WINDOW]),
    chunked=some.booleans(),
    softcap=some.sampled_from([None, 2.0]),
    with_sinks=some.booleans(),
    keys=some.sampled_from([16, 32, 64]),
    calls=some.lists(some.tuples(some.integers(1, 18), some.integers(0, 5)), min_size=1, max_size=4),
    start=some.integers(0, 240),
    int8=some.booleans(),
)
def test_the_attention_kernels_equal_eager_attention(**case):
    """The cases cover numbers of heads, phases of ring buffers, positions written twice, and caches of codes."""
    assert_equals_eager(**case)


class Drafting(Attend):
    """Writes rows, and lets a block after them attend to the written rows and to itself."""

    def __init__(self, kind, window, block):
        super().__init__(kind, window)
        self.block = block

    def forward(self, key, value, input_pos, query, block_key, block_value):
        self.attention.write(key, value, self.attention.rows(input_pos))
        positions = input_pos[-1:] + torch.arange(1, query.shape[1] + 1)
        return self.attention(query, block_key, block_value, self.attention.rows(positions, self.block), 0.25)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("window", "block"),
    [
        (0, Block()),
        (60, Block(30, from_first_row=True)),
        (60, Block(30, causal=True)),
    ],
)
def test_a_block_attends_as_the_eager_reference_does(window, block):
    eager, ours = (Drafting(kind, window, block) for kind in (EagerAttention, CudaAttention))
    with patch("eagle3.export.lowering.cuda.graph.rotations.attention", by_interpreter):
        for start, length in ((0, 20), (20, 40), (60, 1), (61, 16), (70, 5)):  # the last over the block before
            _, key, value, positions = inputs(start, length)
            given_now = key, value, positions, *inputs(start + length, 16)[:3]
            assert_equal(ours(*given_now), eager(*given_now))


@pytest.mark.first(1)
@pytest.mark.parametrize(("window", "int8"), [(0, False), (WINDOW, False), (0, True)])
def test_a_chunk_of_prefill_and_the_reference_are_the_same_attention(window, int8):
    eager, ours = (Attend(kind, window, int8=int8) for kind in (EagerAttention, CudaAttention))
    for first, rows in ((0, 33), (33, 40)):
        given_now = inputs(first, rows)
        expected = eager(*given_now)
        torch.testing.assert_close(ours(*given_now), expected)  # the op on the host
        last = given_now[3]
        begins = (last - window + 1).clamp(min=0) if window else torch.zeros_like(last)
        keys, values, *scales = ours.attention.written(last, None, None)
        rest = keys, values, begins, last, counters(), 0.25, window or SLOTS
        for divided in (0, 16):
            assert_equal(by_interpreter(given_now[0], *rest, divided, 0.0, None, *scales), expected)
        # A program that takes its rows in several tiles gives the bits of one that takes them at once.
        at_once = by_interpreter(given_now[0], *rest, 0, 0.0, None, *scales, BLOCK_M=128)
        for tiles in ({"ROWS": 32, "BLOCK_M": 128}, {"BLOCK_M": 32}):
            assert torch.equal(by_interpreter(given_now[0], *rest, 0, 0.0, None, *scales, **tiles), at_once)


@pytest.mark.parametrize(("rows", "sinks"), [(1, None), (8, [0.5, -1.0, 2.0, 30.0]), (20, None)])
def test_rows_may_begin_after_the_first_chunk_of_a_whole_context(rows, sinks):
    """No part of the chunks before the first row is added, since no program wrote one."""
    query, *_, last = inputs(280 - rows, rows)
    cache, first = torch.randn(2, 1, 2, SLOTS, DIM).bfloat16().float(), last - 130
    rest = *cache, first, last, counters(), 0.25, SLOTS, 16, 0.0, None if sinks is None else torch.tensor(sinks)
    assert_equal(by_interpreter(query, *rest), kernels.attention_reference(query, *rest))


def split(rows: int, query: Tensor, *rest) -> tuple[Tensor, Tensor, Tensor]:
    """Return the float32 partial results of the last ``rows`` rows, by row and part, and the output."""
    kept = {}

    class Kept:
        def __getitem__(self, grid):
            def run(*given, **options) -> None:
                kernels._attention_kernel[grid](*given, **options)
                kept["arrived"], kept["parts"], kept["stats"] = given[6], given[7], given[8]

            return run

    first, last = (each[-rows:] for each in rest[2:4])
    keys = 128 if rest[6] > 10000 else 16
    with interpreted(kernels, attention_sums, attention_chunk), exact_dots():
        both = Kept(), kernels.attention_sum_kernel
        out = kernels.launch(both, query[:, -rows:], *rest[:2], first, last, *rest[4:], BLOCK_N=keys)
    assert not kept["arrived"].any()
    chunk, doublings, count = attention_sums.division(rest[6], rest[0].shape[2], 2)
    if doublings >= 0:  # the others wrote nothing
        count = chunks(int(last[-1]) + 1, chunk, attention_sums.MOST_PARTS)
    parts, stats = (kept[name][: count * rows].unflatten(0, (-1, rows)) for name in ("parts", "stats"))
    return torch.where(stats[..., 1:] > 0, parts, 0), stats, out


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("slots", "window", "last"),
    [(700, 0, 611), (512, 256, 1043), (16900, 0, 16390)],
)
def test_a_row_of_attention_has_the_same_bits_with_any_number_of_rows(slots, window, last):
    """Scores are multiples of 1/8, exact in float32, and weighted values are added in float64, so that numpy's order of
    addition, which depends on the processor, does not matter. The longest contexts exceed the positions at which chunks
    double; one head of keys is enough there, since programs of two heads share nothing."""
    torch.manual_seed(last)
    heads = 1 if slots > 10000 else 2
    query = (torch.randint(-8, 9, (1, 16, 2 * heads, DIM)) / 8).bfloat16()
    keys, values = ((torch.randint(-8, 9, (1, heads, slots, DIM)) / 8).bfloat16() for _ in range(2))
    keys[:, :, 8190:8194] *= 8  # what is behind an end of equal chunks is what decides
    keys[:, :, 16380:] *= 8
    at = torch.arange(last - 15, last + 1)
    first = (at - window + 1).clamp(min=0) if window else torch.zeros_like(at)
    rest = keys, values, first, at, counters(), 0.25, window or slots, 16, 0.0, None
    parts, stats, out = split(16, query, *rest)
    assert_equal(out.float(), kernels.attention_reference(query, *rest).float())
    for rows in (1, 15) if slots > 10000 else (1, 8, 15):
        for found, expected in zip(split(rows, query, *rest), (parts, stats, out), strict=True):
            assert torch.equal(found, expected[..., -rows:, :, :]), f"{rows} rows"


@pytest.mark.races(("forward",))  # loads are counted
@pytest.mark.parametrize(("window", "rows"), [(0, 8), (WINDOW, 1)])
def test_each_key_is_read_once_for_all_rows_and_a_ring_only_within_one_window(monkeypatch, window, rows):
    read = []
    load = InterpreterBuilder.create_masked_load

    def counted(self, ptrs, mask, other, *options):
        if ptrs.data.shape == (32, DIM):
            read.append(32)
        return load(self, ptrs, mask, other, *options)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted)
    query, *_, last = inputs(250, rows)
    slots = 2 * window or SLOTS
    cache = torch.randn(2, 1, 2, slots, DIM)
    first = (last - window + 1).clamp(min=0) if window else torch.zeros_like(last)
    by_interpreter(query, *cache, first, last, counters(), 0.25, window or slots, rows, 0.0, None, keys=32)
    positions = sum(read) // 4  # keys and values of two heads
    attended = int(last[-1] - first[0]) + 1
    assert attended <= positions <= attended + 2 * 32  # blocks at both ends


@pytest.mark.races(("forward",))  # stores are counted
@pytest.mark.parametrize(("last", "chunks_with_tokens"), [(90, 1), (290, 3)])
def test_a_program_without_tokens_ends_before_it_writes(monkeypatch, last, chunks_with_tokens):
    written, store = [], InterpreterBuilder.create_masked_store

    def counted(self, ptrs, value, mask, *options):
        written.extend([1] * (ptrs.data.shape == (16,) and value.dtype.scalar == tl.float32))
        return store(self, ptrs, value, mask, *options)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", counted)
    query, *_, at = inputs(last, 4)
    cache = torch.randn(2, 1, 2, SLOTS, DIM)
    by_interpreter(query, *cache, torch.zeros_like(at), at, counters(), 0.25, SLOTS, 4, 0.0, None)
    assert len(written) == 2 * 2 * chunks_with_tokens  # maximum and sum, in two heads of keys


class WithMaskRows(nn.Module):
    """Attention with ``masks`` additional rows, as in a P-EAGLE head."""

    def __init__(self, masks: int):
        super().__init__()
        self.attend, self.masks = Attend(CudaAttention), masks

    def forward(self, query, key, value, input_pos):
        query, key, value = (F.pad(x, (0, 0, 0, 0, 0, self.masks)) for x in (query, key, value))
        behind = input_pos[-1:] + torch.arange(1, self.masks + 1)
        return self.attend(query, key, value, torch.cat((input_pos, behind)))


@pytest.mark.first(3)
@pytest.mark.parametrize(
    ("shortest", "longest", "masks", "divided"),
    [(1, 1, 0, 1), (2, 10, 0, 10), (1, 64, 8, 16), (9, 64, 2, 0)],
)
def test_attention_splits_positions_for_few_rows_and_never_narrows_dynamic_lengths(shortest, longest, masks, divided):
    rows = Dim("rows", min=shortest, max=longest) if shortest < longest else None
    dynamic = ({1: rows}, {1: rows}, {1: rows}, {0: rows}) if rows else None
    module, seen = WithMaskRows(masks).to(torch.bfloat16), []
    given_now = [x.to(torch.bfloat16) if x.is_floating_point() else x for x in inputs(0, longest - 1 | 1)]

    def launched(*given: Any) -> Tensor:
        seen.append(given[8])
        if not given[8]:
            return of_a_chunk(MagicMock(), *given)
        return kernels.launch((MagicMock(), MagicMock()), *given)

    def exported() -> dict[str, str]:
        return ranges(torch.export.export(module, tuple(given_now), dynamic_shapes=dynamic, strict=False))

    before = exported()
    with patch("eagle3.export.lowering.cuda.graph.rotations.attention", launched):
        assert list(exported().values()) == list(before.values())
    assert seen == [divided]
