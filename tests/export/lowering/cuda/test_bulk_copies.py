"""The records' image for sm_90a, whose weights come by bulk copies, has the bits of Triton's kernel; faults of its ring
are noticed. Its source runs on the CPU, with the instructions of the GPU emulated (``device/warps.h``)."""

import random
import re

import pytest
import torch
from emulated_kernel import ORDERS, Emulated, Emulation, Fault, exact, expected
from kernel_inputs import activations, int4_weight
from torch import Tensor
from triton_interpreter import interpreted

from eagle3.export.lowering.cuda.kernels import small_m, sums
from eagle3.export.lowering.cuda.kernels.int4.records import bulk_copy
from eagle3.export.lowering.cuda.kernels.int4.records import kernel as int4_records
from eagle3.export.lowering.cuda.kernels.int4.records.layout import records

SLICES = {
    "queries, keys and values": (192, 5376, ""), "o": (128, 8192, ""), "o of full attention": (64, 16384, ""),
    "gate and up": (320, 5376, sums.GELU_TANH), "down": (64, 21504, ""), "LM head": (192, 5376, ""),
}  # fmt: skip
"""The linears of Gemma 4 31B with all of K and a part of their outputs, N x K, and activations."""


@pytest.fixture(scope="module")
def emulation(tmp_path_factory):
    return Emulation(tmp_path_factory.mktemp("emulated"))


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    return Emulation(tmp_path_factory.mktemp("faulty"), {name: change for name, (change, _) in FAULTS.items()})


def launched(kernel, x: Tensor, packed: Tensor, activation: str = "", multiprocessors: int = 1, **asked) -> Tensor:
    arrived, most_rows = sums.counters(), 8 if len(x) <= 8 else 16
    with sums.made_for(multiprocessors, False):
        found = int4_records._launch_records(kernel, x, packed, arrived, activation, most_rows, **asked)
    assert not arrived.any()
    return found


def by_triton(emulation: Emulation, *given, **asked) -> Tensor:
    with exact(emulation), interpreted(sums, small_m, int4_records):
        return launched(int4_records.int4_records_small_m_kernel, *given, **asked)


def by_copies(emulation: Emulation, *given, order: int = 0, change: str = "", **asked) -> tuple[Tensor, Emulated]:
    kernel = Emulated(emulation, order, change)
    return launched(kernel, *given, **{"EARLY": True} | asked), kernel


def assert_whole(kernel: Emulated, packed: Tensor) -> None:
    """Each byte of the weight was copied once for each tile of rows, the first blocks of each program before its
    wait."""
    for ran in kernel.ran:
        assert ran.copied == ran.row_tiles * packed.numel()
        share, more = divmod(packed.shape[0] // 2 * packed.shape[1], ran.programs)
        stages = bulk_copy.STAGES[ran.rows]
        first = more * min(share + 1, stages) + (ran.programs - more) * min(share, stages)
        assert ran.copied_early == ran.row_tiles * first * 2 * 4736


@pytest.mark.races(())
@pytest.mark.parametrize("m", [4, 16])
@pytest.mark.parametrize("linear", SLICES)
def test_linears_of_gemma_have_the_bits_of_triton_in_every_order(linear, m, emulation):
    n, k, activation = SLICES[linear]
    x, packed = activations(m, k), records(*int4_weight(n, k))
    wanted = by_triton(emulation, x, packed, activation)
    for order in range(len(ORDERS)) if m == 4 else (random.Random(n + k).randrange(4),):
        found, kernel = by_copies(emulation, x, packed, activation, order=order)
        assert torch.equal(found.view(torch.int16), wanted.view(torch.int16)), ORDERS[order]
        assert_whole(kernel, packed)


@pytest.mark.races(())
def test_sixty_odd_shapes_have_the_bits_of_the_same_sums(emulation):
    """The sums in NumPy have the bits of Triton's kernel, too: every tenth shape is compared with both."""
    chosen = random.Random(90)
    for case in range(60):
        m, n, blocks = chosen.randint(1, 37), 64 * chosen.randint(1, 5), chosen.randint(1, 9)
        multiprocessors, order = chosen.choice((1, 1, 2, 5, 132)), case % 4
        activation = chosen.choice(("", sums.SILU, sums.GELU_TANH))
        x, packed = activations(m, 256 * blocks), records(*int4_weight(n, 256 * blocks))
        given = x, packed, activation, multiprocessors
        found, kernel = by_copies(emulation, *given, order=order, EARLY=bool(case % 3))
        with sums.made_for(multiprocessors, False):
            share = int4_records.shares_here(n, 256 * blocks, 8 if m <= 8 else 16)
        wanted = expected(emulation, x, packed, share, activation)
        assert torch.equal(found.view(torch.int16), wanted.view(torch.int16)), (m, n, blocks, given[2:], ORDERS[order])
        if case % 10 == 0:
            assert torch.equal(by_triton(emulation, *given), wanted)
        if case % 3:
            assert_whole(kernel, packed)
        else:
            assert kernel.ran[0].copied_early == 0


def test_extreme_codes_and_inputs_have_the_same_bits(emulation):
    """Zeros of either sign, values that the powers of two make infinite, and inputs near the least normal number."""
    x, weight = activations(6, 512), int4_weight(64, 512)
    weight[0][::2], weight[3][1::3], weight[1][5] = 0, 255, 0
    weight[2][7] *= -1
    x[0], x[1], x[2, 8], x[3] = 0, -0.0, 2.0**28, x[3] * 2.0**-60
    given = x, records(*weight)
    found, wanted = by_copies(emulation, *given)[0], by_triton(emulation, *given)
    assert torch.equal(found.isnan(), wanted.isnan()) and not found[2].isfinite().any()
    assert torch.equal(found.nan_to_num().view(torch.int16), wanted.nan_to_num().view(torch.int16))


def test_l2_is_asked_for_the_next_weight_once(emulation):
    x, packed, following = activations(3, 1024), records(*int4_weight(128, 1024)), records(*int4_weight(64, 512))
    found, kernel = by_copies(emulation, x, packed, following=following)
    assert 0 <= following.nbytes - kernel.ran[0].asked < 16 * kernel.ran[0].programs
    assert torch.equal(found, by_copies(emulation, x, packed)[0])


def changed(*pairs: tuple[str, str]):
    """Return an edit of the source, each of whose texts must be there once."""

    def change(source: str) -> str:
        for old, new in pairs:
            assert source.count(old) == 1, (source.count(old), old)
            source = source.replace(old, new)
        return source

    return change


ARRIVES, LEFT = "if (lane == 0) arrive(stage + EMPTY);", "&& left > STAGES)"
BEGINS, EARLY = "  if (threadIdx.x == 0) run.begin(ring);\n", "  if (EARLY) wait_for_kernel_in_front();\n"
FULL, EMPTY = "wait(stage + FULL, phase);", "wait(stage + EMPTY, phase);"
EXPECTS = "arrive_expecting(stage + FULL, 2 * RECORD);"
TURNS = "stage -= RING, phase ^= 1;"
HANGS, ENDS = "the warps wait for each other", "a copy reads outside the weight"
TWO = "two copies to one place are on the way"
LATE = "no barrier is between that and the arrival"
FAULTS = {
    "a phase that is not flipped": (changed((TURNS, "stage -= RING;")), f"other bits|{TWO}|expects"),
    "a stage too few": (
        changed(("kept(ring + RING)", "kept(ring + RING - STAGE)"), (TURNS, "stage -= RING - STAGE, phase ^= 1;")),
        f"{HANGS}|other bits",
    ),
    "a copy past the end": (changed((LEFT, "&& left + 1 > STAGES)")), f"{ENDS}|copied"),
    "a copy from the wrong block": (changed(("run.count - left + STAGES, stage", "run.count - left, stage")), "other bits"),
    "a consumer that reads early": (changed((FULL, "")), f"other bits|{TWO}"),
    "a producer that copies early": (changed((EMPTY, "")), f"other bits|{TWO}|expects"),
    "an arrival that is missing": (changed((ARRIVES, "")), HANGS),
    "an arrival before words are read": (changed((ARRIVES, ""), (FULL, f"{FULL} {ARRIVES}")), "other bits"),
    "a barrier for fewer warps": (changed(("init(stage + EMPTY, WARPS)", "init(stage + EMPTY, WARPS - 1)")), "bits|wait"),
    "too few bytes expected": (changed((EXPECTS, EXPECTS.replace("2 *", ""))), "bytes land that no barrier expects|bits"),
    "too many bytes expected": (changed((EXPECTS, EXPECTS.replace("2 *", "3 *"))), HANGS),
    "a half that is not copied": (changed(("copy(stage + RECORD, from + T", "if (0) copy(stage + RECORD, from + T")), HANGS),
    "every lane copies": (changed(("kept(lane ? WARPS : warp)", "kept(warp)")), f"{TWO}|{HANGS}"),
    "no warp's turn": (changed(("kept(lane ? WARPS : warp)", "kept(WARPS)")), HANGS),
    "barriers that warps see before they are set up": (
        changed((f"{BEGINS}  sync_threads();\n", BEGINS)), "a barrier is used before it is set up"
    ),
    "barriers that the engine does not see": (changed(("    show_bars();\n", "")), "before its barrier is shown"),
    "no wait for the kernel in front": (changed((EARLY, "")), "accessed before the wait"),
    "x before the wait": (
        changed((EARLY, ""), ("  Place stage = ring;\n", f"{EARLY}  Place stage = ring;\n")), "accessed before the wait"
    ),
    "weights after the wait": (
        changed((f"{BEGINS}  sync_threads();\n{EARLY}", f"{EARLY}{BEGINS}  sync_threads();\n")), "copied"
    ),
    "the next kernel is not released": (changed(("  release_next_kernel();\n  if", "  if")), "does not release the next"),
    "an arrival before the whole warp has read": (changed((f"sync_warp();\n      {ARRIVES}", ARRIVES)), "other bits"),
    "sums that are read before they are there": (
        changed(("    sync_threads();\n    for (int rows", "    for (int rows")), "other bits"
    ),
    "sums that are overwritten before they are read": (
        changed(("* UP;\n    }\n    sync_threads();", "* UP;\n    }")), "other bits"
    ),
    "an arrival before the sums": (
        changed(("tile;\n      sync_threads();\n", "tile;\n")), LATE
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_ring_is_noticed_in_some_order(fault, faulty):
    """A program has 16 blocks, so that the ring of 6 stages turns twice."""
    x, packed = activations(8, 6144), records(*int4_weight(128, 6144))
    wanted, noticed = by_copies(faulty, x, packed)[0], set()
    for order in range(len(ORDERS)):
        try:
            found, kernel = by_copies(faulty, x, packed, order=order, change=fault)
            if not torch.equal(found.view(torch.int16), wanted.view(torch.int16)):
                noticed.add("other bits")
            try:
                assert_whole(kernel, packed)
            except AssertionError:
                noticed.add("copied")
        except Fault as error:
            noticed.add(str(error))
    assert any(re.search(FAULTS[fault][1], each) for each in noticed), noticed
