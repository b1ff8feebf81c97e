"""The kernels of recurrent layers, run by the interpreter, give the numbers of float64. A window has the bits of single
rows. Each fault put in by hand is found."""

import random
from contextlib import contextmanager

import pytest
import torch
from cuda_lowered import lowered
from kernel_faults import fault
from machine_code.work import work_of
from recurrent_calls import CLOSE, D_K, HEADS, KEY_HEADS, Layer, Rule, behind, chunks, gap, part, walk, windows
from torch import Tensor, nn
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
from triton_interpreter import interpreted

from eagle3.export.lowering.cuda.graph.recurrent import STATES, CudaRecurrentPositions, use_cuda_recurrence
from eagle3.export.lowering.cuda.kernels import advance
from eagle3.export.lowering.cuda.kernels import recurrent as kernels
from eagle3.export.lowering.cuda.kernels import recurrent_block as of_block
from eagle3.targets.gated_delta import GatedDeltaState, KimiDeltaState
from eagle3.targets.mamba2 import Mamba2State
from eagle3.targets.recurrent import RecurrentPositions
from eagle3.targets.spec import ROLLBACK_ROWS

pytestmark = pytest.mark.races(())  # tests/export/lowering/cuda/test_kernel_races.py
RULES = {"delta": Rule(True), "kimi": Rule(True, channels=True), "mamba2": Rule(False)}
D_V = RULES["delta"].d_v


@pytest.fixture(params=RULES)
def rule(request):
    return RULES[request.param]


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """A chunk's program has half as many columns, so that there are two for each head."""
    monkeypatch.setattr(kernels, "CHUNK_COLUMNS", 16)


def test_every_call_of_a_runner_gives_the_outputs_of_float64(rule):
    with interpreted(kernels):
        assert max(walk(rule)) < CLOSE


def test_strong_decays_of_a_row_or_a_channel_leave_the_others_exact(rule):
    """``exp(-400)`` is 0 in float32, and its inverse is infinite."""
    with interpreted(kernels):
        assert max(walk(rule._replace(strongest=400.0))) < CLOSE


def test_a_window_gives_the_bits_of_single_rows_however_many_are_accepted(rule):
    text, dice, at = rule.rows(30, 5), random.Random(5), 0
    with interpreted(kernels):
        alone, layer = Layer(rule), Layer(rule)
        single = torch.cat([alone(part(text, row, row + 1), row) for row in range(30)], 1)
        while at < 30:
            good = min(dice.randrange(1, 9), 30 - at)
            out = layer(behind(part(text, at, at + good), rule.rows(dice.randrange(0, 8), at)), at)
            assert torch.equal(out[:, :good], single[:, at : at + good])
            at += dice.randrange(1, good + 1)
        layer(rule.rows(1, 9), 30)
        alone(rule.rows(1, 9), 30)
    assert torch.equal(layer.state, alone.state)


def test_a_chunk_commits_all_but_its_last_rows(rule):
    count = 2 * ROLLBACK_ROWS + 2
    text = rule.rows(count + 1, count)
    right = rule.expected(text)
    with interpreted(kernels):
        layer = Layer(rule)
        assert gap(layer(part(text, 0, count), 0), right[:, :-1]) < CLOSE
        assert torch.equal(layer.state, layer.saved)
        assert gap(layer(part(text, count, count + 1), count), right[:, -1:]) < CLOSE


class Mixer:
    num_k_heads, num_v_heads, head_k_dim, head_v_dim = KEY_HEADS, HEADS, D_K, D_V
    n_groups, num_heads, ssm_state_size, head_dim, time_step_limit = KEY_HEADS, HEADS, D_K, D_V, None
    conv1d = nn.Conv1d(2 * KEY_HEADS * D_K + HEADS * D_V, 1, 4)
    conv1d.weight = nn.Parameter(conv1d.weight.transpose(0, 1))


class KimiMixer:
    num_heads, head_dim = HEADS, D_K
    conv1d = nn.Conv1d(3 * HEADS * D_K, 3 * HEADS * D_K, 4, groups=3 * HEADS * D_K)


def eager_state(rule: Rule):
    if rule.channels:
        return KimiDeltaState(KimiMixer())
    return GatedDeltaState(Mixer()) if rule.delta else Mamba2State(Mixer())


def given(rule: Rule, rows: list[Tensor | None]) -> tuple[Tensor, ...]:
    """Return what an eager state takes. No two heads of Kimi's rule share a key."""
    query, key, *others = rows
    groups = HEADS // KEY_HEADS if rule.channels else 1
    query, key = (each.repeat_interleave(groups, 0) for each in (query, key))
    return tuple(each for each in (query, key, *others) if each is not None)


def test_the_operators_on_the_host_equal_the_eager_state(rule):
    """The calls are those of ``RecurrentPositions``: chunks, windows, the saved state, and a position that has none."""
    eager, ours, places = eager_state(rule), eager_state(rule), RecurrentPositions()
    ours.__class__ = STATES[type(eager)]
    ours.changes = type(eager.changes)(kernels.SLOTS, sum(ours.parts))
    for seed, (first, count) in enumerate([(0, 40), (40, 5), (42, 16), (50, 30), (64, 20), (84, 1), (68, 20), (0, 4)]):
        rows, at = given(rule, rule.rows(count, seed)), places.rows(torch.arange(first, first + count))
        found, right = ours(rows, at), eager(rows, at)
        assert places.advance(at).item()
        torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(ours.state, eager.state, atol=1e-5, rtol=1e-4)


class Lowered(nn.Module):
    """A layer's state and rings, without its linears and the products of its convolution."""

    def __init__(self, rule: Rule):
        super().__init__()
        self.state, self.places = eager_state(rule), RecurrentPositions()
        use_cuda_recurrence(self)

    def forward(self, mixed: Tensor, input_pos: Tensor, *factors: Tensor) -> Tensor:
        rows = self.places.rows(input_pos)
        mixed = self.state.with_earlier(mixed, rows)[0, :, :-3].T
        parts = mixed.split((*[self.state.key_heads * D_K] * 2, HEADS * D_V), -1)
        query, key, value = (each.unflatten(-1, (-1, D_K)).transpose(0, 1) for each in parts)
        return self.state((query, key, value, *factors), rows) + self.places.advance(rows)


def test_a_lowered_layer_writes_its_state_and_its_rings_in_place(rule):
    key_heads = HEADS if rule.channels else KEY_HEADS
    channels, factors = 2 * key_heads * D_K + HEADS * D_V, given(rule, rule.rows(4, 0))[3:]
    with torch.no_grad():
        called, graph = lowered(Lowered(rule), (torch.randn(1, channels, 4), torch.arange(4), *factors))
    (rows,) = (entry for entry in graph.launches if entry["kernel"].startswith("_recurrent_rows_kernel"))
    (arguments,) = (given for name, given in called if name == rows["kernel"])
    assert {"state_state", "state_changes_rows"} <= set(arguments)  # the buffers themselves
    width = key_heads * D_K + HEADS * D_V + HEADS * (D_K if rule.channels else 1)
    assert work_of(rows, 4)[-1] == 4 * (2 * HEADS * D_K * D_V + 2 * 4 * width)
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
def test_products_of_three_tf32_terms_are_as_accurate_as_float32(rule, terms, bound):
    """With one term, the difference is at least a hundred times as large."""
    text = rule.rows(70, 7)
    with interpreted(kernels), terms_of_tf32(terms):
        found = gap(Layer(rule)(text, 0), rule.expected(text))
    assert found < bound and (terms == 3 or found > 100 * CLOSE)


AFTER = "        change = CHANGES + (first + row) % SLOTS * WIDTH\n"
OF_ROWS = {
    "a change is committed a row short": ("tl.range(begin, first, num", "tl.range(begin, first - 1, num"),
    "a change is committed twice": ("(committed, first - SLOTS // 2)", "(committed - 1, first - SLOTS // 2)"),
    "a slot is read a row late": ("CHANGES + position % SLOTS", "CHANGES + (position + 1) % SLOTS"),
    "the decay comes after the update": (
        "        state * tl.exp(decay),\n    )\n", "        state,\n    ) * tl.exp(decay)\n",
    ),
    "keys of another head": ("KEY + (key_head * rows + row)", "KEY + (head % KEY_HEADS * rows + row)"),
    "queries of another head": ("QUERY + (key_head * rows + row)", "QUERY + (head % KEY_HEADS * rows + row)"),
    "the ring has the keys of one head": ("change + key_head * D_K + k, mask=in_k", "change + k, mask=in_k"),
    "a ring of half the slots": (AFTER, AFTER.replace("SLOTS", "(SLOTS // 2)")),
    "the state of an earlier text is read": ("mask=in_tile & (first + begin > 0)", "mask=in_tile"),
    "the rows change the state in memory": (AFTER, AFTER + "        tl.store(tile, state, mask=in_tile)\n"),
}  # fmt: skip
OF_CHUNKS = {
    "keys of another head in a chunk": (
        "        keys = (key_head * rows", "        keys = (head % KEY_HEADS * rows",
    ),
    "the last rows of a chunk commit again": ("tl.where(begin > 0, first, committed)", "committed"),
    "a masked row changes the state": ("        here = at < count\n", "        here = at < count + 1\n"),
    "a chunk leaves its last block out": ("tl.range(0, count, BLOCK)", "tl.range(0, count - BLOCK, BLOCK)"),
    "a chunk ignores the saved state": ("(first > 0) & saved, other", "(first > 0) & (saved == 0), other"),
    "a chunk saves nothing": ("    tl.store(SAVED + place, state, mask=in_tile)\n", ""),
    "a chunk keeps the state that it read": ("    tl.store(STATE + place, state, mask=in_tile)\n", ""),
}  # fmt: skip
OF_HEAD_ROWS = {
    "the ring has the factor for its logarithm": ("D_V + head, decay, mask", "D_V + head, tl.exp(decay), mask"),
}
OF_HEAD_CHUNKS = {
    "a row of a block does not see itself": ("tl.where(row >= column, tl.exp(", "tl.where(row > column, tl.exp("),
    "a row of a block sees later rows": ("tl.where(row >= column, tl.exp(", "tl.where(row > -1 - column, tl.exp("),
    "a change decays in its own row": ("later = tl.where(row > column, ", "later = tl.where(row >= column, "),
    "rows of a block read the state a row early": (
        "tl.cumsum(decay, 0))[:, None]",
        "tl.cumsum(decay, 0) - decay)[:, None]",
    ),
    "the updates of a block decay too little": (
        "behind = tl.exp(tl.sum(later, 0))",
        "behind = tl.exp(tl.sum(later, 0) - decay)",
    ),
    "the state of a block does not decay": ("through = tl.exp(tl.sum(decay, 0))\n", "through = 1.0\n"),
}
OF_DELTA_ROWS = {
    "the update ignores the decay": ("tl.sum(state * tl.exp(decay) * key", "tl.sum(state * key"),
    "beta is left out": (" * key[:, None], 0)) * beta\n", " * key[:, None], 0))\n"),
}
OF_DELTA_CHUNKS = {
    "the inverse lacks a doubling": ("tl.static_range(1, DOUBLINGS)", "tl.static_range(1, DOUBLINGS - 1)"),
}
OF_BETA = {"beta is left out of the system": (", 0) * between * beta[:, None]", ", 0) * between")}
OF_CHANNEL_ROWS = {
    "the ring has the factors for the logarithms": ("(logarithms, decay,", "(logarithms, tl.exp(decay),"),
    "the ring has the channels in another order": ("head * D_K + k[:, None]", "head * D_K + D_K - 1 - k[:, None]"),
    "the ring has the decays of one head": ("HEADS * D_V + head * D_K + k", "HEADS * D_V + k"),
    "committed decays of another head": ("D_V + head * DECAYS, k", "D_V + key_head * DECAYS, k"),
    "decays of another head": ("DECAY + head * rows * DECAYS", "DECAY + key_head * rows * DECAYS"),
    "one decay for all channels": ("tl.load(LOGARITHMS + k[:, None]", "tl.load(LOGARITHMS + 0 * k[:, None]"),
}
OF_CHANNEL_CHUNKS = {
    "decays of another head in a chunk": (
        "(head * rows + at)[None, :, None] * D",
        "(head // 2 * rows + at)[None, :, None] * D",
    ),
    "decays of other channels in a chunk": ("* D_K + sliced, mask", "* D_K + D_K - 1 - sliced, mask"),
    "the system of channels lacks beta": ("system *= beta[:, None]", "system *= 1.0"),
    "the state's channels do not decay": ("through = tl.exp(tl.sum(decay, 1))[:, :, None]", "through = 1.0"),
}
OF_BLOCKS = {
    "an exponent is positive": ("tl.exp(tl.dot(", "tl.exp(-tl.dot("),
    "a query does not see its own row": ("row == column, tl.sum", "row > BLOCK, tl.sum"),
    "a query sees later rows": ("pair = other & second", "pair = other"),
    "a change decays in its own row": ("    left = key\n", "    left = key * tl.exp(decay)\n"),
    "a key's own row does not decay": ("    key *= tl.exp(decay)\n", ""),
    "a query's own row does not decay": ("    query *= tl.exp(decay)\n", ""),
    "keys decay through their segment alone": ("tl.where(second, key * through, key)", "key"),
    "queries decay through their segment alone": ("tl.where(second, query * through, query)", "query"),
    "changes decay through their segment alone": ("tl.where(second, left, left * through)", "left"),
    "the two halves of a block do not meet": ("tl.range(DOUBLINGS)", "tl.range(DOUBLINGS - 1)"),
    "a segment's own decays count": ("row >> doubling != column >> doubling", "row >> doubling == column >> doubling"),
}
"""Faults in ``recurrent_block``."""
OF_MAMBA2_ROWS = {
    "rows take an update of the delta rule": (
        "        if DELTA:\n            beta = tl.load(BETA + head * rows + row)",
        "        if True:\n            beta = tl.load(BETA + head * rows + row)",
    )
}
CASES = [
    (name, rule, calls, kernels if of is not OF_BLOCKS else of_block, change)
    for calls, of, rules in (
        (windows, OF_ROWS, RULES),
        (chunks, OF_CHUNKS, RULES),
        (windows, OF_HEAD_ROWS, ("delta", "mamba2")),
        (chunks, OF_HEAD_CHUNKS, ("delta", "mamba2")),
        (windows, OF_DELTA_ROWS, ("delta", "kimi")),
        (chunks, OF_DELTA_CHUNKS, ("delta", "kimi")),
        (chunks, OF_BETA, ("delta",)),
        (windows, OF_CHANNEL_ROWS, ("kimi",)),
        (chunks, OF_CHANNEL_CHUNKS, ("kimi",)),
        (chunks, OF_BLOCKS, ("kimi",)),
        (windows, OF_MAMBA2_ROWS, ("mamba2",)),
    )
    for at, (name, change) in enumerate(of.items())
    for rule in [list(rules)[at % len(rules)]]
]
"""The faults by name, each in one of the rules that have its lines, the calls that reveal them, the module, and what is
put in place of what."""


@pytest.mark.first(4)
@pytest.mark.parametrize(
    ("name", "rule", "calls", "module", "change"), CASES, ids=[f"{name}, {rule}" for name, rule, *_ in CASES]
)
def test_a_fault_is_found_by_the_calls_of_a_runner(name, rule, calls, module, change, tmp_path):  # noqa: ARG001 - its id
    """The calls end with the first that is wrong. A head's columns are those of one program."""
    with fault(tmp_path, module, *change, kernels), interpreted(kernels):
        assert any(each >= CLOSE for each in calls(RULES[rule]._replace(d_v=16)))


FROM_THE_FIRST_ROW = (
    """    key *= tl.exp(decay)
    query *= tl.exp(decay)
    for doubling in tl.range(DOUBLINGS):
""",
    """    until = tl.cumsum(decay, 1)
    turned = tl.permute(key * tl.exp(-until), (0, 2, 1))
    key *= tl.exp(until)
    query *= tl.exp(until)
    left *= tl.exp(tl.sum(decay, 1)[:, None] - until)
    of_keys = tl.where(row > column, tl.dot(key, turned), 0.0)
    of_queries += tl.where(row > column, tl.dot(query, turned), 0.0)
    for doubling in tl.range(0):
""",
)
"""Decays between rows as quotients of two from the block's first row, as a rule may have them whose decays are weak."""


def test_only_strong_decays_reveal_sums_from_the_first_row(tmp_path):
    weak = RULES["kimi"]._replace(d_v=16)
    with fault(tmp_path, of_block, *FROM_THE_FIRST_ROW, kernels), interpreted(kernels):
        assert max(chunks(weak)) < CLOSE
        assert max(chunks(weak._replace(strongest=60.0))) > 100 * CLOSE


@pytest.mark.parametrize("calls", [windows, chunks])
def test_the_same_calls_are_right_without_a_fault(rule, calls):
    with interpreted(kernels):
        assert max(calls(rule._replace(d_v=16))) < CLOSE
