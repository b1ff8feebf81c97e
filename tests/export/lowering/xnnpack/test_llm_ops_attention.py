"""Lowered CPU attention equals the eager reference, with softcaps, sinks, ring buffers and positions written again."""

from unittest.mock import patch

import pytest
import torch
from executorch.runtime import Runtime
from torch import nn
from torch.export import Dim

from eagle3.export.lowering.xnnpack import full_attention
from eagle3.export.lowering.xnnpack.full_attention import cpu_attention
from eagle3.export.lowering.xnnpack.llm_ops_attention import heads_as_rows, heads_together, repeated_rows, rows_as_heads
from eagle3.export.lowering.xnnpack.lowering import lower
from eagle3.targets.attention import Block, EagerAttention, KVCacheShape

KV_HEADS, DIM, SLOTS = 2, 16, 48
SCALE = 0.3
STEP = 16
"""Slots of a cache that are added at once to those that products read."""


@pytest.fixture(autouse=True, scope="module")
def products_of_small_caches():
    with patch.multiple(full_attention, LEAST_BYTES=0, STEP=STEP):
        yield


class Layer(nn.Module):
    def __init__(self, kind, heads: int, window: int, chunked: bool, softcap: float | None, sinks: bool):
        super().__init__()
        self.attention = kind(KVCacheShape(KV_HEADS, DIM, SLOTS, window, sinks=sinks, chunked=chunked, heads=heads))
        self.softcap = softcap
        self.sinks = nn.Parameter(torch.linspace(-2, 3, heads), requires_grad=False) if sinks else None

    def forward(self, query, key, value, input_pos):
        rows = self.attention.rows(input_pos)
        return self.attention(query, key, value, rows, SCALE, softcap=self.softcap, sinks=self.sinks)


def inputs(heads: int, start: int, length: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, length, count, DIM) for count in (heads, KV_HEADS, KV_HEADS)]
    return *(torch.randn(shape, generator=generator) for shape in shapes), torch.arange(start, start + length)


def lowered(layer: nn.Module, example, dynamic, file):
    program = torch.export.export(layer, example, dynamic_shapes=dynamic, strict=False)
    file.write_bytes(lower({"forward": program}, {}).buffer)
    return Runtime.get().load_program(file).load_method("forward")


KINDS = [(0, False, None, False), (0, False, None, True), (8, False, None, True)]
"""window, chunked, softcap, sinks"""
# 4: two query heads for each key head; 16: eight, of which four become rows in a layer with a ring.
CASES = [
    (KINDS[0], 4),
    (KINDS[2], 16),
    ((0, False, 2.0, False), 16),
    (KINDS[0], 16),
    (KINDS[1], 4),
    ((8, True, 2.0, True), 4),
]


@pytest.mark.first(3)  # neither, the sinks of a ring, and a softcap
@pytest.mark.parametrize(("kind", "heads"), CASES)
def test_lowered_softcaps_and_sinks_equal_the_eager_reference(kind, heads, tmp_path):
    rows = Dim("rows", min=1, max=8)
    dynamic = ({1: rows}, {1: rows}, {1: rows}, {0: rows})
    layer = Layer(cpu_attention, heads, *kind)
    method = lowered(layer, inputs(heads, 0, 5, 0), dynamic, tmp_path / "layer.pte")
    eager = Layer(EagerAttention, heads, *kind)
    # The rows from 26 on are rejected and written again.
    walk = [(0, 8), (8, 8), (16, 1), (17, 8), (25, 4), (26, 2), (28, 8), (36, 8)]
    for seed, (start, length) in enumerate(walk):
        given = inputs(heads, start, length, seed)
        torch.testing.assert_close(method.execute(given)[0], eager(*given), atol=1e-5, rtol=1e-5)


@pytest.mark.first(1)
@pytest.mark.parametrize(("kind", "heads"), CASES[::3])
def test_lowered_attention_is_right_for_single_rows_from_the_first_position_on(kind, heads, tmp_path):
    method = lowered(Layer(cpu_attention, heads, *kind), inputs(heads, 0, 1, 0), None, tmp_path / "layer.pte")
    eager = Layer(EagerAttention, heads, *kind)
    for position in range(SLOTS):
        given = inputs(heads, position, 1, position)
        torch.testing.assert_close(method.execute(given)[0], eager(*given), atol=1e-5, rtol=1e-5)


METHODS = {"row": (1, 1), "window": (2, 8), "chunk": (9, 20)}
"""The fewest and the most rows."""


@pytest.fixture(scope="module")
def three_methods(tmp_path_factory):
    """One full-attention layer as three methods that share one cache."""
    layer, programs = Layer(cpu_attention, 16, 0, False, None, False), {}
    for name, (fewest, most) in METHODS.items():
        rows = Dim("rows", min=fewest, max=most) if fewest < most else None
        dynamic = ({1: rows}, {1: rows}, {1: rows}, {0: rows}) if rows else None
        programs[name] = torch.export.export(layer, inputs(16, 0, fewest, 0), dynamic_shapes=dynamic, strict=False)
    file = tmp_path_factory.mktemp("three") / "layer.pte"
    file.write_bytes(lower(programs, {}).buffer)
    return file


WALKS = [
    [(0, 9), (9, 8), (12, 1), (13, 3), (13, 8), (14, 9), (20, 2), (22, 20), (40, 8)],
    [(0, 8), (3, 8), (11, 1), (10, 12), (12, 7), (19, 8), (20, 1), (21, 20), (41, 7)],
    [(0, 1), (1, 20), (15, 4), (19, 4), (20, 9), (20, 8), (28, 1), (29, 2), (30, 18)],
]


@pytest.mark.parametrize("walk", WALKS, ids=["a chunk first", "a window first", "a row first"])
def test_windows_and_chunks_and_single_rows_share_a_cache(walk, three_methods):
    """Scores are large, so that a row that attends to a later row, or to an older window's, would be far off."""
    program, eager = Runtime.get().load_program(three_methods), Layer(EagerAttention, 16, 0, False, None, False)
    methods = {name: program.load_method(name) for name in METHODS}
    for seed, (start, length) in enumerate(walk):
        (name,) = (name for name, (fewest, most) in METHODS.items() if fewest <= length <= most)
        query, key, value, positions = inputs(16, start, length, seed)
        given = query * 3, key * 3, value, positions
        torch.testing.assert_close(methods[name].execute(given)[0], eager(*given), atol=1e-5, rtol=1e-5)


def operators(length: int, softcap: float | None = None, kv_heads: int = KV_HEADS) -> set[str]:
    """Return the attention operators with which a layer with full attention computes ``length`` rows."""
    layer = Layer(cpu_attention, 16, 0, False, softcap, False)
    layer.attention = cpu_attention(KVCacheShape(kv_heads, DIM, SLOTS, heads=16))
    query, _, _, positions = inputs(16, 0, length, 0)
    given = query, *(torch.randn(1, length, kv_heads, DIM) for _ in range(2)), positions
    targets = {str(node.target) for node in torch.export.export(layer, given, strict=False).graph.nodes}
    return {name for name in ("custom_sdpa", "used_slots") if any(name in target for target in targets)}


def test_verify_windows_are_products_and_single_rows_and_chunks_use_the_llm_ops():
    ways = [operators(length) for length in (1, 2, 16, 17)]
    assert ways == [{"custom_sdpa"}, {"used_slots"}, {"used_slots"}, {"custom_sdpa"}]
    assert operators(1, softcap=2.0) == {"used_slots"}
    with patch.object(full_attention, "LEAST_BYTES", 2 * 4 * KV_HEADS * DIM * SLOTS + 1):
        assert operators(2) == {"custom_sdpa"}


def test_a_cache_that_fits_into_the_processors_caches_uses_only_the_llm_ops(tmp_path):
    with patch.object(full_attention, "LEAST_BYTES", 2**20):
        layer, eager = (Layer(kind, 16, 0, False, None, False) for kind in (cpu_attention, EagerAttention))
        rows = Dim("rows", min=2, max=8)
        dynamic = ({1: rows}, {1: rows}, {1: rows}, {0: rows})
        method = lowered(layer, inputs(16, 0, 5, 0), dynamic, tmp_path / "layer.pte")
    for seed, (start, length) in enumerate([(0, 8), (8, 2), (9, 5), (14, 8), (40, 8)]):
        given = inputs(16, start, length, seed)
        torch.testing.assert_close(method.execute(given)[0], eager(*given), atol=1e-5, rtol=1e-5)


@pytest.mark.whole
def test_values_in_a_kv_cache_take_no_planned_memory_of_their_own(tmp_path):
    """A program with a cache a hundred times as long plans the same memory for everything else."""
    planned_bytes = []
    for slots in (SLOTS, 100 * SLOTS):
        layer = Layer(cpu_attention, 4, 0, False, None, False)
        layer.attention = cpu_attention(KVCacheShape(KV_HEADS, DIM, slots, heads=4))
        program = torch.export.export(layer, inputs(4, 0, 2, 0), strict=False)
        (plan,) = lower({"forward": program}, {}).executorch_program.execution_plan
        planned_bytes.append(plan.non_const_buffer_sizes)
    (_, few, caches), (_, more, longer) = planned_bytes
    assert (caches, longer) == tuple(2 * 4 * KV_HEADS * DIM * slots for slots in (SLOTS, 100 * SLOTS))
    assert more - few <= 32 * 99 * SLOTS  # the mask of two rows and its operands; a slot of a cache has 256 bytes


BLOCKS = [
    (4, 0, Block()),
    (16, 0, Block(causal=True)),
    (16, 12, Block(6, from_first_row=True)),
    (4, 12, Block(7, causal=True)),
]
"""The query heads, the window of a ring that holds what a block of 5 rows attends to, and the block."""


class Drafting(nn.Module):
    """Writes rows, and lets a block after them attend to the written rows and to itself."""

    def __init__(self, kind, heads: int, window: int, block: Block):
        super().__init__()
        self.attention, self.block = kind(KVCacheShape(KV_HEADS, DIM, SLOTS, window, heads=heads)), block

    def forward(self, key, value, input_pos, query, block_key, block_value):
        self.attention.write(key, value, self.attention.rows(input_pos))
        positions = input_pos[-1:] + torch.arange(1, query.shape[1] + 1)
        return self.attention(query, block_key, block_value, self.attention.rows(positions, self.block), SCALE)


def drafted(heads: int, start: int, length: int, seed: int):
    _, key, value, positions = inputs(heads, start, length, seed)
    return key, value, positions, *inputs(heads, 0, 5, seed + 99)[:3]


@pytest.mark.whole
@pytest.mark.parametrize(("heads", "window", "block"), BLOCKS)
def test_a_block_attends_as_the_eager_reference_does(heads, window, block, tmp_path):
    """The block follows rows that were written, and rows written again over the previous block."""
    rows = Dim("rows", min=1, max=8)
    dynamic = ({1: rows}, {1: rows}, {0: rows}, None, None, None)
    layer = Drafting(cpu_attention, heads, window, block)
    method = lowered(layer, drafted(heads, 0, 3, 0), dynamic, tmp_path / "layer.pte")
    eager, written = Drafting(EagerAttention, heads, window, block), {}
    for seed, (start, length) in enumerate([(0, 8), (8, 1), (9, 5), (11, 8), (19, 7), (24, 2), (26, 8), (34, 8)]):
        given = drafted(heads, start, length, seed)
        found = method.execute(given)[0]
        torch.testing.assert_close(found, eager(*given), atol=1e-5, rtol=1e-5)
        positions = given[2]
        key, value, query, block_key, block_value = (given[index][0] for index in (0, 1, 3, 4, 5))
        written |= {int(at): (key[row], value[row]) for row, at in enumerate(positions)}
        here = written | {start + length + row: (block_key[row], block_value[row]) for row in range(5)}
        for row in range(5):
            at, first_row = start + length + row, start + length
            low = 0 if block.before is None else (first_row if block.from_first_row else at) - block.before
            seen = [p for p in here if low <= p <= (at if block.causal else first_row + 4)]
            keys, values = (
                torch.stack([here[p][part] for p in seen]).repeat_interleave(heads // 2, 1) for part in (0, 1)
            )
            weights = (torch.einsum("hd,shd->hs", query[row], keys) * SCALE).softmax(-1)
            expected = torch.einsum("hs,shd->hd", weights, values)
            torch.testing.assert_close(found[0, row], expected, atol=1e-5, rtol=1e-5)


def test_heads_that_share_keys_are_computed_as_rows():
    query = torch.arange(24).reshape(1, 2, 4, 3)  # 2 rows of 4 heads, of which 0, 1 and 2, 3 share keys
    stacked = heads_as_rows(query, 2)
    assert stacked[0, :, 0].tolist() == [query[0, t, h].tolist() for t in range(2) for h in (0, 1)]
    assert stacked[0, :, 1].tolist() == [query[0, t, h].tolist() for t in range(2) for h in (2, 3)]
    assert torch.equal(rows_as_heads(stacked, 2), query)
    assert repeated_rows(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 2).tolist() == [[1, 2], [1, 2], [3, 4], [3, 4]]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "together"),
    [(32, 8, 4), (64, 8, 8), (8, 4, 2), (4, 2, 1), (4, 1, 1), (16, 2, 4), (14, 2, 1), (8, 8, 1), (71, 1, 1)],
)
def test_merging_heads_into_rows_leaves_at_least_four_heads(heads, kv_heads, together):
    assert heads_together(heads, kv_heads) == together
