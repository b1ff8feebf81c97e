"""The records' image for sm_90a, whose weights come by bulk copies, has the bits of Triton's kernel; faults of its ring
are noticed. Its source runs on the CPU, with the instructions of the GPU emulated (``device/warps.h``)."""

import random
import re
import subprocess
from functools import partial

import pytest
import torch
import triton
from emulated_kernel import ORDERS, Emulated, Emulation, Fault, exact, expected
from kernel_inputs import activations, int4_weight
from kernel_usage import of_launch
from machine_code.sass import INSTRUCTION, disassembler, read_codes
from ptx_of_kernels import on_meta
from torch import Tensor
from triton.runtime import driver
from triton_interpreter import interpreted

from eagle3.export.lowering.cuda.kernels import small_m, sums
from eagle3.export.lowering.cuda.kernels.int4.records import bulk_copy
from eagle3.export.lowering.cuda.kernels.int4.records import kernel as int4_records
from eagle3.export.lowering.cuda.kernels.int4.records.layout import records
from eagle3.export.lowering.cuda.named_gpu import configurations
from eagle3.export.lowering.cuda.named_gpu.compiling import compiling
from eagle3.runner.system.gpus import BY_ARCH, GPUS

SLICES = {
    "queries, keys and values": (128, 5376, ""), "o": (128, 8192, ""), "o of full attention": (64, 16384, ""),
    "gate and up": (320, 5376, sums.GELU_TANH), "down": (64, 21504, ""), "LM head": (64, 5376, ""),
}  # fmt: skip
"""The linears of Gemma 4 31B with all of K and a part of their outputs, N x K, and activations."""


@pytest.fixture(scope="module")
def emulation(tmp_path_factory):
    return Emulation(tmp_path_factory.mktemp("emulated"))


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    return Emulation(
        tmp_path_factory.mktemp("faulty"), {name: partial(changed, pairs) for name, (pairs, _) in FAULTS.items()}
    )


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


ARRIVES, LEFT = "if (lane == 0) arrive(stage + EMPTY);", "&& left > STAGES)"
BEGINS, EARLY = "  if (threadIdx.x == 0) run.begin(ring);\n", "  if (EARLY) wait_for_kernel_in_front();\n"
FULL, EMPTY = "wait(stage + FULL, phase);", "wait(stage + EMPTY, phase);"
EXPECTS, SECOND = "arrive_expecting(stage + FULL, 2 * RECORD);", "copy(stage + RECORD, from"
TURNS, TURN = "stage -= RING, phase ^= 1;", "kept(lane ? WARPS : warp)"
BITS, HANGS, TWO = "other bits", "the warps wait for each other", "two copies to one place are on the way"
SYNCS = "  sync_threads();\n"
FAULTS = {
    "a phase that is not flipped": ([(TURNS, "stage -= RING;")], f"{BITS}|{TWO}|{HANGS}"),
    "a stage too few": (
        [("kept(ring + RING)", "kept(ring + RING - STAGE)"), (TURNS, TURNS.replace("G,", "G - STAGE,"))],
        HANGS,
    ),
    "a copy past the end": ([(LEFT, "&& left + 1 > STAGES)")], "a copy reads outside the weight"),
    "a copy from the wrong block": ([("run.count - left + STAGES, stage", "run.count - left, stage")], BITS),
    "a consumer that reads early": ([(FULL, "")], f"{BITS}|{TWO}"),
    "a producer that copies early": ([(EMPTY, "")], f"{BITS}|{TWO}"),
    "an arrival that is missing": ([(ARRIVES, "")], HANGS),
    "an arrival before words are read": ([(ARRIVES, ""), (FULL, f"{FULL} {ARRIVES}")], BITS),
    "an arrival before the whole warp has read": ([(f"sync_warp();\n      {ARRIVES}", ARRIVES)], BITS),
    "a barrier for fewer warps": (
        [("init(stage + EMPTY, WARPS)", "init(stage + EMPTY, WARPS - 1)")],
        f"{BITS}|{HANGS}",
    ),
    "too few bytes expected": ([(EXPECTS, EXPECTS.replace("2 *", ""))], "bytes land that no barrier expects"),
    "too many bytes expected": ([(EXPECTS, EXPECTS.replace("2 *", "3 *"))], HANGS),
    "a half that is not copied": ([(SECOND, f"if (0) {SECOND}")], HANGS),
    "every lane copies": ([(TURN, "kept(warp)")], f"{TWO}|{HANGS}"),
    "no warp's turn": ([(TURN, "kept(WARPS)")], HANGS),
    "barriers that are used before they are set up": ([(BEGINS + SYNCS, BEGINS)], "used before it is set up"),
    "barriers that the engine does not see": ([("    show_bars();\n", "")], "before its barrier is shown"),
    "no wait for the kernel in front": ([(EARLY, "")], "accessed before the wait"),
    "x before the wait": (
        [(EARLY, ""), ("  Place stage = ring;\n", f"{EARLY}  Place stage = ring;\n")],
        "before the wait",
    ),
    "weights after the wait": ([(BEGINS + SYNCS + EARLY, EARLY + BEGINS + SYNCS)], "copied late"),
    "the next kernel is not released": ([("  release_next_kernel();\n  if", "  if")], "does not release the next"),
    "sums that are read before they are there": ([(f"  {SYNCS}    for (int rows", "    for (int rows")], BITS),
    "sums that are overwritten before they are read": ([(f"* UP;\n    }}\n  {SYNCS}", "* UP;\n    }\n")], BITS),
    "an arrival before the sums are stored": ([(f"tile;\n    {SYNCS}", "tile;\n")], "between that and the arrival"),
}
"""Edits of the source, and how the fault is noticed."""


def changed(pairs: list[tuple[str, str]], source: str) -> str:
    """Return the source with edits, each of whose texts must be there once."""
    for old, new in pairs:
        assert source.count(old) == 1, (source.count(old), old)
        source = source.replace(old, new)
    return source


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_ring_is_noticed_in_some_order(fault, faulty):
    """A program has 16 blocks, so that the ring of 6 stages turns twice."""
    x, packed = activations(8, 6144), records(*int4_weight(128, 6144))
    wanted, noticed = by_copies(faulty, x, packed)[0], set()
    for order in range(len(ORDERS)):
        try:
            found, kernel = by_copies(faulty, x, packed, order=order, change=fault)
            if not torch.equal(found.view(torch.int16), wanted.view(torch.int16)):
                noticed.add(BITS)
            try:
                assert_whole(kernel, packed)
            except AssertionError:
                noticed.add("copied late, or not once")
        except Fault as error:
            noticed.add(str(error))
    assert any(re.search(FAULTS[fault][1], each) for each in noticed), noticed


def constants_of(rows: int, activation: str = "", early: bool = True) -> tuple:
    """Return the source of Triton's kernel for gate and up of Gemma 4 31B, its options and its constants."""
    x, packed = on_meta(rows, 5376, dtype=torch.bfloat16), on_meta(1344, 21, 4736)
    asked = int4_records.LEVERS if early else {}

    def launch(kernel) -> Tensor:
        given = kernel, x, packed, sums.counters("meta"), activation, rows, packed
        return int4_records._launch_records(*given, **asked)

    with sums.made_for_named("sm_90"):
        source, options, _, constants = of_launch(int4_records.int4_records_small_m_kernel, launch)
    return source, options, constants


def printed(cubin: bytes, folder, *form: str) -> str:
    (folder / "kernel.cubin").write_bytes(cubin)
    return subprocess.run([disassembler(), *form, folder / "kernel.cubin"], capture_output=True, text=True).stdout


INEXACT, NUMBER = re.compile(r"\b[a-z0-9]+(?:\.r[nm])?\.(?:approx|full|ftz)\S* "), re.compile(r"0f[0-9A-F]{8}")
"""The instructions of floats that are approximate or flush subnormal numbers, and numbers, in PTX."""
GLOBAL = re.compile(r"^(LDG|LD|STG|ST|ATOM|ATOMG|RED)\b")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: it is Triton's target")
@pytest.mark.parametrize(("rows", "programs", "most"), [(8, 3, 202), (16, 2, 250)])
def test_the_machine_code_copies_before_it_waits_and_spills_nothing(rows, programs, most, tmp_path):
    for early in (True, False):
        cubin = bulk_copy.cubin(constants_of(rows, sums.GELU_TANH, early)[2])
        code = [text for _, text in INSTRUCTION.findall(printed(cubin, tmp_path, "-sass"))]
        waits, copies = code.index("ACQBULK"), [at for at, text in enumerate(code) if text.startswith("UBLKCP")]
        assert code.count("ACQBULK") == 1 and not any(GLOBAL.match(text) for text in code[:waits])
        assert len(copies) == 4 and (copies[0] < copies[1] < waits if early else waits < copies[0])
    registers, stack = configurations.usage(cubin)
    taken = bulk_copy.shared_bytes(rows)
    assert stack == 0 and not any(text.startswith(("LDL", "STL")) for text in code)
    assert GPUS["H200"].resident(registers, taken, 256) == programs == int4_records.TOGETHER[rows]
    assert 140 << 10 < programs * bulk_copy.STAGES[rows] * 9472 < 190 << 10
    assert all(taken <= gpu.shared_memory_per_block for gpu in GPUS.values() if gpu.arch >= 90)
    loops = [each for each in read_codes([cubin])[cubin].loops if each.multiply_adds]
    loop = min(loops, key=lambda each: each.instructions)
    assert loop.multiply_adds == rows * 10 * 256 and loop.load_bytes == 2 * rows
    assert loop.instructions <= most  # of which a producer's turn takes 43, once in 8 blocks


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: it is Triton's target")
@pytest.mark.parametrize("activation", [sums.SILU, sums.GELU_TANH])
def test_entry_parameters_and_the_instructions_of_a_gate_are_those_of_triton(activation, tmp_path):
    source, options, constants = constants_of(8, activation)
    with compiling(BY_ARCH["sm_90"]):
        plain = triton.compile(source, target=driver.active.get_current_target(), options=options).asm
    defined = tuple(sorted(bulk_copy.macros(constants).items()))
    own = bulk_copy.cubin(constants), bulk_copy.compiled(defined, "ptx").decode()
    places = [
        re.findall(r"Ordinal : (\w+)\s+Offset  : (\w+)\s+Size    : (\w+)", printed(cubin, tmp_path, "-elf"))
        for cubin in (plain["cubin"], own[0])
    ]
    assert places[0] == places[1] and len(places[0]) == 9
    (inexact, numbers), (of_own, own_numbers) = (
        (INEXACT.findall(text), NUMBER.findall(text)) for text in (plain["ptx"], own[1])
    )
    assert sorted(inexact) == sorted(of_own) and len(inexact) > 5
    assert {*numbers} - {"0f00000000"} <= {*own_numbers}
