"""The compiled code of each kernel, without a GPU: barriers, registers, shared memory, and instructions for a weight.
The limits are those of the present code, so that no change increases its cost; one that reduces it lowers them."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from kernel_usage import SHARED, Usage, usage
from machine_code.barriers import faults
from machine_code.ptx import SECTOR, WARP, loads
from ptx_of_kernels import (
    ATTENTION,
    CHUNK,
    CHUNKS,
    INT8_BY_ROW,
    K_QUANTS,
    KERNELS,
    LAUNCH_INT4,
    LAUNCH_Q,
    LAUNCH_RECORDS,
    OF_BF16,
    OF_INT4,
    OF_INT8,
    OF_Q,
    OF_RECORDS,
    RECORDS,
    ROWS,
    WIDE_PAIR,
    attends,
    attends_in_chunk,
    int4_experts_of,
    int8_experts_of,
    names_of,
    on_meta,
    product,
    recurs,
)

from eagle3.export.lowering.cuda.kernels import attention_chunk, bf16, large_m, recurrent, small_m, sums
from eagle3.export.lowering.cuda.kernels.int4.records import kernel as int4_records
from eagle3.runner.system.gpus import BY_ARCH

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: it is Triton's target")
REQUEST = "cp.async.bulk.prefetch.L2"
BF16 = on_meta(5376, 21504, dtype=torch.bfloat16)
"""A weight so wide that no compiler unrolls the loop over it."""


def of_bf16(rows: int, **more) -> Callable:
    x = on_meta(rows, 21504, dtype=torch.bfloat16)
    return lambda kernel: bf16._launch_bf16(kernel, x, BF16, sums.counters("meta"), **more)


class Limits(NamedTuple):
    """Limits of a kernel: instructions of the main loop for a weight, programs that fit on a multiprocessor, bytes
    of stack, the machine instructions counted in the loop, and L1 lines of its loads over the fewest possible."""

    most: float = float("inf")
    programs: int = 2
    stack: int = 0
    loop: dict[str, int] = {}
    lines: float | None = None
    arch: str = "sm_90"
    launch: tuple | None = None
    """The kernel and its launch; None for those of ``KERNELS``."""


COPIED = {"BAR": 2, "LDG": 2}  # codes and steps are loaded; the rest is copied ahead
SCALES = 1.2  # two programs share a sector of scales and zero points
FEW = {
    "int4": Limits(2.7, loop=COPIED, lines=1.0),
    "int4 records": Limits(2.2, 3, 16, {"BAR": 1, "LDGSTS": 0, "LDL": 0}),
    "attention of a product": Limits(),
    "bf16": Limits(
        1.5, loop={"HMMA": 16}, lines=2.0, launch=(OF_BF16, of_bf16(4))
    ),  # a quarter of a block of one row: half a line at a time
    "int4 of 16 rows": Limits(4.1, lines=SCALES),
    "int4, whole tiles and a gate": Limits(launch=(OF_INT4, product(LAUNCH_INT4, 4, WIDE_PAIR, activation=sums.SILU))),
    "int4, 16 rows of whole tiles and a gate": Limits(
        launch=(OF_INT4, product(LAUNCH_INT4, 16, WIDE_PAIR, activation=sums.GELU_TANH))
    ),
    "int4 records of 16 rows": Limits(
        3.0, stack=16, loop={"LDL": 0}, launch=(OF_RECORDS, product(LAUNCH_RECORDS, 16, RECORDS, most_rows=16))
    ),
    "int4 records of a gate": Limits(2.25, 3, 16, {"LDL": 0}),
    "int4 records, 16 rows of a gate": Limits(
        3.0,
        2,
        16,
        {"LDL": 0},
        launch=(OF_RECORDS, product(LAUNCH_RECORDS, 16, RECORDS, activation=sums.SILU, most_rows=16)),
    ),
    "int8": Limits(5.0),
    "int8 by row": Limits(5.0, lines=1.0, launch=(OF_INT8, product(small_m._launch_int8, 4, INT8_BY_ROW))),
    "int8 of 16 rows": Limits(6.4, 1, launch=(OF_INT8, product(small_m._launch_int8, 16, INT8_BY_ROW))),
    "bf16 of 32 rows": Limits(3.0, loop={"HMMA": 32}, launch=(OF_BF16, of_bf16(32))),
    "bf16 of a gate": Limits(),
    "q4_k": Limits(2.7, loop=COPIED, lines=1.0),
    "q5_k": Limits(3.7, loop=COPIED, lines=1.0),
    "q6_k": Limits(3.6, loop=COPIED, lines=1.0),
    "q6_k of 16 rows": Limits(4.5, 1, loop=COPIED, launch=(OF_Q, product(LAUNCH_Q, 16, K_QUANTS[6]))),
    "int4 experts": Limits(2.7, stack=8),
    "int4 experts, down": Limits(2.7, stack=8),
    "int4 experts of 16 rows": Limits(3.4, 1, launch=(KERNELS["int4 experts"][0], int4_experts_of(sums.GELU_TANH, 16))),
    "int8 experts": Limits(5.0, stack=8),
    "int8 experts of 16 rows": Limits(6.4, 1, 8, launch=(KERNELS["int8 experts"][0], int8_experts_of(16))),
}
MANY = {
    "large int4": Limits(7.1),
    "large int4 records": Limits(7.4),
    "large int8": Limits(7.5),
    "large q4_k": Limits(7.2),
    "large q5_k": Limits(8.7),
    "large q6_k": Limits(8.7),
}
"""Code for sm_80, which later architectures run too; for sm_90 there is a second image."""
WIDE = {"BLOCK_N": 32, "num_warps": 8, "num_stages": 2}
LONG = {"BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
OTHERS = {
    "attention of wide heads": Limits(launch=(ATTENTION, attends(512, 8, 8, 8, made=True, **WIDE))),
    "attention of wide heads in 99 KB": Limits(
        arch="sm_89", launch=(ATTENTION, attends(512, 8, 8, 8, made=True, **WIDE))
    ),
    "attention with a bias by half a table": Limits(
        arch="sm_120", launch=(ATTENTION, attends(64, 8, 4, 4, made=True, plus=1.0, bias=True, **LONG))
    ),
    "attention of neighbours of a half": Limits(
        arch="sm_89",
        launch=(ATTENTION, attends(128, 16, 4, 4, made=True, rotary=(64, 1, 2), **WIDE | {"num_warps": 4})),
    ),
    "attention of wide codes": Limits(launch=(ATTENTION, attends(512, 8, 8, 8, made=True, int8=True, **WIDE))),
    "rows of Qwen3.5": Limits(launch=(ROWS, recurs(4, keys=16, heads=48))),
    "rows of Falcon-H1": Limits(launch=(ROWS, recurs(4, delta=False, keys=2, heads=32, d_k=256))),
    "chunk of Qwen3.5": Limits(launch=(CHUNKS, recurs(128, keys=16, heads=48))),
    "chunk of Falcon-H1": Limits(launch=(CHUNKS, recurs(128, delta=False, keys=2, heads=32, d_k=256))),
    "chunk of Nemotron-H": Limits(launch=(CHUNKS, recurs(128, delta=False, keys=8, heads=128, d_v=64))),
    "chunk of Kimi Linear": Limits(launch=(CHUNKS, recurs(128, channels=True, keys=32, heads=32))),
}


def compiled(name: str, limits: Limits, **more) -> Usage:
    """Compile a kernel, and assert that it has its barriers and fits."""
    kernel, launch = limits.launch or KERNELS[name]
    found = usage(kernel, launch, limits.arch, **more)
    assert faults(found.ptx, names_of(kernel)) == []
    assert found.stack <= limits.stack and "mma." in found.ptx or kernel is ROWS
    assert BY_ARCH[limits.arch].resident(found.registers, found.shared, found.threads) >= limits.programs
    return found


@pytest.mark.first(4)
@pytest.mark.parametrize("name", FEW)
def test_kernels_of_few_rows_keep_their_limits(name):
    limits = FEW[name]
    found = compiled(name, limits)
    assert found.shared <= SHARED
    if limits.most < float("inf"):
        assert 0 < found.a_weight <= limits.most
    assert {each: found.loop.count(each) for each in limits.loop} == limits.loop
    if limits.lines:
        read = loads(found.ptx, (*found.grid, 1, 1)[:3], 4)
        assert read and sum(load.lines for load in read) <= limits.lines * sum(load.fewest for load in read)


@pytest.mark.first(1)
@pytest.mark.parametrize("name", MANY)
def test_kernels_of_many_rows_keep_their_limits_and_copy_whole_sectors(name):
    with sums.made_for_named("sm_80"):
        found = compiled(name, MANY[name]._replace(arch="sm_80"))
    assert "HMMA" in found.loop and found.ptx.count("cp.async.cg.shared.global") > 0
    assert 0 < found.a_weight <= MANY[name].most
    copied = [load for load in loads(found.ptx, (1, 1, 1), 64) if "_k" not in name and load.parameter < 2]
    whole = {load.parameter: load.sectors * SECTOR == load.bytes * WARP for load in copied}
    assert all(whole.values()) and (copied or "_k" in name)


@pytest.mark.whole
@pytest.mark.parametrize("name", OTHERS)
def test_attention_and_recurrent_kernels_of_published_sizes_fit_and_do_not_spill(name):
    found = compiled(name, OTHERS[name]._replace(programs=1))
    if name.startswith("attention"):
        assert "cp.async.cg.shared.global" in found.ptx
    elif name.startswith("rows"):
        assert found.registers <= 80
    else:
        assert found.shared <= SHARED and found.constants["BLOCK"] == recurrent.BLOCK


@pytest.mark.whole
def test_with_wgmma_128_rows_of_int4_fit_and_no_product_is_waited_for_alone():
    """ptxas waits behind every wgmma, 8 of them, where a path leads past the loop."""
    with sums.made_for_named("sm_90"):
        found = compiled("large int4", Limits(), native=True)
    assert found.constants["ROWS"] == large_m.WGMMA_ROWS and 0 < found.a_weight <= 6.6
    assert found.loop.count("HGMMA") == 8 and found.loop.count("WARPGROUP") == 3  # two arrivals, one wait


@pytest.mark.whole
def test_the_int4_kernel_of_many_rows_fits_with_tcgen05():
    with sums.made_for_named("sm_100"):
        compiled("large int4", Limits(arch="sm_100"), native=True)


@pytest.mark.whole
@pytest.mark.parametrize(("width", "codes", "most"), [(64, False, 440), (512, False, 2700), (256, True, 1300)])
def test_with_wgmma_a_chunk_of_attention_fits_and_waits_once_for_each_product(width, codes, most):
    """``most`` bounds the issue slots of a scheduler for 64 rows and 64 keys; code without ``wgmma`` takes 490 to
    4,500."""
    program = attention_chunk.wgmma_program(width, codes)
    launch = attends_in_chunk(width, 8, 512, codes, **program, ROWS=program["BLOCK_M"], PLAIN_ROWS=0)
    found = compiled("", Limits(programs=1, launch=(CHUNK, launch)), native=True)
    assert "HGMMA" in found.loop and "HMMA" not in found.loop
    assert found.loop.count("WARPGROUP") <= 4  # ptxas would wait for each instruction if it saw another use of the sums
    block = found.constants["BLOCK_M"] * found.constants["BLOCK_N"]
    assert len(found.loop) * found.threads / 128 * (64 * 64) / block <= most


@pytest.mark.whole
@pytest.mark.parametrize("rows", [16, 32])
def test_requests_to_l2_change_neither_the_loop_nor_the_programs_on_a_gpu(rows):
    """A program of bfloat16 asks for its first blocks before the wait and loads nothing there; after its loop it asks
    for the next weight."""
    plain = usage(OF_BF16, of_bf16(rows), "sm_90")
    found = usage(OF_BF16, of_bf16(rows, following=BF16, early=True), "sm_90")
    programs = [BY_ARCH["sm_90"].resident(each.registers, each.shared, each.threads) for each in (plain, found)]
    assert programs[0] == programs[1] and found.registers <= plain.registers + 4 and found.stack == 0
    assert len(found.loop) <= 1.03 * len(plain.loop) and found.loop.count("BAR") == plain.loop.count("BAR")
    before, after = found.ptx.split("griddepcontrol.wait;")
    assert "griddepcontrol.launch_dependents" in before
    assert before.count(REQUEST) == after.count(REQUEST) == 1
    assert not any(each in before for each in ("ld.global", "cp.async.cg", "st.global", "atom."))
    assert after.rindex("mma.sync") < after.index(REQUEST) < after.index("atom.")
    assert REQUEST not in plain.ptx and "griddepcontrol" not in plain.ptx
    assert "atom.global.gpu.acq_rel.add" in plain.ptx


@pytest.mark.parametrize("activation", ["", pytest.param(sums.GELU_TANH, marks=pytest.mark.whole)])
def test_an_early_launch_over_records_touches_only_weights_before_its_wait(activation):
    given = on_meta(4, 8192, dtype=torch.bfloat16), on_meta(168, 32, 4736), sums.counters("meta"), activation

    def launch(kernel: object) -> None:
        int4_records._launch_records(kernel, *given, OF_NEXT=4096, **int4_records.LEVERS)

    found = compiled("", Limits(2.25, 3, 16, launch=(OF_RECORDS, launch)))
    assert 0 < found.a_weight <= 2.25 and not {"LDL", "STL"} & set(found.loop)
    before, after = found.ptx.split("griddepcontrol.wait;")
    assert "griddepcontrol.launch_dependents" in before
    assert before.count(REQUEST) == 2 and "ld.global" in before
    assert "st.global" not in before and "atom" not in before and "atom" in after
