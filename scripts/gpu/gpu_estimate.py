"""Estimates the time of a CUDA method's call from times that were measured on a GPU, kernel by kernel.

A kernel of few rows takes a fixed time and one that grows with the bytes of its weights. Both are fits of the times on
one H200 (driver 580.159, PyTorch 2.11, kernels by Triton 3.7.1) in ``export/lowering/cuda/measured.md``. A kind of
which only one kernel was timed has the fixed time of the INT4 kernels. Many rows take ``OF_BOUND`` times their bound.
There is a gap between two kernels of a CUDA graph. For another GPU, the speed of quantized kernels is scaled by
multiprocessors and clock, since instructions limit them, and that of bfloat16 kernels by memory bandwidth. Fixed times
are not scaled. The round that the tests compare is one of those that were fitted. Records, experts, and attention after
long contexts were not timed with the present kernels.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from eagle3.runner.artifact.cuda_library import kind_of
from eagle3.runner.system.gpus import GPUS, Gpu

MEASURED_ON = "H200"
GAP_SECONDS = 0.8e-6
"""Seconds from the end of a kernel to the start of the next in a CUDA graph: kernels took 9.68 ms of a round of 10.06
ms."""
OF_BOUND = 2.7
"""The measured time of a prefill of 1,024 rows divided by its bound at the GPU's actual clock: 0.29 s and 0.12 s at
1.755 GHz."""
FEW = 16
"""The most rows that count as few."""


class Speed(NamedTuple):
    """The speed of a kind of kernel: ``fixed`` seconds, then a number of bytes per second. ``by_memory``: memory
    bandwidth limits it."""

    fixed: float
    bytes: float
    by_memory: bool = False


SPEEDS: dict[str, tuple[Speed, Speed]] = {
    r"int4_small_m": (Speed(5.8e-6, 3.27e12), Speed(14.6e-6, 2.38e12)),
    r"int4_records_small_m": (Speed(5.8e-6, 3.27e12), Speed(14.6e-6, 2.38e12)),
    r"_int8_small_m": (Speed(7.7e-6, 3.58e12), Speed(8.6e-6, 2.05e12)),
    r"_k_quant_small_m": (Speed(5.8e-6, 3.0e12), Speed(5.8e-6, 1.7e12)),
    r"_bf16_small_m": (Speed(9.8e-6, 3.91e12, True), Speed(9.8e-6, 3.91e12, True)),
    r".*experts_small_m": (Speed(5.8e-6, 3.27e12), Speed(14.6e-6, 2.38e12)),
}
"""Speeds of matmuls, by the beginning of a kernel's name, with up to 8 rows and with up to 16. Kernels of experts and
of records were not timed and are assumed to be as fast as those of INT4 in tiles."""
ATTENTION = Speed(11.2e-6, 4.25e12, True)
OTHER = Speed(4.0e-6, 4.25e12, True)
"""The speed of all other kernels: norms took 4 us for any number of rows, and a copy moves 4.25 TB/s."""


def kernel_seconds(entry: Mapping[str, Any], rows: int, gpu: Gpu, bound: float) -> float:
    """Return the estimate of one launch. ``entry``: a recorded launch with its ``cache_bytes``, and True as
    ``reads_cache`` if it is attention; ``bound``: its bound."""
    kernel, kind = entry["kernel"], kind_of(entry["kernel"])
    if rows > FEW:
        return max(OTHER.fixed, OF_BOUND * bound)
    speeds = next((speeds for name, speeds in SPEEDS.items() if re.match(name, kernel)), None)
    of_others = ATTENTION if kind == "attention" and entry.get("reads_cache") else OTHER
    speed = speeds[rows > 8] if speeds else of_others
    read = entry["weight_bytes"] + entry["cache_bytes"]
    return max(bound, speed.fixed + read / (speed.bytes * scale(gpu, speed)))


def scale(gpu: Gpu, speed: Speed) -> float:
    """Return the speed of a GPU for a kernel, divided by the speed of ``MEASURED_ON``."""
    measured = GPUS[MEASURED_ON]
    if speed.by_memory:
        return gpu.bandwidth / measured.bandwidth
    return gpu.multiprocessors * gpu.clock / (measured.multiprocessors * measured.clock)


def estimate(kernels: Iterable[Mapping[str, Any]], gpu: Gpu) -> dict[str, Any]:
    """Return the estimate of a method, summed over its kernels: ``seconds`` with a CUDA graph, the GPU of the
    measurements (``measured_on``), and ``scaled``, True if they were scaled to another GPU."""
    seconds = sum(entry["count"] * (entry["estimates"][gpu.name] + GAP_SECONDS) for entry in kernels)
    return of_seconds(seconds, gpu)


def of_seconds(seconds: float, gpu: Gpu) -> dict[str, Any]:
    return {"seconds": seconds, "measured_on": MEASURED_ON, "scaled": gpu.name != MEASURED_ON}
