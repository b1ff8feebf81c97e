"""CUDA's attention pads and tiles verify windows: the numbers are those of the eager attention, at every length."""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

from eagle3.export.lowering.cuda.attention import BoundedAttention
from eagle3.export.lowering.cuda.backend import ranges
from eagle3.targets.attention import EagerAttention, KVCacheShape, causal_mask

SLOTS, HEADS, DIM = 300, 4, 16  # enough slots for the op's split-K path


def sdpa(query, keys, values, mask, dropout, causal, scale, gqa, written):
    """``triton::sdpa`` as documented: a row that attends to nothing is zero, slots from ``written`` on are not read."""
    assert (dropout, causal, gqa) == (0.0, False, True)
    mask = mask & (torch.arange(keys.shape[2]) < written)
    out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
    return torch.where(mask.any(-1, keepdim=True), out, 0.0)


class Attend(nn.Module):
    def __init__(self, attention, window: int, softcap: float | None = None, sinks: Tensor | None = None):
        super().__init__()
        self.window, self.softcap, self.sinks = window, softcap, sinks
        self.attention = attention(KVCacheShape(2, DIM, SLOTS, window, sinks=sinks is not None))

    def forward(self, query, key, value, input_pos):
        if self.window:
            slots = torch.arange(2 * self.window)
            last = input_pos[-1]
            position = last - (last - slots) % (2 * self.window)
            delta = input_pos[:, None] - position[None]
            mask = ((position >= 0) & (delta >= 0) & (delta < self.window))[None, None]
        else:
            mask = causal_mask(input_pos, SLOTS)
        rows = self.attention.rows(input_pos, mask)
        return self.attention(query, key, value, rows, 0.25, softcap=self.softcap, sinks=self.sinks)


def inputs(first: int, rows: int):
    torch.manual_seed(first + rows)
    heads = (HEADS, 2, 2)
    return *(torch.randn(1, rows, count, DIM) for count in heads), torch.arange(first, first + rows)


SINKS = torch.tensor([0.5, -2.0, 3.0, 1.0])


@pytest.mark.parametrize(
    ("window", "softcap", "sinks"),
    [(0, None, None), (16, None, None), (0, None, SINKS), (16, None, SINKS), (16, 2.0, None), (0, 2.0, SINKS)],
)
def test_it_equals_eager_attention_at_every_length_of_a_window_and_beyond(window, softcap, sinks):
    eager, bounded = (Attend(kind, window, softcap, sinks) for kind in (EagerAttention, BoundedAttention))
    first = 0
    with patch.object(torch.ops.triton, "sdpa", sdpa):
        for rows in (*range(1, 17), 5, 2, 16):
            given = inputs(first, rows)
            torch.testing.assert_close(bounded(*given), eager(*given))
            first += rows - (rows // 2)  # some rows are written again


@pytest.mark.parametrize(
    ("shortest", "longest", "rows_of_calls"),
    [(1, 1, [1]), (2, 4, [4]), (2, 8, [4, 4]), (2, 10, [4, 4, 4]), (9, 64, ["dynamic"]), (1, 64, ["dynamic"])],
)
def test_the_op_gets_static_tiles_in_a_window_and_never_narrows_the_lengths(shortest, longest, rows_of_calls):
    rows = Dim("rows", min=shortest, max=longest) if shortest < longest else None
    dynamic = ({1: rows}, {1: rows}, {1: rows}, {0: rows}) if rows else None
    module = Attend(BoundedAttention, 0).to(torch.bfloat16)
    given = [x.to(torch.bfloat16) if x.is_floating_point() else x for x in inputs(0, longest - 1 | 1)]
    program = torch.export.export(module, tuple(given), dynamic_shapes=dynamic, strict=False)
    calls = [node for node in program.graph.nodes if node.target is torch.ops.triton.sdpa.default]
    lengths = [call.args[0].meta["val"].shape[2] for call in calls]
    assert [size if isinstance(size, int) else "dynamic" for size in lengths] == rows_of_calls
    before = ranges(program)
    for size in lengths:  # what the op's dispatch asks, at its lowering
        assert bool(size == 1) == (longest == 1)
        assert bool(size <= 4) == (longest <= 16)
    assert ranges(program) == before
