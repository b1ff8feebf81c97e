"""The kernels of the gated delta rule, run by the interpreter, give the numbers of float64. A window has the bits of
single rows. Each fault put in by hand is found, and the compiled code is checked."""

import random
from contextlib import contextmanager

import pytest
import torch
from cuda_lowered import lowered
from kernel_faults import fault
from kernel_usage import usage
from torch import Tensor, nn
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
from triton_interpreter import interpreted

from eagle3.export.lowering.cuda.graph.recurrent import (
    CudaGatedDeltaState,
    CudaRecurrentPositions,
    use_cuda_recurrence,
)
from eagle3.export.lowering.cuda.kernels import advance
from eagle3.export.lowering.cuda.kernels import delta_rule as kernels
from eagle3.targets.gated_delta import GatedDeltaState, _unit
from eagle3.targets.recurrent import RecurrentPositions
from eagle3.targets.spec import ROLLBACK_ROWS

pytestmark = pytest.mark.races(())  # tests/export/lowering/cuda/test_kernel_races.py
KEY_HEADS, HEADS, D_K, D_V = 2, 4, 24, 24  # no power of 2, and more columns than a program has
CLOSE = 5e-6
"""The largest difference from float64, in standard deviations of the outputs."""


class Layer:
    """The memory of a layer, which is NaN where nothing was written, and the calls of a runner."""

    def __init__(self):
        size = HEADS, D_K, D_V
        self.state, self.saved = torch.full(size, torch.nan), torch.full(size, torch.nan)
        self.changes = torch.full((1, kernels.SLOTS, 1, KEY_HEADS * D_K + HEADS * D_V + HEADS), torch.nan)
        self.committed, self.position_saved = 0, 0

    def __call__(self, rows: list[Tensor], first: int) -> Tensor:
        """Run rows as the runner's ``RecurrentPositions`` does: [value heads, T, d_v]."""
        count, out = rows[1].shape[1], torch.full((HEADS, rows[1].shape[1], D_V), torch.nan)
        chunk = count > ROLLBACK_ROWS
        from_saved = chunk and 0 < first == self.position_saved < self.committed
        committed = self.position_saved if from_saved else self.committed
        at = torch.tensor([first]), torch.tensor([committed])
        if chunk:
            given = *rows, self.state, self.saved, self.changes, *at, torch.tensor([from_saved]), out
            kernels.launch_chunk((kernels._delta_chunk_kernel, kernels._delta_rows_kernel), *given)
            self.committed = self.position_saved = first + count - ROLLBACK_ROWS
        else:
            kernels.launch_rows(kernels._delta_rows_kernel, *rows, self.state, self.changes, *at, out)
            self.committed = first
        return out


def random_rows(count: int, seed: int) -> list[Tensor]:
    """Return query, key, value, decay and beta of ``count`` rows. Every fifth key equals the one before it."""
    generator = torch.Generator().manual_seed(seed)

    def normal(heads: int, width: int) -> Tensor:
        return torch.randn(heads, count, width, generator=generator)

    query, key = (_unit(normal(KEY_HEADS, D_K)) for _ in range(2))
    key[:, 4::5] = key[:, 3::5][:, : key[:, 4::5].shape[1]]
    decay, beta = (torch.rand(HEADS, count, generator=generator) for _ in range(2))
    return [query, key, normal(HEADS, D_V), -decay, beta]


def part(rows: list[Tensor], start: int, end: int) -> list[Tensor]:
    return [each[:, start:end].contiguous() for each in rows]


def expected(rows: list[Tensor]) -> Tensor:
    """Compute all rows from an empty state, one after the other, in float64, by the rule's definition."""
    query, key, value, decay, beta = (each.double() for each in rows)
    query, key = (each.repeat_interleave(HEADS // KEY_HEADS, 0) for each in (query, key))
    state, outs = torch.zeros(HEADS, D_K, D_V).double(), []
    for t in range(key.shape[1]):
        state = state * decay[:, t, None, None].exp()
        update = beta[:, t, None] * (value[:, t] - torch.einsum("hkv,hk->hv", state, key[:, t]))
        state = state + torch.einsum("hk,hv->hkv", key[:, t], update)
        outs.append(torch.einsum("hkv,hk->hv", state, query[:, t]))
    return torch.stack(outs, 1)


def assert_close(found: Tensor, right: Tensor) -> None:
    gap = (found - right).abs().amax() / right.std()
    assert float(gap.nan_to_num(nan=torch.inf)) < CLOSE


def walk(seed: int = 0, windows: int = 4) -> tuple[Tensor, Tensor]:
    """Make the calls of a runner: a prompt in two chunks, windows that are accepted in part, a chunk, single rows,
    another prompt that continues from the saved state, and another conversation.

    Returns the outputs of right rows, and those of float64.
    """
    layer, dice, found, right = Layer(), random.Random(seed), [], []

    def call(text: list[Tensor], start: int, end: int, wrong: int = 0) -> None:
        rows = zip(part(text, start, end), random_rows(wrong, start), strict=True)
        found.append(layer([torch.cat(pair, 1) for pair in rows], start)[:, : end - start])
        right.append(expected(part(text, 0, end))[:, start:])

    text = random_rows(130, seed)
    call(text, 0, 18)
    call(text, 18, 53)  # a block of rows and a part of one, and the rows that can be rejected
    at = 53
    for _ in range(windows):
        good = dice.randrange(1, 9)
        call(text, at, at + good, dice.randrange(0, ROLLBACK_ROWS - good + 1))
        at += dice.randrange(0, good + 1)
    call(text, at, at + 25)
    saved = at + 25 - ROLLBACK_ROWS
    call(text, at + 25, at + 26, 3)
    call(text, at + 26, at + 27)
    other = [torch.cat(pair, 1) for pair in zip(part(text, 0, saved), random_rows(30, seed + 1), strict=True)]
    call(other, saved, saved + 19)
    call(other, saved + 19, saved + 21)
    text = random_rows(20, seed + 2)
    call(text, 0, 3, 2)
    call(text, 3, 5)
    return torch.cat(found, 1), torch.cat(right, 1)


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """A chunk's program has half as many columns, so that there are two for each head."""
    monkeypatch.setattr(kernels, "CHUNK_COLUMNS", 16)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.whole)])
def test_every_call_of_a_runner_gives_the_outputs_of_float64(seed):
    with interpreted(kernels):
        found, right = walk(seed)
    assert_close(found, right)


def test_a_window_gives_the_bits_of_single_rows_however_many_are_accepted():
    text, dice, at = random_rows(30, 5), random.Random(5), 0
    with interpreted(kernels):
        alone, layer = Layer(), Layer()
        single = torch.cat([alone(part(text, row, row + 1), row) for row in range(30)], 1)
        while at < 30:
            good = min(dice.randrange(1, 9), 30 - at)
            rows = zip(part(text, at, at + good), random_rows(dice.randrange(0, 8), at), strict=True)
            out = layer([torch.cat(pair, 1) for pair in rows], at)
            assert torch.equal(out[:, :good], single[:, at : at + good])
            at += dice.randrange(1, good + 1)
        layer(random_rows(1, 9), 30)
        alone(random_rows(1, 9), 30)
    assert torch.equal(layer.state, alone.state)


@pytest.mark.parametrize("count", [ROLLBACK_ROWS + 2, 3 * ROLLBACK_ROWS])
def test_chunks_of_any_length_commit_all_but_the_last_rows(count):
    text = random_rows(count + 1, count)
    with interpreted(kernels):
        layer = Layer()
        out = layer(part(text, 0, count), 0)
        assert_close(out, expected(part(text, 0, count)))
        assert torch.equal(layer.state, layer.saved)
        out = layer(part(text, count, count + 1), count)
    assert_close(out, expected(text)[:, -1:])


class Mixer:
    num_k_heads, num_v_heads, head_k_dim, head_v_dim = KEY_HEADS, HEADS, D_K, D_V
    conv1d = nn.Conv1d(2 * KEY_HEADS * D_K + HEADS * D_V, 1, 4)
    conv1d.weight = nn.Parameter(conv1d.weight.transpose(0, 1))


def test_the_operators_on_the_host_equal_the_eager_state():
    """The calls are those of ``RecurrentPositions``: chunks, windows, the saved state, and a position that has none."""
    eager, ours, places = GatedDeltaState(Mixer()), GatedDeltaState(Mixer()), RecurrentPositions()
    ours.__class__ = CudaGatedDeltaState
    ours.changes = type(eager.changes)(kernels.SLOTS, sum(ours.parts))
    for seed, (first, count) in enumerate([(0, 40), (40, 5), (42, 16), (50, 30), (64, 20), (84, 1), (68, 20), (0, 4)]):
        rows, at = random_rows(count, seed), places.rows(torch.arange(first, first + count))
        found, right = ours(tuple(rows), at), eager(tuple(rows), at)
        assert places.advance(at).item()
        torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(ours.state, eager.state, atol=1e-5, rtol=1e-4)


class Lowered(nn.Module):
    """A layer's state and rings, without its linears and the products of its convolution."""

    def __init__(self):
        super().__init__()
        self.state, self.places = GatedDeltaState(Mixer()), RecurrentPositions()
        use_cuda_recurrence(self)

    def forward(self, mixed: Tensor, decay: Tensor, beta: Tensor, input_pos: Tensor) -> Tensor:
        rows = self.places.rows(input_pos)
        mixed = self.state.with_earlier(mixed, rows)[0, :, :-3].T
        parts = mixed.split((KEY_HEADS * D_K, KEY_HEADS * D_K, HEADS * D_V), -1)
        query, key, value = (each.unflatten(-1, (-1, D_K)).transpose(0, 1) for each in parts)
        return self.state((_unit(query), _unit(key), value, decay, beta), rows) + self.places.advance(rows)


def test_a_lowered_layer_writes_its_state_and_its_rings_in_place():
    channels, at = 2 * KEY_HEADS * D_K + HEADS * D_V, torch.arange(4)
    with torch.no_grad():
        called, graph = lowered(Lowered(), (torch.randn(1, channels, 4), -torch.rand(4, 4), torch.rand(4, 4), at))
    (rows,) = (entry for entry in graph.launches if entry["kernel"].startswith("_delta_rows_kernel"))
    (arguments,) = (given for name, given in called if name == rows["kernel"])
    assert {"state_state", "state_changes_rows"} <= set(arguments)  # the buffers themselves
    width = KEY_HEADS * D_K + HEADS * D_V + HEADS
    assert rows["state_bytes"] == 4 * (2 * HEADS * D_K * D_V + 2 * 4 * width)
    assert sum(entry["count"] for entry in graph.launches if entry["kernel"].startswith("_advance_kernel")) == 1
    ring = 4 * channels * (ROLLBACK_ROWS + 3)
    assert all(size < ring for entry in graph.launches for size in entry["buffer_bytes"])


CALLS = [(0, 4), (4, 16), (21, 4), (3, 4), (0, 40), (24, 20), (27, 3), (28, 30), (12, 20), (28, 20), (27, 20)]
"""First positions and numbers of rows, of calls that can be computed and of some that cannot."""


def test_the_committed_positions_are_those_of_the_eager_target():
    eager, ours = RecurrentPositions(), CudaRecurrentPositions()
    kept, valid = (torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)), torch.empty(1).long()
    could = []
    for first, count in CALLS:
        at = torch.arange(first, first + count)
        rows, same = eager.rows(at), ours.rows(at)
        with interpreted(advance):
            advance.launch(advance._advance_kernel, at, *kept, rows.from_saved, valid)
        could.append(bool(eager.advance(rows)))
        assert could[-1] == bool(ours.advance(same)) == bool(valid)
        for name, own in zip(("committed", "saved"), kept, strict=True):
            assert getattr(eager, name) == getattr(ours, name) == own
    assert 2 < sum(could) < len(CALLS) - 2


@contextmanager
def terms_of_tf32(terms: int):
    """Make the interpreter multiply float32 as the tensor cores do: in TF32, with one term or with three."""
    dot = InterpreterBuilder.create_dot

    def rounded(x: Tensor) -> Tensor:
        return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    def multiply(self, a, b, d, *rest):
        big, small = [], []
        for each in (a, b):
            x = torch.from_numpy(each.data.copy())
            big.append(rounded(x))
            small.append(rounded(x - big[-1]))
        pairs = [(big[0], big[1]), (small[0], big[1]), (big[0], small[1])][:terms]
        total = d.data
        for left, right in reversed(pairs):
            total = total + (left @ right).numpy()
        return TensorHandle(total, d.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", multiply)
        yield
    assert InterpreterBuilder.create_dot is dot


@pytest.mark.parametrize(("terms", "bound"), [(3, CLOSE), (1, 1e-2)])
def test_products_of_three_tf32_terms_are_as_accurate_as_float32(terms, bound):
    """With one term, the difference is a thousand times as large."""
    text = random_rows(70, 7)
    with interpreted(kernels), terms_of_tf32(terms):
        found = Layer()(text, 0)
    gap = float((found - expected(text)).abs().amax() / expected(text).std())
    assert gap < bound and (terms == 3 or gap > 100 * CLOSE)


AFTER = "        change = CHANGES + (first + row) % SLOTS * WIDTH\n"
FAULTS = {
    "a change is committed a row short": ("tl.range(begin, first, num", "tl.range(begin, first - 1, num"),
    "a change is committed twice": ("(committed, first - SLOTS // 2)", "(committed - 1, first - SLOTS // 2)"),
    "a slot is read a row late": ("CHANGES + position % SLOTS", "CHANGES + (position + 1) % SLOTS"),
    "the decay comes after the update": (
        "        state * tl.exp(decay),\n    )\n", "        state,\n    ) * tl.exp(decay)\n",
    ),
    "the update ignores the decay": ("tl.sum(state * tl.exp(decay) * key", "tl.sum(state * key"),
    "keys of another head": ("KEY + (key_head * rows + row)", "KEY + (head % KEY_HEADS * rows + row)"),
    "keys of another head in a chunk": (
        "        keys = (key_head * rows", "        keys = (head % KEY_HEADS * rows",
    ),
    "a ring of half the slots": (AFTER, AFTER.replace("SLOTS", "(SLOTS // 2)")),
    "beta is left out": (" * key[:, None], 0)) * beta\n", " * key[:, None], 0))\n"),
    "the state of an earlier text is read": ("mask=in_tile & (first + begin > 0)", "mask=in_tile"),
    "the ring has the factor for its logarithm": ("D_V + head, decay, mask", "D_V + head, tl.exp(decay), mask"),
    "the rows change the state in memory": (AFTER, AFTER + "        tl.store(tile, state, mask=in_tile)\n"),
    "the last rows of a chunk commit again": ("tl.where(begin > 0, first, committed)", "committed"),
    "a masked row changes the state": ("        here = at < count\n", "        here = at < count + 1\n"),
    "a chunk leaves its last block out": ("tl.range(0, count, BLOCK)", "tl.range(0, count - BLOCK, BLOCK)"),
    "a chunk ignores the saved state": ("(first > 0) & saved, other", "(first > 0) & (saved == 0), other"),
    "a chunk saves nothing": ("    tl.store(SAVED + place, state, mask=in_tile)\n", ""),
    "the inverse lacks a doubling": ("tl.static_range(1, DOUBLINGS)", "tl.static_range(1, DOUBLINGS - 1)"),
    "a row of a block does not see itself": ("        lower = row >= column\n", "        lower = row > column\n"),
    "the updates of a block decay too little": ("update * tl.exp(whole - until)", "update * tl.exp(-until)"),
    "the state of a block does not decay": ("state * tl.exp(whole) + tl.dot", "state + tl.dot"),
}  # fmt: skip


@pytest.mark.first(2)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_by_the_calls_of_a_runner(name, tmp_path):
    with fault(tmp_path, kernels, *FAULTS[name]), interpreted(kernels):
        found, right = walk(windows=1)
    with pytest.raises(AssertionError):
        assert_close(found, right)


QWEN35_27B = {"KEY_HEADS": 16, "HEADS": 48, "D_K": 128, "D_V": 128, "BLOCK_K": 128, "SLOTS": kernels.SLOTS}
QWEN35_27B["WIDTH"] = 16 * 128 + 48 * 128 + 48
POINTERS = ["*fp32"] * 5


@pytest.mark.first(1)
@pytest.mark.parametrize("arch", [90, 80, 86, 89, 100, 120])
def test_the_kernels_spill_nothing_in_the_sizes_of_qwen35_27b(arch, tmp_path):
    types = [*POINTERS, "*fp32", "*fp32", "*i64", "*i64", "*fp32", "i32", "i32"]
    constants = QWEN35_27B | {"COLUMNS": kernels.ROW_COLUMNS}
    rows = usage(kernels._delta_rows_kernel, types, constants, arch, tmp_path, kernels.ROW_WARPS)
    assert rows.stack == 0 and rows.registers <= 80
    types = [*POINTERS, "*fp32", "*fp32", "*fp32", "*i64", "*i64", "*i1", "*fp32", "i32", "i32"]
    constants = QWEN35_27B | {"COLUMNS": kernels.CHUNK_COLUMNS, "BLOCK": kernels.BLOCK, "DOUBLINGS": kernels.DOUBLINGS}
    constants["SLICE"] = 128 // kernels.CHUNK_WARPS
    chunk = usage(kernels._delta_chunk_kernel, types, constants, arch, tmp_path, kernels.CHUNK_WARPS)
    assert chunk.stack == 0 and chunk.shared <= 99 * 1024 and "mma.sync" in chunk.ptx
