"""A lower bound for the time of a CUDA method's call without a GPU: from launches, machine code and bytes.

The exporter recorded each launch with its grid, its constants and the bytes that it reads (``export.json``). The
libraries have the kernels' machine code (``sass.py``). A kernel takes at least the longest of

- memory: the bytes of weights, and of other tensors larger than L2, divided by the GPU's bandwidth;
- issue: the warp instructions divided by four schedulers per SM, or those of the ALU divided by half as many up to
  sm_90, whichever takes longer; for a kernel with a matmul, those of its main loop;
- tensor: the multiply-adds of a matmul's main loop, divided by those of the GPU's tensor cores; on sm_90 those are more
  by HGMMA (``wgmma``) than by HMMA (``mma.sync``);
- latency: the same bytes, with at most as many in flight as the blocks that fit on the GPU have requested; after
  attention, the loads that add the partial sums of its programs, in the last program or in a separate launch.

KV caches are read up to ``context`` tokens, or a sliding layer's window if that is shorter. Without a context they are
left out. Recurrent states, whose size does not depend on the context, are counted with the caches. Rows are assumed to
choose different experts as far as possible, which reads the most weights; a call whose rows share experts may take
less. Kernels run one after the other, with ``LAUNCH_SECONDS`` between them unless a CUDA graph is replayed. A bound is
not a measurement, and a GPU takes longer.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from machine_code.libraries import cuda_kernels
from machine_code.sass import Capability, Code, Loop, read_codes_for
from machine_code.work import Products, work_of

from eagle3.runner.artifact.cuda_library import KERNEL_KINDS, kind_of
from eagle3.runner.artifact.record import read_export
from eagle3.runner.contract import DRAFT_DECODE, LAUNCHES, SPECULATE, TARGET_VERIFY, Metadata
from eagle3.runner.system.gpus import GPUS, Gpu, gpus_of, launch_on

LAUNCH_SECONDS = 2e-6
"""Time from the end of a kernel to the work of the next, without a CUDA graph; commonly measured as 2 to 4 us."""
MMA_SYNC_SHARE = 0.63
"""The share of Hopper's tensor cores that ``mma.sync`` reaches (Luo et al., "Benchmarking and Dissecting the Nvidia
Hopper GPU Architecture via Microbenchmarking", 2024)."""
LATENCY_SECONDS = 0.5e-6
"""The least latency of a load from memory. On a busy H200 the first one took 1 us."""
WARP, SCHEDULERS = 32, 4
SUMS_AHEAD = 2
"""The number of chunks whose sums attention's last program loads at a time."""


def cost_of(model: Path, metadata: Metadata, names: tuple[str, ...], context: int = 0) -> dict[str, Any]:
    """Return ``cost`` of an artifact's ``model.pte`` after ``context`` tokens, on the named GPUs or else on those that
    it was compiled for.

    Raises ValueError if the exporter recorded no launches, if no GPU of the artifact's architecture is known, or for a
    context that the artifact does not take.
    """
    record = read_export(model.parent)
    if LAUNCHES not in record:
        raise ValueError(f"{model}: no export.json with launches is beside it: export it again for CUDA")
    launches = record[LAUNCHES]
    arch = metadata.manifest.get("cuda_arch")
    gpus = [GPUS[name] for name in names] or gpus_of(arch)
    if not gpus:
        raise ValueError(f"no GPU of {arch} is in the table: type --gpu with one of {', '.join(GPUS)}")
    if context > metadata.max_seq_len:
        raise ValueError(
            f"--context {context}: the artifact holds {metadata.max_seq_len} tokens: type as many or fewer"
        )
    steps = math.ceil(metadata.chain_len / metadata.proposals)
    return cost(launches, cuda_kernels(model), gpus, steps, Context(context, metadata.max_seq_len))


class Context(NamedTuple):
    """The ``tokens`` that the caches hold, and the most that they may hold (``max_seq_len``)."""

    tokens: int = 0
    most: int = 0

    def positions(self, slots: int) -> int:
        """Return the positions that a row attends to in a cache. A ring has fewer slots than the context, and twice as
        many as its window."""
        return min(self.tokens, slots // 2 if slots < self.most else slots)


NO_CONTEXT = Context()


class Issued(NamedTuple):
    """The warp instructions of a launch: ``all`` of them, and those of ``sass.ALU``. ``multiply_adds``: those of its
    matmul, by HGMMA if ``warp_group``."""

    all: float
    alu: float
    multiply_adds: float = 0.0
    warp_group: bool = False


def chunks(positions: int, chunk: int, equal: int) -> int:
    """Return the number of chunks into which attention divides ``positions``; see ``kernels/attention_sums.py`` of the
    exporter."""
    if not equal or positions <= equal * chunk:
        return math.ceil(positions / chunk)
    doublings = math.ceil(math.log2(positions / (equal * chunk)))
    begin = equal * chunk << (doublings - 1)
    return equal + (doublings - 1) * (equal // 2) + math.ceil((positions - begin) / (chunk << doublings))


def cost(
    launches: Mapping[str, Mapping[str, Any]],
    kernels: Mapping[str, Mapping[str, bytes]],
    gpus: list[Gpu],
    steps: int,
    context: Context = NO_CONTEXT,
) -> dict[str, Any]:
    """Return the bounds of ``methods`` and of a ``round``; times are in seconds.

    A round is one ``target_verify`` and ``steps`` calls of ``draft_decode``, or one ``speculate``. ``kernels`` holds
    fatbins by method and name. Raises ValueError if a kernel is missing or does not fit on a GPU.
    """
    fatbins = [fatbin for named in kernels.values() for fatbin in named.values()]
    codes = read_codes_for(fatbins, {gpu.capability for gpu in gpus})
    methods = {}
    for method, recorded in launches.items():
        missing = {entry["kernel"] for entry in recorded["launches"]} - kernels.get(method, {}).keys()
        if missing:
            raise ValueError(f"{method} has no kernel {min(missing)}, which export.json has: it is of another export")
        found = [
            _launch_on(gpus, entry, recorded["rows"], codes[kernels[method][entry["kernel"]]], context)
            for entry in recorded["launches"]
        ]
        methods[method] = _method(recorded, found, gpus)
    return {
        "assumed": {"launch_seconds": LAUNCH_SECONDS, "latency_seconds": LATENCY_SECONDS},
        "context": context.tokens,
        "methods": methods,
        "round": _round(methods, gpus, steps),
    }


def _round(methods: Mapping[str, Any], gpus: list[Gpu], steps: int) -> dict[str, Any]:
    """Return the calls, launches and bounds of a round. Its memory limit counts the target's weights and
    caches once and the draft's once per step, whichever methods it calls."""
    apart = {TARGET_VERIFY: 1} | ({DRAFT_DECODE: steps} if DRAFT_DECODE in methods else {})
    calls = {SPECULATE: 1} if SPECULATE in methods else apart

    def added(key: str, of: dict[str, int], gpu: Gpu) -> float:
        return sum(count * methods[name]["bounds"][gpu.name][key] for name, count in of.items())

    launches = sum(count * methods[name]["launches"]["all"] for name, count in calls.items())
    bounds = {
        gpu.name: _bound(added("limit", apart, gpu), added("bound", calls, gpu), launches * LAUNCH_SECONDS)
        for gpu in gpus
    }
    return {"calls": calls, "launches": launches, "bounds": bounds}


def _method(recorded: Mapping[str, Any], found: list[dict[str, Any]], gpus: list[Gpu]) -> dict[str, Any]:
    by_kind = dict.fromkeys(KERNEL_KINDS, 0)
    for entry in found:
        by_kind[entry["kind"]] += entry["count"]
    total = sum(by_kind.values())
    bounds = {}
    cache_bytes = sum(entry["count"] * entry["cache_bytes"] for entry in found)
    for gpu in gpus:
        least = sum(entry["count"] * max(entry["seconds"][gpu.name].values()) for entry in found)
        bounds[gpu.name] = _bound(
            (recorded["weight_bytes"] + cache_bytes) / gpu.bandwidth, least, total * LAUNCH_SECONDS
        )
    return {
        "rows": recorded["rows"],
        "weight_bytes": recorded["weight_bytes"],
        "cache_bytes": cache_bytes,
        "launches": by_kind | {"all": total},
        "kernels": found,
        "bounds": bounds,
    }


def _bound(limit: float, least: float, launching: float) -> dict[str, float]:
    """Return the times and their ratios. ``limit`` is the time to read each weight and each cache once. ``bound`` is
    the time of the kernels one after the other in a CUDA graph, without gaps."""
    both = least + launching
    return {
        "limit": limit,
        "bound": least,
        "bound_with_launches": both,
        "share_of_limit": limit / least if least else 1.0,
        "share_with_launches": limit / both if both else 1.0,
    }


def _launch_on(
    gpus: list[Gpu],
    entry: Mapping[str, Any],
    rows: int,
    codes: Mapping[Capability, Code],
    context: Context,
) -> dict[str, Any]:
    """Return a recorded launch with its time on each GPU, from the code that this GPU runs, and the figures of the
    code on the first GPU."""
    found = [
        _launch(launch_on(entry, on[0].arch), rows, code, on, context)
        for capability, code in sorted(codes.items(), key=lambda item: item[0] != gpus[0].capability)
        for on in [[gpu for gpu in gpus if gpu.capability == capability]]
    ]
    return found[0] | {"seconds": {name: time for each in found for name, time in each["seconds"].items()}}


def _launch(entry: Mapping[str, Any], rows: int, code: Code, gpus: list[Gpu], context: Context) -> dict[str, Any]:
    """Return a recorded launch together with the figures of its kernel's code and its time on each GPU."""
    warps, blocks, adding = entry["threads"] // WARP, math.prod(entry["grid"]), 0.0
    products, cache, sums, cache_bytes = work_of(entry, rows)
    buffer_bytes = entry["buffer_bytes"][1:] if sums or cache and cache.sum_bytes else entry["buffer_bytes"]
    if cache and context.tokens:
        positions = context.positions(cache.slots)
        cache_bytes = positions * cache.position_bytes
        tiles, heads, parts = entry["grid"]
        filled = min(parts, chunks(positions, cache.chunk, cache.equal))
        blocks = tiles * heads * filled
        if cache.sum_bytes and cache.sum_steps:
            adding = LATENCY_SECONDS * (1 + math.ceil(filled / SUMS_AHEAD) * cache.sum_steps)
        iterations = tiles * cache.row_tiles * heads * math.ceil(positions / cache.block)
        products = Products(0, cache.multiply_adds, iterations)
    if sums and context.tokens:
        filled = chunks(context.tokens, sums.chunk, sums.equal)
        adding = LATENCY_SECONDS * (2 + math.ceil(filled / sums.ahead))
        buffer_bytes = [*buffer_bytes, filled * sums.part_bytes]
    loop, passes = main_loop(code, products, warps) if products else (None, 1)
    if cache:  # tiles have powers of 2 rows and keys; a product that two groups of warps repeat is no pass
        passes = 1 << (passes.bit_length() - 1)
    if loop:  # one iteration in machine code is ``passes`` iterations in the source
        per_weight = loop.instructions * warps * WARP / (passes * products.weights) if not cache else None
        scale = warps * products.iterations / passes
        multiply_adds = loop.multiply_adds * scale
        issued = Issued(loop.instructions * scale, loop.alu * scale, multiply_adds, loop.warp_group)
        thread_bytes = loop.copy_bytes * loop.ahead + loop.load_bytes // passes
    else:
        per_weight, thread_bytes = None, code.load_bytes
        unrolled = products.multiply_adds * products.iterations if products else 0
        issued = Issued(code.instructions * warps * blocks, code.alu * warps * blocks, unrolled, code.warp_group)
    in_flight = thread_bytes * entry["threads"]
    seconds = {
        gpu.name: _seconds(entry, cache_bytes, buffer_bytes, blocks, code.registers, issued, in_flight, adding, gpu)
        for gpu in gpus
    }
    return {
        **entry,
        "cache_bytes": cache_bytes,
        "kind": kind_of(entry["kernel"]),
        "registers": code.registers,
        "spill_bytes": code.spill_bytes,
        "instructions_per_weight": per_weight,
        "bytes_in_flight": in_flight,
        "loop": loop and asdict(loop),
        "seconds": seconds,
    }


def main_loop(code: Code, products: Products, warps: int) -> tuple[Loop | None, int]:
    """Return the loop with a kernel's matmul, and how many iterations of the source one of its iterations does.

    A kernel may have a loop for 8 rows and one for 16. Of the loops with enough multiply-adds, this is the one with the
    fewest.
    """
    needed = products.multiply_adds / warps
    enough = [loop for loop in code.loops if loop.multiply_adds >= needed]
    if not enough:
        return None, 1
    loop = min(enough, key=lambda loop: (loop.multiply_adds, loop.instructions))
    return loop, int(loop.multiply_adds // needed)


def _alu_slots(gpu: Gpu) -> int:
    """Return the issue slots that an instruction of ``sass.ALU`` takes: its pipe is half as wide as a warp up to
    sm_90."""
    return 2 if gpu.arch <= 90 else 1


def _tensor_rate(gpu: Gpu, warp_group: bool) -> float:
    """Return the multiply-adds of a multiprocessor in a cycle by ``wgmma`` (``warp_group``) or ``mma.sync``."""
    return gpu.multiply_adds * (MMA_SYNC_SHARE if gpu.arch == 90 and not warp_group else 1)


def _seconds(
    entry: Mapping[str, Any],
    cache_bytes: int,
    buffer_bytes: list[int],
    blocks: int,
    registers: int,
    issued: Issued,
    in_flight: int,
    adding: float,
    gpu: Gpu,
) -> dict[str, float]:
    size = entry["weight_bytes"] + cache_bytes + sum(size for size in buffer_bytes if size > gpu.l2_cache)
    on_one = gpu.resident(registers, entry["shared_bytes"], entry["threads"])
    if not on_one:
        takes = f"{entry['threads']} threads of {registers} registers, {entry['shared_bytes']:,} bytes of shared memory"
        raise ValueError(f"{entry['kernel']} does not fit on {gpu.name} ({takes}): type another --gpu")
    blocks, cycles = min(blocks, gpu.multiprocessors * on_one), gpu.multiprocessors * gpu.clock
    return {
        "memory": size / gpu.bandwidth,
        "issue": max(issued.all, _alu_slots(gpu) * issued.alu) / (SCHEDULERS * cycles),
        "tensor": issued.multiply_adds / (_tensor_rate(gpu, issued.warp_group) * cycles),
        "latency": adding + (LATENCY_SECONDS * size / (blocks * in_flight) if in_flight else 0.0),
    }
