"""The GPUs that artifacts are compiled for by name, and that their cost is counted for.

Sources: NVIDIA's CUDA C++ Programming Guide, technical specifications per compute capability, and NVIDIA's data sheets
of the cards (SXM where there are several). Sizes are in bytes, bandwidth in bytes a second, shared memory the most that
a block may opt into, the clock in Hz as under load on the matrix units, where it is not the data sheet's highest.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REGISTERS = 65536
"""Of a multiprocessor, of any."""
THREADS = 1024
"""Of a block, on any."""
RESERVED_SHARED = 1024
"""Bytes of shared memory that the driver takes of each block."""


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

    @property
    def arch(self) -> int:
        """90 for sm_90."""
        return self.capability[0] * 10 + self.capability[1]

    def resident(self, registers: int, shared: int, threads: int) -> int:
        """Blocks that run on one multiprocessor at a time: of ``threads``, each with so many registers, and so many
        bytes of shared memory. Registers are given to a warp 8 a thread at a time."""
        return min(
            self.blocks_per_multiprocessor,
            self.threads_per_multiprocessor // threads,
            REGISTERS // (math.ceil(registers / 8) * 8 * threads),
            self.shared_memory_per_multiprocessor // (shared + RESERVED_SHARED),
        )


KB, MB, GB = 1 << 10, 1 << 20, 1 << 30
CONTEXT_BYTES = 512 * MB
"""Of a GPU's memory, what CUDA, PyTorch and loaded kernels take beside tensors: commonly 300 to 600 MB."""
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (  # of an architecture first what is compiled for
        Gpu("A100", (8, 0), 108, 163 * KB, 164 * KB, 2048, 32, 40 * MB, 80 * GB, 2.039e12, 1.41e9),
        Gpu("RTX 3090", (8, 6), 82, 99 * KB, 100 * KB, 1536, 16, 6 * MB, 24 * GB, 0.936e12, 1.695e9),
        Gpu("RTX 4090", (8, 9), 128, 99 * KB, 100 * KB, 1536, 24, 72 * MB, 24 * GB, 1.008e12, 2.52e9),
        Gpu("H100", (9, 0), 132, 227 * KB, 228 * KB, 2048, 32, 50 * MB, 80 * GB, 3.35e12, 1.755e9),
        Gpu("H200", (9, 0), 132, 227 * KB, 228 * KB, 2048, 32, 50 * MB, 140 * GB, 4.8e12, 1.755e9),
        Gpu("B200", (10, 0), 148, 227 * KB, 228 * KB, 2048, 32, 126 * MB, 180 * GB, 8.0e12, 1.86e9),
        Gpu("RTX 5090", (12, 0), 170, 99 * KB, 100 * KB, 1536, 24, 96 * MB, 32 * GB, 1.792e12, 2.407e9),
    )
}


def gpus_of(arch: str | None) -> list[Gpu]:
    """The GPUs of an architecture such as "sm_90"; none of an unknown one."""
    return [gpu for gpu in GPUS.values() if f"sm_{gpu.arch}" == arch]


def excesses(
    launches: Mapping[str, Sequence[Mapping[str, Any]]], gpu: str, shared_bytes: int, threads: int = THREADS
) -> Iterator[str]:
    """What a block takes that ``gpu``, which allows so many bytes of shared memory and threads, has not: a line for
    each kernel. What a launch does not say it does not take."""
    told = set()
    for method, entries in launches.items():
        for entry in entries:
            for what, taken, allowed in (
                ("bytes of shared memory", entry.get("shared_bytes", 0), shared_bytes),
                ("threads", entry.get("threads", 0), threads),
                ("registers", entry.get("registers", 0) * entry.get("threads", 0), REGISTERS),
            ):
                if taken > allowed and (entry["kernel"], method, what) not in told:
                    told.add((entry["kernel"], method, what))
                    kernel = f"kernel {entry['kernel']} of {method}"
                    yield f"{kernel} takes {taken:,} {what} a block, {gpu} allows {allowed:,}"


def lacking_on_later(arch: str, launches: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, str]:
    """Later architectures of the table than ``arch``, to what the first launch that they have no room for takes: PTX
    runs on later architectures, some of which allow a block less."""
    first, *_ = gpus_of(arch)
    found: dict[str, str] = {}
    for gpu in GPUS.values():
        name = f"sm_{gpu.arch}"
        if gpu.arch > first.arch and (line := next(excesses(launches, name, gpu.shared_memory_per_block), None)):
            found.setdefault(name, line)
    return found
