"""Estimates the matmuls of few rows in a round from the times of their kernels alone, as a GPU was measured.

``times.json`` has these times with card, driver, versions and date. It is an ``A.json`` of ``gpu_run.py``: that of a
later run takes its place. A weight of a measured size takes the measured time. Any other takes a fixed time and its
bytes divided by a speed, fitted to the sizes measured for the same variant and number of rows. The times are of
launches in a CUDA graph, so they include the gap before the next one. Nothing is fitted to a round, hence a measured
round tests the estimate.

Kernels that were not timed alone (attention, norms, experts, and any variant before its tournament) have no estimate,
and no time is scaled to another GPU.
"""

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_cubins import BULK
from gpu_variants import GEMMA, K_QUANTS, VARIANTS, made

from eagle3.export.lowering.cuda.kernels.int4.records.kernel import int4_records_small_m_kernel
from eagle3.runner.system.gpus import GPUS

TIMES = Path(__file__).with_name("times.json")
ROWS = 4, 16
"""The rows of the measurements, for up to 8 and for up to 16 rows."""
LEVERS = ("EARLY", "OF_NEXT", "AHEAD")
"""The constants that tell the variants of a kernel apart."""
RECORDS, HOPPER = int4_records_small_m_kernel.__name__, 90
SAME = 0.01
"""The largest difference of sizes that count as the same, as a share."""


class Times(NamedTuple):
    """The GPU (a name of ``GPUS``), a line about the measurement, and the times of kernels ``alone``: bytes of the
    weight and seconds, by variant and number of rows (4 or 16)."""

    gpu: str
    about: str
    alone: dict[tuple[str, int], list[tuple[int, float]]]


def read_times(file: Path = TIMES) -> Times:
    """Read ``times.json`` or an ``A.json``. Raises ValueError if its GPU is not in the table."""
    found = json.loads(file.read_text())
    machine, alone = found["machine"], {}
    gpu = next((name for name in GPUS if name in machine.get("gpu", "")), None)
    if gpu is None:
        raise ValueError(f"{file}: its GPU, {machine.get('gpu')}, is not in the table")
    for variant in VARIANTS:
        step = found["steps"].get(f"tournament: alone, {variant.name}", {"status": ""})
        for linear, rows in product(GEMMA, ROWS) if step["status"] == "ok" else ():
            if us := step["facts"].get(f"{linear}, {rows} rows, {variant.name}"):
                size = sum(part.nbytes for part in made(variant.format, *GEMMA[linear][:2], "meta"))
                alone.setdefault((variant.name, rows), []).append((size, max(us) / 1e6))
    about = f"{machine['gpu']}; PyTorch {machine['torch']}, Triton {machine['triton']}; {found['date']}"
    return Times(gpu, about, alone)


def variant_of(entry: Mapping[str, Any]) -> str | None:
    """Return the variant of a recorded launch, None for another kernel. Launches of records that have an entry of
    their own for sm_90 are by bulk copies there, which the times of Triton's kernel do not tell."""
    levers = {name for name in LEVERS if entry["constants"].get(name)}
    if entry["kernel"].startswith(RECORDS) and HOPPER in [card["first"] for card in entry.get("cards", ())]:
        levers.add(BULK)
    for variant in VARIANTS:
        same = entry["kernel"].startswith(variant.kernel.fn.__name__) and levers == variant.levers
        if same and K_QUANTS.get(variant.format) == entry["constants"].get("BITS"):
            return variant.name
    return None


def seconds_of(times: Times, entry: Mapping[str, Any], rows: int) -> float | None:
    """Return the estimate of one launch in a call of ``rows`` rows, None if its variant was not timed."""
    size, rows = entry["weight_bytes"], entry["arguments"].get("M", rows)
    few, more = ROWS
    timed = times.alone.get((variant_of(entry) or "", few if rows <= 8 else more), []) if rows <= more else []
    for measured, seconds in timed:
        if abs(size - measured) <= SAME * measured:
            return seconds
    if len({measured for measured, _ in timed}) < 2:
        return None
    fixed, each = fitted(timed)
    return fixed + each * size


def fitted(timed: list[tuple[int, float]]) -> tuple[float, float]:
    """Return the seconds of a launch and those of a byte, by least squares of relative errors."""
    sizes, seconds = torch.tensor(timed, dtype=torch.float64).T
    terms = torch.stack([torch.ones_like(sizes), sizes], 1) / seconds[:, None]
    fixed, each = torch.linalg.lstsq(terms, torch.ones_like(sizes)[:, None]).solution.flatten().tolist()
    return fixed, each


def estimate(found: Mapping[str, Any], times: Times) -> dict[str, Any] | None:
    """Return for a round the ``launches``, the ``bound`` and the ``seconds`` of each kind of kernel; its seconds are
    None if one of them was not timed. ``found``: of ``cost_of``. Returns None if it is not for the measured GPU."""
    parts: dict[str, dict[str, Any]] = {}
    for name, calls in found["round"]["calls"].items():
        method = found["methods"][name]
        for entry in method["kernels"]:
            if times.gpu not in entry["seconds"]:
                return None
            bound, seconds = max(entry["seconds"][times.gpu].values()), seconds_of(times, entry, method["rows"])
            count, part = calls * entry["count"], variant_of(entry) or entry["kind"]
            known = parts.setdefault(part, {"launches": 0, "bound": 0.0, "seconds": 0.0})
            known["launches"] += count
            known["bound"] += count * bound
            known["seconds"] = None if None in (known["seconds"], seconds) else known["seconds"] + count * seconds
    return {"gpu": times.gpu, "measured": times.about, "parts": parts}
