"""CUDA's attention: its kernels, run by Triton's interpreter, have the numbers of the eager one; what they compile to."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor, nn
from triton_interpreter import interpreted

from eagle3.export.lowering.cuda.attention import CudaAttention
from eagle3.export.lowering.cuda.kernels import attention as kernels
from eagle3.targets.attention import EagerAttention, KVCacheShape, attention_mask

SLOTS, WINDOW, DIM = 300, 100, 16


def by_interpreter(query: Tensor, *rest, keys: int = 16) -> Tensor:
    """``eagle3::attention`` by its kernels, on a cache rounded to bfloat16."""
    given = [x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x for x in (query, *rest)]
    with interpreted(kernels):
        found = kernels._launch(kernels._attention_kernel, kernels._attention_sum_kernel, *given, BLOCK_N=keys)
    return found.to(query.dtype)


class Attend(nn.Module):
    """``heads`` of queries to 2 of keys and values."""

    def __init__(self, kind, window=0, chunked=False, softcap=None, sinks=None, width=DIM, slots=SLOTS):
        super().__init__()
        self.window, self.chunked, self.softcap, self.sinks, self.slots = window, chunked, softcap, sinks, slots
        self.attention = kind(KVCacheShape(2, width, slots, window, sinks=sinks is not None))

    def forward(self, query, key, value, input_pos):
        mask = attention_mask(input_pos, self.slots, self.window, self.chunked)
        rows = self.attention.rows(input_pos, mask)
        return self.attention(query, key, value, rows, 0.25, softcap=self.softcap, sinks=self.sinks)


def inputs(first: int, rows: int, heads: int = 4, width: int = DIM):
    torch.manual_seed(first + rows)
    shapes = (1, rows, heads, width), (1, rows, 2, width), (1, rows, 2, width)
    return *(torch.randn(shape).bfloat16().float() for shape in shapes), torch.arange(first, first + rows)


def assert_equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1.5e-2, rtol=1e-2)  # softmax's weights and the output in bfloat16


@settings(max_examples=40, deadline=None)
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
)
def test_it_equals_eager_attention(groups, width, window, chunked, softcap, with_sinks, keys, calls, start):
    """Of any heads, with rings at any phase, after positions that were written again."""
    sinks = torch.linspace(-2, 3, 2 * groups).bfloat16().float() if with_sinks else None
    eager, ours = (
        Attend(kind, window, chunked and window > 0, softcap, sinks, width) for kind in (EagerAttention, CudaAttention)
    )
    with patch("eagle3.export.lowering.cuda.attention.attention", lambda *given: by_interpreter(*given, keys=keys)):
        for begin in range(0, start, window or start or 1):  # what the cache holds
            filled = inputs(begin, min(window or start, start - begin), 2 * groups, width)
            for each in (eager, ours):
                each.attention.kv_cache.update(filled[3], filled[1].transpose(1, 2), filled[2].transpose(1, 2))
        first = start
        for rows, again in calls:
            rows = min(rows, window or rows, SLOTS - first)
            if rows < 1:
                break
            given_now = inputs(first, rows, 2 * groups, width)
            assert_equal(ours(*given_now), eager(*given_now))
            first = max(first + rows - again, 0) if not window else first + rows - min(again, rows)


@pytest.mark.parametrize("window", [0, WINDOW])
def test_a_chunk_of_prefill_and_the_reference_are_the_same_attention(window):
    eager, ours = (Attend(kind, window) for kind in (EagerAttention, CudaAttention))
    for first, rows in ((0, 40), (40, 90), (130, 7)):
        given_now = inputs(first, rows)
        expected = eager(*given_now)
        torch.testing.assert_close(ours(*given_now), expected)  # the op on the host
        last = given_now[3]
        begins = (last - window + 1).clamp(min=0) if window else torch.zeros_like(last)
        cache = ours.attention.kv_cache
        rest = cache.k_cache, cache.v_cache, begins, last, 0.25, window or SLOTS
        for divided in (0, 1, 16):
            assert_equal(by_interpreter(given_now[0], *rest, divided, 0.0, None), expected)
