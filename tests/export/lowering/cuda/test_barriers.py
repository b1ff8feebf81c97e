"""Memory that threads share without a barrier is found in a kernel's PTX, without false reports. The cases are our
kernels, and PTX into which faults are put one at a time."""

import re
from unittest.mock import patch

import pytest
import torch
import triton
import triton.language as tl
from machine_code.barriers import NO_BARRIER, faults
from ptx_of_kernels import KERNELS, edited, names_of, on_meta, ptx_of

from eagle3.export.lowering.cuda.kernels import attention, large_m, sums

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: it is Triton's target")
ARCH = "sm_90"


def lines(name, kernel=None):
    """Return the faults found in a kernel with this name, or in another kernel in its place."""
    own, launch = KERNELS[name]
    return list(map(str, faults(ptx_of(kernel or own, launch, ARCH), names_of(own))))


# Kernels with a fault put in


def test_an_unsplit_part_of_attention_needs_a_barrier_of_its_own(tmp_path):
    """A call of more than 16 rows is not split, so it has no counter, and no counter's barrier orders its threads."""
    barrier = "        else:\n            tl.debug_barrier()  # what one thread stored, another loads\n"
    without = edited(attention._attention_kernel, barrier, "", tmp_path)
    assert lines("attention") == []
    _, launch = KERNELS["attention"]
    ptx = ptx_of(without, launch, ARCH)
    stored = ptx.rindex("st.global", 0, ptx.rindex("cp.async.c"))  # behind it shared memory is used again
    ptx = ptx[:stored] + re.sub(r"bar\.sync\s+0;", "", ptx[stored:])
    found = "".join(map(str, faults(ptx, names_of(attention._attention_kernel))))
    assert "(PARTS) is stored, then loaded by other threads, with no barrier" in found


def test_queries_that_a_kernel_stores_and_loads_need_a_barrier(tmp_path):
    call = "        )  # fmt: skip\n"
    without = edited(attention._attention_kernel, call + "        tl.debug_barrier()\n", call, tmp_path)
    (found,) = lines("attention of a product", kernel=without)
    assert re.match(r"argument 0 \(Q\) is stored, then loaded .*no barrier.*: PTX line \d+ \(heads.py:\d+\) and", found)


def test_a_kernel_with_a_fault_leaves_the_ops_as_they_are(tmp_path):
    """Otherwise the next call of the op would end the process, or report that there is no memory."""
    edited(attention._attention_kernel, "what one thread stored, another loads", "the same", tmp_path)
    assert torch.ops.eagle3.attention.default is attention.attention._opoverload


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("name", "order", "weaker"),
    [
        ("bf16", 'sem="acq_rel"', 'sem="relaxed"'), ("attention", 'scope="gpu"', 'scope="cta"'),
        ("large int8", 'sem="acq_rel"', 'sem="relaxed"'),
    ],
)  # fmt: skip
def test_sums_of_other_blocks_need_an_atomic_that_releases_and_acquires_for_the_gpu(name, order, weaker, tmp_path):
    weak = edited(sums.arrive, order, weaker, tmp_path)
    with (
        patch.object(sums, "arrive", weak),
        patch.object(large_m, "arrive", weak),
        patch.object(attention, "arrive", weak),
    ):
        found = lines(name)
    assert any("(PARTS)" in line and "does not release and acquire for the GPU" in line for line in found)


@pytest.fixture(scope="module", params=["int4 of a gate", "attention of a product", "large q4_k"])
def counting(request):
    """The argument names and the PTX of a kernel whose blocks count arrivals."""
    kernel, launch = KERNELS[request.param]
    ptx = ptx_of(kernel, launch, "sm_89")
    assert faults(ptx) == []
    return names_of(kernel), ptx


def without_barrier(ptx, before):
    """Return PTX without the last barrier before the atomic, or without the barriers after it."""
    barriers = [found.span() for found in re.finditer(r"^\s*bar\.sync[^;]*;\n", ptx, re.MULTILINE)]
    atomic = ptx.index("atom.global")
    if not before:
        return ptx[:atomic] + re.sub(r"bar\.sync\s+0;", "", ptx[atomic:])
    start, end = max(s for s in barriers if s[0] < atomic)
    return ptx[:start] + ptx[end:]


def test_a_barrier_must_lie_between_stores_and_the_counting_atomic(counting):
    names, ptx = counting
    found = list(map(str, faults(without_barrier(ptx, before=True), names)))
    assert any(
        "(PARTS) is stored by all threads, then released by an atomic of one, with no barrier" in f for f in found
    )


def test_a_barrier_must_lie_between_the_counting_atomic_and_the_last_blocks_loads(counting):
    names, ptx = counting
    found = list(map(str, faults(without_barrier(ptx, before=False), names)))
    assert any("(PARTS) is stored by other blocks, then loaded with no barrier after the atomic" in f for f in found)


def test_an_instruction_that_orders_only_some_threads_is_not_a_barrier(counting):
    names, ptx = counting
    for weaker in ("bar.sync 1, 64;", "bar.warp.sync -1;", "@%p1 bar.sync 0;", "membar.gl;"):
        assert faults(re.sub(r"bar\.sync\s+0;", weaker, ptx), names)
    assert not faults(re.sub(r"bar\.sync\s+0;", "barrier.cta.sync 0;", ptx), names)


def test_a_load_for_constants_of_stored_memory_is_a_fault(counting):
    names, ptx = counting
    if "PARTS" in names.values() and "ld.global.cg" not in ptx:
        pytest.skip("its sums are loaded by asynchronous copies, which have no such form")
    found = "".join(map(str, faults(ptx.replace("ld.global.cg", "ld.global.nc"), names)))
    assert "(PARTS) is stored, then loaded by a load that is for constants (ld.global.nc)" in found


# Which threads meet


@triton.jit
def _same_place(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x + at, at)
    tl.store(y + at, tl.load(x + at, cache_modifier=".cg"))


@triton.jit
def _reversed(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x + at, at)
    tl.store(y + at, tl.load(x + N - 1 - at, cache_modifier=".cg"))


def found_in(kernel, *arguments, **constants):
    ptx = ptx_of(kernel, lambda recorded: recorded[(1,)](*arguments, num_warps=4, **constants), "sm_89")
    return [fault.what.split(",")[0] + ", " + fault.what.split(" ")[2] for fault in faults(ptx)]


X = on_meta(4096, dtype=torch.int32)


def test_only_stores_and_loads_of_two_threads_are_reported():
    assert found_in(_same_place, X, X, N=512) == []
    assert found_in(_reversed, X, X, N=512) == ["stored, loaded"]


@triton.jit
def _in_place(x, n, STEP: tl.constexpr, N: tl.constexpr):
    at = tl.program_id(0) * n + tl.arange(0, N)
    for begin in range(0, n, STEP):
        tl.store(x + begin + at, tl.load(x + begin + at, mask=at < n) + 1, mask=at < n)


def test_loop_steps_shorter_than_a_tile_overlap():
    assert found_in(_in_place, X, 4096, STEP=1024, N=1024) == []
    found = found_in(_in_place, X, 4096, STEP=960, N=1024)
    assert set(found) == {"stored, loaded", "loaded, stored", "stored by two threads, two"}


@triton.jit
def _few_in_place(x, y, N: tl.constexpr, APART: tl.constexpr):
    # A block has 128 threads; with fewer elements, each is stored by one of them.
    at = tl.arange(0, N)
    loaded = tl.load(x + at)
    if APART:
        tl.store(x + N - 1 - at, loaded)
    else:
        tl.store(x + at, loaded * tl.sum(loaded))
        tl.store(y, tl.sum(loaded))


def test_loads_of_threads_that_store_nothing_are_not_reported():
    assert found_in(_few_in_place, X, on_meta(1), N=32, APART=False) == []
    assert found_in(_few_in_place, X, X, N=64, APART=True) == ["loaded, stored"]


@triton.jit
def _tile(x, m, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, BOUND: tl.constexpr):
    # Stores the rows before m of a tile, and the columns before BOUND. The matrix has WIDTH columns.
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    row = tl.program_id(0) % tl.num_programs(1) * ROWS + tl.arange(0, ROWS)[:, None]
    tl.store(x + row * WIDTH + column, row + column, mask=(row < m) & (column < BOUND))


def test_a_tile_wider_than_its_matrix_overlaps_another_row_only_if_its_mask_permits_it():
    tile = {"ROWS": 16, "COLUMNS": 64, "WIDTH": 40}
    assert found_in(_tile, X, 77, BOUND=40, **tile) == []
    assert found_in(_tile, X, 77, BOUND=48, **tile) == ["stored by two threads, two"]


@pytest.mark.parametrize(
    ("body", "races"),
    [
        ("st.global.b32 [ %rd3 + 0 ], { %r1 };\nst.global.b32 [ %rd4 + 0 ], { %r1 };", True),
        ("st.global.b32 [ %rd3 + 0 ], { %r1 };\nbar.sync 0;\nst.global.b32 [ %rd4 + 0 ], { %r1 };", False),
        ("st.global.b32 [ %rd3 + 0 ], { %r1 };\nst.global.b32 [ %rd3 + 0 ], { %r2 };", False),  # a thread's own
        ("st.global.b32 [ %rd3 + 0 ], { %r1 };\nst.global.b32 [ %rd5 + 0 ], { %r1 };", False),
        ("st.global.b32 [ %rd3 + 0 ], { 0 };\nst.global.b32 [ %rd4 + 0 ], { 0 };", False),  # the same value
        ("st.global.b32 [ %rd3 + 0 ], { 0 };\nst.global.b32 [ %rd4 + 0 ], { 1 };", True),
        ("st.global.b32 [ %rd3 + 0 ], { %r1 };\nst.global.v2.b32 [ %rd3 + 4 ], { %r1, %r1 };", True),
        ("st.global.b32 [ %rd3 + 0 ], { %r1 };\nst.global.v2.b32 [ %rd3 + 256 ], { %r1, %r1 };", True),  # itself
        ("st.global.b32 [ %rd1 + 0 ], { %r1 };", True),
        ("@%p1 st.global.b32 [ %rd1 + 0 ], { %r1 };", False),  # one thread alone
        ("@%p1 st.global.b32 [ %rd1 + 0 ], { %r1 };\n@!%p1 st.global.b32 [ %rd1 + 4 ], { 2 };", False),
        ("@%p1 st.global.b32 [ %rd1 + 0 ], { %r1 };\n@!%p1 st.global.b32 [ %rd4 + 0 ], { %r1 };", True),
        ("@%p2 st.global.b32 [ %rd3 + 0 ], { %r1 };\n@%p2 st.global.b32 [ %rd4 + 0 ], { %r1 };", True),
        ("@%p2 st.global.b32 [ %rd3 + 0 ], { %r1 };\n@!%p2 st.global.b32 [ %rd4 + 0 ], { %r1 };", True),
        ("mad.wide.u32 %rd6, %r4, 4, %rd1;\nst.global.b32 [ %rd6 + 0 ], { %r1 };", False),  # not known where
        ("$L__BB0_1:\nst.global.b32 [ %rd3 + 0 ], { %r1 };\n@%p2 bra $L__BB0_1;", False),
    ],
)
def test_stores_of_two_threads_to_one_place_need_a_barrier_between_them(body, races):
    loaded = "ld.global.b32 { %r4 }, [ %rd5 + 512 ];\nsetp.eq.b32 %p2, %r4, 0;\n"
    found = [fault.what for fault in faults(HEAD + loaded + body + "\nret;\n}\n")]
    assert [what for what in found if what.startswith("stored by two")] == [
        "stored by two threads, " + NO_BARRIER
    ] * races


# Paths

HEAD = """
.visible .entry k(
.param .u64 .ptr .global .align 1 k_param_0,
.param .u64 .ptr .global .align 1 k_param_1
)
.reqntid 64
{
ld.param.b64 %rd1, [k_param_0];
ld.param.b64 %rd2, [k_param_1];
mov.u32 %r1, %tid.x;
setp.eq.b32 %p1, %r1, 0;
mad.wide.u32 %rd3, %r1, 4, %rd1;
xor.b32 %r2, %r1, 32;
mad.wide.u32 %rd4, %r2, 4, %rd1;
mad.wide.u32 %rd5, %r2, 4, %rd2;
"""
STORE, LOAD, BARRIER = "st.global.b32 [ %rd3 + 0 ], { %r1 };", "ld.global.b32 { %r3 }, [ %rd4 + 0 ];", "bar.sync 0;"
COPY, OTHER = "cp.async.cg.shared.global [ %r9 + 0 ], [ %rd4 + 0 ], 0x10;", "ld.global.b32 { %r3 }, [ %rd5 + 0 ];"
ARMS = "{store}\n@%p1 bra $L__BB0_1;\n{one}\nbra.uni $L__BB0_2;\n$L__BB0_1:\n{other}\n$L__BB0_2:\n{load}\nret;"
LOOP = "$L__BB0_1:\n{load}\n{one}\n{store}\n{other}\n@%p1 bra $L__BB0_1;\nret;"
SKIPPED = "{store}\n@%p1 bra $L__BB0_1;\n{one}\n$L__BB0_1:\n{load}\nret;"
# As inline assembly has it: a label of its own scope, twice
WAIT = "{{\n.reg .pred done;\nwait:\nmbarrier.try_wait.parity.shared.b64 done, [%r9], 0;\n@!done bra.uni wait;\n}}\n"
AGAIN = WAIT + "{store}\n{one}\n" + WAIT + "{load}\nret;"
HANDED = "st.shared.b64 [ %r9 + 0 ], %rd4;\nld.shared.b64 %rd6, [%r9];\n"
HANDED += STORE + "\nld.global.b32 { %r3 }, [ %rd6 + 0 ];\nret;"
BESIDE = "st.shared.b64 [ %r9 + 0 ], %rd4;\nst.shared.b32 [ %r9 + 8 ], %r2;\nld.shared.b32 %r4, [%r9 + 8];\n"
BESIDE += "mad.wide.u32 %rd6, %r4, 4, %rd2;\n" + STORE + "\nld.global.b32 { %r3 }, [ %rd6 + 0 ];\nret;"
CHOSEN = "selp.b64 %rd6, %rd4, %rd5, %p1;\n" + STORE + "\nld.global.b32 { %r3 }, [ %rd6 + 0 ];\nret;"


@pytest.mark.parametrize(
    ("body", "whats"),
    [
        (ARMS.format(store=STORE, one=BARRIER, other=BARRIER, load=LOAD), []),
        (ARMS.format(store=STORE, one="", other=BARRIER, load=LOAD), ["stored, then loaded"]),
        (ARMS.format(store=STORE, one=BARRIER, other="", load=LOAD), ["stored, then loaded"]),
        (ARMS.format(store=STORE, one=BARRIER, other="", load=COPY), ["stored, then loaded"]),
        (ARMS.format(store=STORE, one=BARRIER, other="", load=OTHER), []),
        (ARMS.format(store=STORE, one=BARRIER, other="ret;", load=LOAD), []),
        (SKIPPED.format(store=STORE, one=BARRIER, load=LOAD), ["stored, then loaded"]),
        (LOOP.format(store=STORE, one=BARRIER, other=BARRIER, load=LOAD), []),
        (LOOP.format(store=STORE, one=BARRIER, other="", load=LOAD), ["stored, then loaded"]),
        (LOOP.format(store=STORE, one="", other=BARRIER, load=LOAD), ["loaded, then stored"]),
        (CHOSEN, ["stored, then loaded"]),
        (HANDED, ["stored, then loaded"]),  # the pointer goes through shared memory
        (HANDED.replace("b64 %rd6", "v2.b64 {%rd6, %rd7}"), ["stored, then loaded"]),
        (f"{STORE}\ncp.async.bulk.prefetch.L2.global [ %rd4 ], 64;\nret;", []),  # no thread sees what is asked for
        (BESIDE, []),  # an index of another tensor goes there too
        (AGAIN.format(store=STORE, one=BARRIER, load=LOAD), []),
        (AGAIN.format(store=STORE, one="", load=LOAD), ["stored, then loaded"]),
    ],
)
def test_a_path_from_a_store_to_a_load_without_a_barrier_is_reported(body, whats):
    assert [fault.what.split(" by ")[0] for fault in faults(HEAD + body + "\n}\n")] == whats


@pytest.mark.parametrize(
    "unread",
    [
        "ld.b32 { %r3 }, [ %rd4 + 0 ];",
        "cp.async.bulk.global.shared::cta.bulk_group [ %rd3 ], [ %r1 ], 64;",
        "brx.idx %r1, $L_table;",
        "call.uni elsewhere, (param0);",
        "ld.global.b32 { %r3 }, [ %rd9 + 0 ];",
    ],
)
def test_a_ptx_instruction_that_is_not_understood_is_named(unread):
    with pytest.raises(ValueError, match=r"PTX line \d+: .* (not supported|unknown)"):
        faults(HEAD + STORE + "\n" + unread + "\n" + STORE + "\nret;\n}\n")
