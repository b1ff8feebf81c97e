"""The native runner's kernels compute what ExecuTorch's own do."""

import math

import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401  (registers torch.ops.llama)
import pytest
import torch
from native_build import Kernels


@pytest.fixture(scope="module")
def kernels(built):
    return Kernels(built)


# batch, rows, query heads, heads of keys, head_dim, slots, first position, causal, with a mask
SHAPES = [
    (1, 1, 4, 2, 64, 128, 50, True, False),
    (1, 4, 4, 2, 64, 128, 0, False, True),
    (4, 3, 2, 1, 16, 300, 200, True, False),  # heads as a batch
    (2, 5, 7, 1, 24, 77, 70, True, False),  # more rows than one part takes; an odd group
    (1, 17, 6, 3, 72, 1000, 900, True, False),
    (1, 9, 4, 4, 20, 40, 3, False, False),  # no multiple of eight columns
    (2, 1, 4, 1, 128, 4096, 4000, True, False),
    (1, 130, 8, 2, 128, 512, 100, True, False),
    (1, 6, 4, 2, 8, 140, 0, False, True),
    (1, 3, 2, 1, 12, 8, 2, True, False),
    (1, 3, 4, 1, 1, 6, 1, True, False),
    (1, 40, 6, 3, 44, 500, 0, False, True),  # many rows with a mask, some of them in a vector that is not full
    (2, 12, 3, 1, 56, 200, 130, False, False),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_equals_custom_sdpa(kernels, shape):
    """In each version that this processor runs, and with the rows divided for several threads."""
    batch, rows, query_heads, heads, width, slots, start, causal, masked = shape
    query = torch.randn(batch, rows, query_heads, width)
    key, value = torch.randn(2, batch, slots, heads, width)
    mask = None
    if masked:
        mask = torch.where(torch.rand(rows, slots) < 0.4, 0.0, -math.inf)
        mask[:, 0] = 0
    expected = torch.ops.llama.custom_sdpa(query, key, value, start, mask, 0.0, causal, width**-0.5)
    for version in range(kernels.versions):
        for threads in (1, 3, 100):
            out = torch.full_like(query, math.nan)
            kernels.attend(out, query, key, value, start, mask, causal, width**-0.5, version, threads)
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("rows", [2, 12])
def test_a_row_that_sees_nothing_gets_zeros_and_large_scores_do_not_overflow(kernels, rows):
    query, key, value = torch.randn(1, rows, 2, 16) * 100, torch.randn(1, 300, 1, 16) * 100, torch.randn(1, 300, 1, 16)
    mask = torch.zeros(rows, 300)
    mask[1] = -math.inf
    scores = query[0, 0].double() @ key[0, :, 0].double().T
    expected = (scores.softmax(-1) @ value[0, :, 0].double()).float()
    for version in range(kernels.versions):
        out = torch.full_like(query, math.nan)
        kernels.attend(out, query, key, value, 0, mask, False, 1.0, version)
        torch.testing.assert_close(out[0, 0], expected, rtol=1e-4, atol=1e-5)
        assert not out[0, 1].any()


# batch, query heads, state heads, rows, keys, values, a decay for each channel
RULES = [
    (1, 4, 4, 8, 16, 24, False),
    (2, 6, 3, 5, 5, 6, True),
    (1, 32, 16, 4, 128, 128, False),
    (1, 2, 1, 1, 1, 1, True),
]


@pytest.mark.parametrize("shape", RULES)
def test_the_delta_rule_equals_gated_delta_rule(kernels, shape):
    batch, query_heads, heads, rows, keys, values, by_channel = shape
    query = torch.randn(batch, query_heads, rows, keys)
    key = torch.randn(batch, heads, rows, keys) / keys**0.5
    value, beta = torch.randn(batch, heads, rows, values), torch.rand(batch, heads, rows)
    decay = torch.rand(batch, heads, rows, *[keys] * by_channel)
    state = torch.randn(batch, heads, keys, values)
    expected = torch.ops.llama.gated_delta_rule(query, key, value, decay, beta, state)
    out, last = torch.full((batch, query_heads, rows, values), math.nan), state.clone()
    kernels.delta_rule(out, last, query, key, value, decay, beta)
    torch.testing.assert_close((out, last), expected, rtol=1e-4, atol=3e-5)
