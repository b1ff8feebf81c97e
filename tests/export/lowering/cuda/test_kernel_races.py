"""No kernel has a race in any order of its programs; each fault put in by hand is found, with its line."""

import re
from collections import Counter
from pathlib import Path

import pytest
from kernel_faults import fault
from race_detector import Detector, Finding
from race_hooks import watching
from small_launches import SMALL, Small
from triton_interpreter import interpreted

from eagle3.export.lowering.cuda.kernels import (
    advance,
    attention,
    attention_chunk,
    attention_sums,
    bf16,
    heads,
    int8_matmul,
    k_quant_matmul,
    k_quants,
    large_m,
    recurrent,
    small_m,
    sums,
)
from eagle3.export.lowering.cuda.kernels.int4.records import kernel as int4_records
from eagle3.export.lowering.cuda.kernels.int4.tiles import kernel as int4
from eagle3.export.lowering.cuda.kernels.int4.tiles import matmul as int4_matmul

pytestmark = pytest.mark.races(())  # they watch for themselves


USERS = {
    sums: (small_m, bf16, int4, int4_records, k_quants, large_m, attention),
    large_m: (int4_matmul, int8_matmul, k_quant_matmul),
    heads: (attention,),
    attention_sums: (attention,),
    attention_chunk: (attention,),
}
"""Modules that import a module's kernels."""


def found(small: Small, *orders: str) -> Counter[Finding]:
    detector = Detector(orders or ("forward",))
    with watching(detector, of_arguments=True), interpreted(*small.modules):
        small.run()
    assert detector.launches
    return detector.findings


def assert_found(findings: Counter[Finding], what: str, line: str) -> None:
    """Assert a finding; ``what`` and ``line``, the line that it names, are regular expressions."""
    sites = {(each.what, site.text) for each in findings for site in (each.site, each.other) if site}
    assert any(re.search(what, kind) and re.search(line, text) for kind, text in sites), sites


@pytest.mark.first(2)
@pytest.mark.parametrize("name", SMALL)
def test_no_kernel_has_a_race_in_any_order_of_its_programs(name):
    findings = found(SMALL[name], "forward", "reversed", "delayed")
    assert not findings, "\n".join(map(str, findings))


ARRIVING = {
    "no barrier before it": ("    tl.debug_barrier()\n    return tl.atomic_add", "    return tl.atomic_add"),
    "relaxed": ('sem="acq_rel"', 'sem="relaxed"'),
    "for its own program": ('scope="gpu"', 'scope="cta"'),
    "without acquire": ('sem="acq_rel"', 'sem="release"'),
    "without release": ('sem="acq_rel"', 'sem="acquire"'),
}
"""The ways to take the counter of a tile wrongly."""
UNCOUNTED = ("attention", "attention in one part", "attention, a window in one part", "experts", "int8 experts")
UNCOUNTED += ("attention of a chunk", "attention of a product", "attention of a product, codes", "recurrent rows")
UNCOUNTED += ("recurrent chunk", "rows of Mamba 2", "chunk of Mamba 2", "rows of Kimi", "chunk of Kimi")
"""Launches in which no program waits for others to arrive."""
DIVIDED = [name for name in SMALL if name not in UNCOUNTED]
READS = r"tl\.load\((PARTS|STATS|sums) "
"""The loads of what other programs have left."""


@pytest.mark.first(5)
@pytest.mark.parametrize(
    ("wrong", "name"),
    [(wrong, "int4") for wrong in ARRIVING] + [(list(ARRIVING)[at % 5], name) for at, name in enumerate(DIVIDED)],
)
def test_unordered_partial_sums_are_found(name, wrong, tmp_path):
    """Every fault in one kernel, and one fault in each."""
    with fault(tmp_path, sums, *ARRIVING[wrong], *USERS[sums]):
        findings = found(SMALL[name])
    assert_found(findings, "a load and a store of two programs meet and nothing orders them", READS)


LOADED, STORED = "a load and a store of two programs", "stores of different bits of two programs"
IN_PROGRAM = "a load and a store of one program meet without a barrier"
UNWRITTEN, OUTSIDE = "bytes of torch.empty.* that nobody has written", "memory that the launch was not given"
COUNTER, LANES = "a counter holds", "lanes of one store write"
TAKEN = "an atomic and a store of two programs"
SMALL_STORE = "    tl.store(PARTS + part * size + at, total, mask=here)\n"
ADDED = "            tl.store(OUT + at, total.to(OUT.dtype.element_ty), mask=here)\n"
SET_BACK = f"{ADDED}            tl.store(counter, 0)\n"
SMALL_ARRIVES = "        if arrive(counter) == SPLITS - 1:\n"
LARGE_STORE = "        tl.store(sums + tl.program_id(2) * tiles * (128 * BLOCK_M), acc)\n"
LARGE_ARRIVES = "        if arrive(ARRIVED + at) == parts - 1:\n"
STATS = "        tl.store(STATS + mine * 2, top, mask=here)\n"
KEPT = "        tl.store(PARTS + mine[:, None] * D + d[None, :], acc, mask=within[:, None] & (d[None, :] < D))\n"
ARRIVES = "            arrived = arrive(counter)\n"
NEW_ROWS = "COS, SIN, K_WEIGHT, written, tl.maximum(start - written, 0),\n            end - written, kv_head, D,"
SEEN = '        scores = tl.where(seen, scores, float("-inf"))\n'


FAULTS = {
    # Of products of few rows
    "counter not set back": ("int8", sums, SET_BACK, ADDED, COUNTER, "tl.atomic_add"),
    "one counter for all tiles": ("int4", sums, " * tiles + tile\n", " * tiles\n", TAKEN, "tl.store.counter"),
    "sums of all parts at one place": (
        "K-quants", sums, "PARTS + part * size + at, total", "PARTS + 0 * size + at, total", STORED, "tl.store.PARTS",
    ),
    "one part too many": (
        "bf16", sums, "tl.static_range(1, SPLITS)", "tl.static_range(1, SPLITS + 1)", OUTSIDE, "total",
    ),
    "a program too early": (
        "bf16", sums, "arrive(counter) == SPLITS - 1", "arrive(counter) == 0", UNWRITTEN, "tl.load.PARTS",
    ),
    "every program adds": (
        "int4", sums, "arrive(counter) == SPLITS - 1", "arrive(counter) >= 0", LOADED, "tl.load.PARTS",
    ),
    "a whole tile's share of a divided one's gate": (
        "int4, gated, whole tiles", sums, "parts = tl.full((), SPLITS, tl.int32)", "parts = tl.full((), 1, tl.int32)",
        COUNTER, "tl.atomic_add",
    ),
    "a divided tile beyond the last": (
        "int4, whole tiles", sums, "(tile - WHOLE) % rest", "(tile - WHOLE) % tiles", OUTSIDE, "tl.",
    ),
    "gate without its other half": (
        "bf16, gated", sums, "arrive(counter) == gates + ups - 1", "arrive(counter) >= gates - 1", LOADED, READS,
    ),
    "rows behind the last": (
        "bf16", sums, SET_BACK, SET_BACK.replace(", mask=here", ""), OUTSIDE, "tl.store.OUT",
    ),
    # Of products of many rows
    "counter not set back, many rows": (
        "int4, many rows", large_m, "            tl.store(ARRIVED + at, 0)\n", "", COUNTER, "tl.atomic_add",
    ),
    "one counter for all, many rows": (
        "int8, many rows", large_m, "arrive(ARRIVED + at)", "arrive(ARRIVED)", TAKEN, "tl.store.ARRIVED",
    ),
    "one place for all, many rows": (
        "int8, many rows", large_m, "sums + tl.program_id(2) * tiles", "sums + 0 * tiles", STORED, "tl.store.sums",
    ),
    "counter set back too early": (
        "int4, many rows", large_m, LARGE_ARRIVES, "        tl.store(ARRIVED + at, 0)\n" + LARGE_ARRIVES, TAKEN,
        "tl.store.ARRIVED",
    ),
    # Of attention
    "no barrier in one part": (
        "attention, a window in one part", attention,
        "            tl.debug_barrier()  # what one thread stored, another loads\n",
        "            pass\n", IN_PROGRAM, "its_out = tl.load.PARTS",
    ),
    "counter not set back, attention": (
        "attention, a window", attention, "            tl.store(counter, 0, mask=parts > 1)\n", "", COUNTER,
        "tl.atomic_add",
    ),
    "one counter for all heads": (
        "attention, a window", attention, "ARRIVED + tile * KV_HEADS + kv_head", "ARRIVED + tile * KV_HEADS", TAKEN,
        "tl.store.counter",
    ),
    "parts at one place": ("attention", attention, "mine = at + part * whole", "mine = at", STORED, "tl.store.STATS"),
    "a part that nobody left": (
        "attention", attention_sums, "its = at + (begin + behind) * whole", "its = at + (begin + behind + 1) * whole",
        UNWRITTEN, "tl.load.STATS",
    ),
    "every program adds, attention": (
        "attention, a window", attention, "if arrived == parts - 1", "if arrived >= 0", LOADED, "tl.load.STATS",
    ),
    "rows behind the last, attention": (
        "attention", attention, STATS, STATS.replace("mask=here", "mask=here | True"), LANES, "tl.store.STATS",
    ),
    # Of attention to what a program has written itself
    "no barrier behind the new rows": (
        "attention of a product", attention, "        tl.debug_barrier()\n\n    q = tl.load", "\n    q = tl.load",
        IN_PROGRAM, "[qkv] = tl.load",
    ),
    "new rows written by one part": (
        "attention of a product", attention, NEW_ROWS,
        "COS, SIN, K_WEIGHT, written, 0, tl.where(part == 0, rows, 0), kv_head, D,", LOADED,
        "[kv] = tl.load",
    ),
    "scales written by one tile": (
        "attention of a product, codes", heads, "tl.store(K_SCALES + slot, k_scales, mask=here)",
        "tl.store(K_SCALES + slot, k_scales, mask=here & (tl.program_id(0) == 0))", LOADED, "scores",
    ),
    "queries written by one part": (
        "attention of a product", heads, "        here = row < rows\n",
        "        here = (row < rows) & (tl.program_id(2) == 0)\n", LOADED, "q = tl.load",
    ),
    "other keys by each tile": (
        "attention of a product", heads, "k.to(K.dtype.element_ty)", "(k + tl.program_id(0)).to(K.dtype.element_ty)",
        STORED, "tl.store.K ",
    ),
    # Of recurrent layers
    "a ring of half the slots": (
        "recurrent rows", recurrent, "(first + row) % SLOTS", "(first + row) % (SLOTS // 2)", LOADED, "key = tl.load",
    ),
    "decays in a ring of half the slots": (
        "rows of Kimi", recurrent, "logarithms = change + KEY", "logarithms = CHANGES + row % 16 * WIDTH + KEY", LOADED,
        "tl.load.LOGARITHMS",
    ),
    "decays of one channel for each head": (
        "rows of Kimi", recurrent, "head * D_K + k[:, None]", "head * D_K + 0 * k[:, None]", LANES,
        "tl.store.logarithms",
    ),
    "no barrier between two stores of a state": (
        "chunk of Kimi", recurrent, "    tl.debug_barrier()\n    tl.store(STATE", "    tl.store(STATE", IN_PROGRAM,
        "tl.store.STATE",
    ),
    "no barrier before the state": (
        "recurrent rows", recurrent, "    tl.debug_barrier()  # what one thread loaded, another may store\n", "",
        IN_PROGRAM, "tl.store.tile",
    ),
    "no barrier before the committed position": (
        "recurrent chunk", advance, "    tl.debug_barrier()\n", "", IN_PROGRAM, "tl.store.COMMITTED",
    ),
    "keys of other rows attended to": (
        "attention of a product, a ring", attention_chunk, SEEN, "", LOADED, "[kv] = tl.load",
    ),
}  # fmt: skip
"""The faults by name: the launch, the module, what stands there and what is put in its place; what is found, and at
which line."""


@pytest.mark.first(3)
@pytest.mark.parametrize("name", FAULTS)
def test_race_faults_put_in_by_hand_are_found(name, tmp_path):
    small, module, old, new, what, line = FAULTS[name]
    with fault(tmp_path, module, old, new, *USERS.get(module, ())):
        findings = found(SMALL[small])
    assert_found(findings, what, line)


BEHIND = {
    "few rows": ("int4", sums, SMALL_STORE, SMALL_ARRIVES),
    "many rows": ("int4, many rows", large_m, LARGE_STORE, LARGE_ARRIVES),
    "attention's sums": ("attention, a window", attention, STATS, ARRIVES),
    "attention's values": ("attention, a window", attention, KEPT, ARRIVES),
}
"""The launch, the module, a store, and the line that takes the counter."""


@pytest.mark.parametrize("name", BEHIND)
def test_a_store_after_the_counter_is_found(name, tmp_path):
    """The detector finds the fault by the loads of the last program, and by the results in other orders."""
    small, module, store, arrives = BEHIND[name]
    source = Path(module.__file__).read_text()
    between = source[source.index(store) : source.index(arrives) + len(arrives)]
    behind = between.replace(store, "")
    if arrives == ARRIVES:
        behind = behind.replace("        else:\n", "")
        behind += "".join(f"    {line}\n" for line in store.splitlines())
    else:
        taken = re.search(r"arrive\(.*?\)(?= ==)", arrives)[0]
        indent = " " * (len(arrives) - len(arrives.lstrip()))
        later = f"{indent}number = {taken}\n{indent}{store.lstrip()}{arrives.replace(taken, 'number')}"
        behind = behind.replace(arrives, later)
    with fault(tmp_path, module, between, behind, *USERS.get(module, ())):
        findings = found(SMALL[small])
    assert_found(findings, LOADED, READS)
