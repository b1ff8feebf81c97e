"""A kernel that norms rows loads each row once, and gives the eager numbers in Triton's interpreter."""

import re

import pytest
import torch
from cuda_lowered import function, lowered
from torch import nn
from triton_interpreter import interpreted

from eagle3.export.lowering.cuda.inductor.fusion import rows_in_registers

pytestmark = [
    pytest.mark.whole,
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: nothing is substituted"),
]
WIDE = 5376
"""The width of Gemma 4 31B."""


class BetweenLayers(nn.Module):
    """Computes what Gemma does between two linears: a norm, the sum with the residual, the norm of that."""

    def __init__(self, width: int):
        super().__init__()
        self.register_buffer("after", torch.linspace(0.5, 1.5, width))
        self.register_buffer("before", torch.linspace(-1.5, 1.5, width))

    def forward(self, output, residual):
        total = residual + normed(output) * self.after
        return total, normed(total) * self.before


def normed(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def given(width):
    torch.manual_seed(0)
    return torch.randn(2, width), torch.randn(2, width)


def most_loads(source: str) -> int:
    """Return the largest number of loads of one argument in a kernel's source."""
    pointers = re.findall(r"tl\.load\((\w+)", source)
    return max(map(pointers.count, pointers))


def test_a_row_is_loaded_once_and_the_numbers_are_the_eager_ones(tmp_path):
    module, inputs = BetweenLayers(WIDE), given(WIDE)
    called, plain = lowered(module, inputs)
    assert max(map(most_loads, plain.sources.values())) > 1, "Inductor loads a row once: so can this package"
    with rows_in_registers():
        ((name, places),), graph = lowered(module, inputs)
    assert len(called) == 1  # the two norms and the sum were one launch before, too
    assert most_loads(graph.sources[name]) == 1 and " for " not in graph.sources[name]

    eager = module(*inputs)
    values = dict(zip(graph.inputs, inputs, strict=True)) | dict(module.named_buffers())
    values |= {made: torch.empty_like(out) for made, out in zip(graph.outputs, eager, strict=True)}
    with interpreted():
        arguments = [values[place] if isinstance(place, str) and place in values else int(place) for place in places]
        function(name, graph.sources[name], tmp_path)[tuple(graph.grids[name])](*arguments, **graph.blocks[name])
    for made, expected in zip(graph.outputs, eager, strict=True):
        torch.testing.assert_close(values[made], expected)


def test_a_sum_of_elements_that_lie_apart_stays_in_a_loop():
    with rows_in_registers():
        _, graph = lowered(Columns(), (torch.randn(100, 1 << 16),))
    (source,) = graph.sources.values()
    assert "for r0_offset" in source


class Columns(nn.Module):
    """Sums over the rows of a matrix, whose elements lie apart in memory."""

    def forward(self, x):
        return x.sum(0)
