"""What a call of a CUDA method costs at the least, counted without a GPU: launches, machine code, bytes.

The exporter recorded each launch with its grid and the bytes that it takes (``export.json``); the libraries have the
kernels' machine code (``sass.py``) and PTX (``ptx.py``). A kernel's time is no less than the longest of

- memory: weights, and other tensors that no L2 holds, over the GPU's bandwidth;
- issue: warp instructions over four schedulers an SM, of its main loop where it multiplies weights;
- latency: the same bytes, no more of them under way at once than the blocks that fit on the GPU have requested.

KV caches are left out, being read as far as there are tokens. Kernels run one after the other; between them lie
``LAUNCH_SECONDS`` unless a CUDA graph was captured. Nothing here was measured, and a GPU will take longer.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from eagle3.runner.artifact.cuda_delegates import cuda_kernels
from eagle3.runner.artifact.cuda_library import KERNEL_KINDS, kind_of
from eagle3.runner.artifact.record import read_export
from eagle3.runner.contract import DRAFT_DECODE, LAUNCHES, SPECULATE, TARGET_VERIFY, Metadata
from eagle3.runner.hardware.gpus import GPUS, Gpu, gpus_of
from eagle3.runner.machine_code.ptx import Load, loads
from eagle3.runner.machine_code.sass import Code, Loop, read_codes

LAUNCH_SECONDS = 2e-6
"""From the end of a kernel to the work of the next, without a CUDA graph: commonly measured as 2 to 4 us."""
LATENCY_SECONDS = 0.5e-6
"""From a load of a busy GPU to its data."""
WARP, SCHEDULERS = 32, 4


def cost_of(model: Path, metadata: Metadata, names: tuple[str, ...]) -> dict[str, Any]:
    """``cost`` of an artifact's ``model.pte``, on the GPUs of these names or else on those it was compiled for.

    Raises ValueError where the exporter recorded no launches, or no GPU of the artifact's architecture is known.
    """
    launches = launches_of(read_export(model.parent), str(model))
    arch = metadata.manifest.get("cuda_arch")
    gpus = [GPUS[name] for name in names] or gpus_of(arch)
    if not gpus:
        raise ValueError(f"no GPU of {arch} is in the table: type --gpu with one of {', '.join(GPUS)}")
    return cost(launches, cuda_kernels(model), gpus, steps=math.ceil(metadata.chain_len / metadata.proposals))


def launches_of(record: Mapping[str, Any], model: str) -> dict[str, dict[str, Any]]:
    """What the exporter recorded, by method. Raises ValueError where it did not."""
    if LAUNCHES not in record:
        lacks = "its export.json does not say them" if record else "there is no export.json beside it"
        raise ValueError(
            f"{model}: --cost needs the launches of each method, and {lacks} (an earlier eagle3-export, or no CUDA "
            "artifact): export it again for CUDA"
        )
    return record[LAUNCHES]


def cost(
    launches: Mapping[str, Mapping[str, Any]],
    kernels: Mapping[str, Mapping[str, bytes]],
    gpus: list[Gpu],
    steps: int,
) -> dict[str, Any]:
    """``methods``, and the ``round``: a ``target_verify`` and ``steps`` calls of ``draft_decode``, or one call of the
    method that does all of it. Times are in seconds.

    ``kernels``: fatbins by method and name. Raises ValueError for one that is not there, or does not fit on a GPU.
    """
    codes = read_codes(fatbin for named in kernels.values() for fatbin in named.values())
    methods = {}
    for method, recorded in launches.items():
        missing = {entry["kernel"] for entry in recorded["launches"]} - kernels.get(method, {}).keys()
        if missing:
            raise ValueError(f"{method} has no kernel {min(missing)}, which export.json has: of another export")
        found = [
            _launch(entry, recorded["rows"], codes[kernels[method][entry["kernel"]]], gpus)
            for entry in recorded["launches"]
        ]
        methods[method] = _method(recorded, found, gpus)
    return {
        "assumed": {"launch_seconds": LAUNCH_SECONDS, "latency_seconds": LATENCY_SECONDS},
        "methods": methods,
        "round": _round(methods, gpus, steps),
    }


def _round(methods: Mapping[str, Any], gpus: list[Gpu], steps: int) -> dict[str, Any]:
    """Whatever its calls, a round reads the target's weights once and the draft's once a step."""
    apart = {TARGET_VERIFY: 1, DRAFT_DECODE: steps}
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
    for gpu in gpus:
        least = sum(entry["count"] * max(entry["seconds"][gpu.name].values()) for entry in found)
        bounds[gpu.name] = _bound(recorded["weight_bytes"] / gpu.bandwidth, least, total * LAUNCH_SECONDS)
    return {
        "rows": recorded["rows"],
        "weight_bytes": recorded["weight_bytes"],
        "launches": by_kind | {"all": total},
        "kernels": found,
        "bounds": bounds,
    }


def _bound(limit: float, least: float, launching: float) -> dict[str, float]:
    """``limit``: each weight read once; ``bound``: one kernel after the other in a CUDA graph, without gaps."""
    both = least + launching
    return {
        "limit": limit,
        "bound": least,
        "bound_with_launches": both,
        "share_of_limit": limit / least if least else 1.0,
        "share_with_launches": limit / both if both else 1.0,
    }


def _launch(entry: Mapping[str, Any], rows: int, code: Code, gpus: list[Gpu]) -> dict[str, Any]:
    """A recorded launch, and what its kernel's code and the GPUs make of it."""
    products, warps = entry["products"], entry["threads"] // WARP
    loop, passes = main_loop(code, products, warps) if products else (None, 1)
    if loop:  # ``passes`` iterations of the source are one of the machine code
        per_weight = loop.instructions * warps * WARP / (passes * products["weights"])
        instructions = loop.instructions * warps * products["iterations"] / passes
        thread_bytes = loop.copy_bytes * loop.ahead + loop.load_bytes // passes
    else:
        per_weight, thread_bytes = None, code.load_bytes
        instructions = code.instructions * warps * math.prod(entry["grid"])
    in_flight = thread_bytes * entry["threads"]
    return {
        **entry,
        "kind": kind_of(entry["kernel"]),
        "registers": code.registers,
        "spill_bytes": code.spill_bytes,
        "instructions_per_weight": per_weight,
        "bytes_in_flight": in_flight,
        "lines": _lines(loads(code.ptx, entry["grid"], rows)),
        "loop": loop and asdict(loop),
        "seconds": {gpu.name: _seconds(entry, code.registers, instructions, in_flight, gpu) for gpu in gpus},
    }


def _lines(found: tuple[Load, ...]) -> dict[str, Any] | None:
    """Of a warp's load the mean ``lines`` of L1 and ``sectors``, and the ``fewest`` lines; each load as well."""
    if not found:
        return None
    return {
        "lines": fmean(load.lines for load in found),
        "fewest": fmean(load.fewest for load in found),
        "sectors": fmean(load.sectors for load in found),
        "loads": [asdict(load) | {"count": count} for load, count in Counter(found).items()],
    }


def main_loop(code: Code, products: Mapping[str, int], warps: int) -> tuple[Loop | None, int]:
    """The loop that does a kernel's products, and how many iterations of its source a pass through it does.

    A kernel may have one for 8 rows and one for 16: it is the one that multiplies least of those that do enough.
    """
    needed = products["multiply_adds"] / warps
    enough = [loop for loop in code.loops if loop.multiply_adds >= needed]
    if not enough:
        return None, 1
    loop = min(enough, key=lambda loop: (loop.multiply_adds, loop.instructions))
    return loop, int(loop.multiply_adds // needed)


def _seconds(
    entry: Mapping[str, Any], registers: int, instructions: float, in_flight: int, gpu: Gpu
) -> dict[str, float]:
    size = entry["weight_bytes"] + sum(size for size in entry["buffer_bytes"] if size > gpu.l2_cache)
    on_one = gpu.resident(registers, entry["shared_bytes"], entry["threads"])
    if not on_one:
        takes = f"{entry['threads']} threads of {registers} registers, {entry['shared_bytes']:,} bytes of shared memory"
        raise ValueError(f"{entry['kernel']} does not fit on {gpu.name} ({takes}): type another --gpu")
    blocks = min(math.prod(entry["grid"]), gpu.multiprocessors * on_one)
    return {
        "memory": size / gpu.bandwidth,
        "issue": instructions / (gpu.multiprocessors * SCHEDULERS * gpu.clock),
        "latency": LATENCY_SECONDS * size / (blocks * in_flight) if in_flight else 0.0,
    }
