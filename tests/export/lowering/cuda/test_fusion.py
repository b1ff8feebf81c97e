"""Inductor fuses independent kernels into one, which gives the eager numbers in Triton's interpreter."""

import re

import pytest
import torch
from cuda_lowered import function, lowered
from torch import nn
from triton_interpreter import interpreted

from eagle3.export.lowering.cuda.inductor.fusion import barriers_between_loops

ROWS, WIDTH = 4, 16


def normed(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Step(nn.Module):
    """A norm of queries, a norm of keys that are written to a cache, and a table of angles that both use."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(32, 2 * WIDTH))
        self.register_buffer("frequencies", torch.linspace(1, 2, WIDTH))

    def forward(self, query, key, at):
        self.cache.index_copy_(0, at, normed(key) + 1)
        cos = (at[:, None] * self.frequencies).cos()
        return normed(query), self.cache[:8] * 2, query[:, 1] * cos, key[:, :WIDTH] * cos


class Norms(nn.Module):
    """Norms of sums, whose rows of length ``LONG`` a kernel keeps in memory between two loops."""

    def forward(self, x, y):
        total = x + normed(y)
        again = total + normed(normed(total))
        return total, again, normed(again)


LONG = 3000


class OverRows(nn.Module):
    """Two independent counts over the rows of a chunk, like the counts of tokens per expert."""

    def forward(self, ones, others):
        return ones.sum(0), others.cumsum(0)


@pytest.mark.whole
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: nothing is substituted")
def test_independent_kernels_become_one_launch_with_the_same_numbers(tmp_path):
    torch.manual_seed(0)
    given = torch.randn(ROWS, 8, WIDTH), torch.randn(ROWS, 2 * WIDTH), torch.tensor([3, 4, 5, 9])
    called, graph = lowered(Step(), given)
    assert len(called) == 2 and "cache" in called[0][1], called
    assert sum(source.count("tl_math.cos(") for source in graph.sources.values()) == 1

    by_shape, eager = {tuple(x.shape): x for x in given}, Step()
    values = {name: torch.empty(*map(int, shape)) for name, shape in graph.buffers.items()}
    values |= {name: by_shape[shape] for name, shape in graph.inputs.items()}
    values |= {name: buffer.clone() for name, buffer in eager.named_buffers()}
    with interpreted():
        for name, places in called:
            arguments = [values[place] if isinstance(place, str) else int(place) for place in places]
            run = function(name, graph.sources[name], tmp_path)
            run[tuple(graph.grids[name])](*arguments, **graph.blocks[name])
    for found, expected in zip((values[name] for name in graph.outputs), eager(*given), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.whole
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: nothing is substituted")
def test_a_reduction_over_the_rows_of_a_chunk_is_a_launch_of_its_own():
    """Inductor refuses some reductions among combined kernels, so that no target with fused experts could be
    lowered."""
    rows = {0: torch.export.Dim("rows", min=2, max=64)}
    called, _ = lowered(OverRows(), (torch.ones(9, 8), torch.ones(9, 8)), dynamic_shapes=(rows, rows))
    assert len(called) == 2


def met(source: str) -> int:
    """Return the number of loads of earlier stores without a barrier between them."""
    stored, count = set(), 0
    for line in source.splitlines():
        if "tl.debug_barrier()" in line:
            stored.clear()
        count += any(pointer in stored for pointer in re.findall(r"tl\.load\((\w+)", line))
        stored.update(re.findall(r"tl\.store\((\w+)", line))
    return count


@pytest.mark.whole
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: nothing is substituted")
def test_a_barrier_separates_a_storing_loop_from_a_loop_that_loads_the_same_memory():
    given = torch.randn(ROWS, LONG), torch.randn(ROWS, LONG)
    _, plain = lowered(Norms(), given)
    assert sum(map(met, plain.sources.values())) > 0, "Inductor does without: so can this package"
    with barriers_between_loops():
        _, ours = lowered(Norms(), given)
    assert sum(map(met, ours.sources.values())) == 0
    assert plain.sources.keys() == ours.sources.keys()
