"""The GPUs that artifacts can be compiled for by name, and whose cost is estimated.

Sources: NVIDIA's CUDA C++ Programming Guide, technical specifications per compute capability, and NVIDIA's data sheets
of the cards (the SXM form if there are several). Sizes are in bytes, bandwidth in bytes per second. Shared memory is
the most that a block may opt into. The clock is in Hz, the highest that the card reaches; work on the tensor cores may
lower it. H100 and H200 have the same multiprocessors at the same clock: 1,980 MHz is nvidia-smi's ``clocks.max.sm`` of
both, and an H200 had it during a round of Gemma 4 31B. The L2 of the H200 was read from such a GPU.

Boards whose GPU shares memory with the host have the memory that CUDA reports. Multiprocessors, L2, clock and memory of
GB10 are those that ``deviceQuery`` prints on a DGX Spark (kubesimplify.com, "The DGX Spark unpacked"), those of Thor
what the driver reports on a Jetson AGX Thor (forums.developer.nvidia.com, 356355), those of Orin the 64 GB module's of
NVIDIA's Jetson AGX Orin technical brief. Their multiply-adds follow from the data sheets' 170 INT8 TOPS (Orin), 2,070
FP4 TFLOPS (Thor) and 1,000 FP4 TFLOPS (GB10), all with sparsity.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REGISTERS = 65536
"""32-bit registers of a multiprocessor, the same on every GPU of the table."""
THREADS = 1024
"""The most threads of a block, the same on every GPU of the table."""
RESERVED_SHARED = 1024
"""Bytes of shared memory that the driver reserves for each block."""


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory_per_block: int
    shared_memory_per_multiprocessor: int
    threads_per_multiprocessor: int
    blocks_per_multiprocessor: int
    l2_cache: int
    memory: int
    bandwidth: float
    clock: float
    multiply_adds: int
    """Multiply-adds in bfloat16 of a multiprocessor in a cycle, without sparsity, with sums in float32."""

    @property
    def arch(self) -> int:
        """The compute capability as a number: 90 for sm_90."""
        return self.capability[0] * 10 + self.capability[1]

    def resident(self, registers: int, shared: int, threads: int) -> int:
        """Return how many blocks one multiprocessor runs at a time.

        ``registers`` is per thread, ``shared`` is bytes per block, ``threads`` is per block. Registers are allocated in
        steps of 8 per thread.
        """
        return min(
            self.blocks_per_multiprocessor,
            self.threads_per_multiprocessor // threads,
            REGISTERS // (math.ceil(registers / 8) * 8 * threads),
            self.shared_memory_per_multiprocessor // (shared + RESERVED_SHARED),
        )


KB, MB, GB = 1 << 10, 1 << 20, 1 << 30
CONTEXT_BYTES = 512 * MB
"""GPU memory that CUDA, PyTorch and loaded kernels take in addition to tensors; commonly 300 to 600 MB."""
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (  # code for an architecture is compiled for its first GPU here
        Gpu("A100", (8, 0), 108, 163 * KB, 164 * KB, 2048, 32, 40 * MB, 80 * GB, 2.039e12, 1.41e9, 1024),
        Gpu("RTX 3090", (8, 6), 82, 99 * KB, 100 * KB, 1536, 16, 6 * MB, 24 * GB, 0.936e12, 1.695e9, 256),
        Gpu("Jetson Orin", (8, 7), 16, 163 * KB, 164 * KB, 1536, 16, 4 * MB, 61 * GB, 0.205e12, 1.3e9, 1024),
        Gpu("RTX 4090", (8, 9), 128, 99 * KB, 100 * KB, 1536, 24, 72 * MB, 24 * GB, 1.008e12, 2.52e9, 256),
        Gpu("H100", (9, 0), 132, 227 * KB, 228 * KB, 2048, 32, 50 * MB, 80 * GB, 3.35e12, 1.98e9, 2048),
        Gpu("H200", (9, 0), 132, 227 * KB, 228 * KB, 2048, 32, 60 * MB, 140 * GB, 4.8e12, 1.98e9, 2048),
        Gpu("B200", (10, 0), 148, 227 * KB, 228 * KB, 2048, 32, 126 * MB, 180 * GB, 8.0e12, 1.86e9, 4096),
        Gpu("Jetson Thor", (11, 0), 20, 227 * KB, 228 * KB, 1536, 24, 32 * MB, 122 * GB, 0.273e12, 1.575e9, 4096),
        Gpu("RTX 5090", (12, 0), 170, 99 * KB, 100 * KB, 1536, 24, 96 * MB, 32 * GB, 1.792e12, 2.407e9, 256),
        Gpu("GB10", (12, 1), 48, 99 * KB, 100 * KB, 1536, 24, 24 * MB, 119 * GB, 0.273e12, 2.418e9, 512),
    )
}


def gpus_of(arch: str | None) -> list[Gpu]:
    """Return the GPUs of an architecture such as "sm_90", or of several, as ``--cuda-arch`` names them; [] for an
    unknown one."""
    named = [] if arch is None else archs_of(arch)
    return [gpu for gpu in GPUS.values() if f"sm_{gpu.arch}" in named]


def archs_of(named: str) -> list[str]:
    """Return the architectures of a list such as "sm_80,sm_90", or of "all", each once, the lowest first."""
    return list(BY_ARCH) if named == ALL else sorted(set(named.split(",")), key=lambda arch: (len(arch), arch))


def capability_of(arch: str) -> int:
    """Return the compute capability of an architecture: 90 for "sm_90" and for "sm_90a"."""
    return int(arch.removeprefix("sm_").rstrip("af"))


ALL = "all"
BY_ARCH: dict[str, Gpu] = {}
"""The architectures that can be named, such as "sm_90", the lowest first, and the GPU that each is compiled for."""
for _gpu in GPUS.values():
    BY_ARCH.setdefault(f"sm_{_gpu.arch}", _gpu)


def excesses(
    launches: Mapping[str, Sequence[Mapping[str, Any]]], gpu: str, shared_bytes: int, threads: int = THREADS
) -> Iterator[str]:
    """Yield a line for each kernel and resource of which a block takes more than ``gpu`` allows.

    ``launches``: by method; a missing entry counts as 0. ``gpu``: the name for the line. ``shared_bytes`` and
    ``threads``: the limits of a block.
    """
    reported = set()
    for method, entries in launches.items():
        for entry in entries:
            for what, taken, allowed in (
                ("bytes of shared memory", entry.get("shared_bytes", 0), shared_bytes),
                ("threads", entry.get("threads", 0), threads),
                ("registers", entry.get("registers", 0) * entry.get("threads", 0), REGISTERS),
            ):
                if taken > allowed and (entry["kernel"], method, what) not in reported:
                    reported.add((entry["kernel"], method, what))
                    kernel = f"kernel {entry['kernel']} of {method}"
                    yield f"{kernel} takes {taken:,} {what} a block, {gpu} allows {allowed:,}"


def launches_on(launches: Mapping[str, Sequence[Mapping[str, Any]]], arch: int) -> dict[str, list[dict[str, Any]]]:
    """Return the launches of each method as a GPU of this compute capability (90 for 9.0) makes them."""
    return {method: [launch_on(entry, arch) for entry in entries] for method, entries in launches.items()}


def launch_on(entry: Mapping[str, Any], arch: int) -> dict[str, Any]:
    """Return a launch as a GPU of this compute capability (90 for 9.0) makes it. Each of its ``cards`` holds from a
    compute capability on, and has threads, shared memory and constants that differ by GPU; ``parts``, unless 0, is the
    last axis of the grid; the first ``whole`` tiles of the second are not divided."""
    of_card: dict[str, Any] = next((card for card in reversed(entry.get("cards", ())) if card["first"] <= arch), {})
    own = {name: of_card[name] for name in ("threads", "shared_bytes") if of_card}
    if of_card.get("parts"):
        rows, tiles, _ = entry["grid"]
        whole, parts = of_card.get("whole", 0), of_card["parts"]
        own["grid"] = [rows, whole + (tiles - whole) * parts, 1] if whole else [rows, tiles, parts]
    return {**entry, **own, "constants": {**entry.get("constants", {}), **of_card.get("constants", {})}}


def lacking_on_later(arch: str, launches: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, str]:
    """Map each architecture later than ``arch`` that cannot run every launch to the line of ``excesses`` for the first
    such launch. PTX runs on later architectures too, and some of them allow less per block."""
    first, *_ = gpus_of(arch)
    found: dict[str, str] = {}
    for gpu in GPUS.values():
        name = f"sm_{gpu.arch}"
        own = launches_on(launches, gpu.arch)
        if gpu.arch > first.arch and (line := next(excesses(own, name, gpu.shared_memory_per_block), None)):
            found.setdefault(name, line)
    return found
