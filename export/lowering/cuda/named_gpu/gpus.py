"""The GPUs that can be named, as a compiler needs to know them.

Source: NVIDIA's CUDA C++ Programming Guide, technical specifications per compute capability; the number of
multiprocessors is that of the card named. Shared memory is in bytes, the most that a block may opt into.
"""

from dataclasses import dataclass

REGISTERS = 65536
"""Of a multiprocessor, of any."""


@dataclass(frozen=True)
class Gpu:
    capability: tuple[int, int]
    name: str
    multiprocessors: int
    shared_memory_per_block: int
    shared_memory_per_multiprocessor: int
    threads_per_multiprocessor: int
    l2_cache: int
    memory: int

    @property
    def arch(self) -> int:
        """90 for sm_90."""
        return self.capability[0] * 10 + self.capability[1]


KB, MB, GB = 1 << 10, 1 << 20, 1 << 30
GPUS: dict[str, Gpu] = {
    "sm_80": Gpu((8, 0), "A100", 108, 163 * KB, 164 * KB, 2048, 40 * MB, 80 * GB),
    "sm_86": Gpu((8, 6), "RTX 3090", 82, 99 * KB, 100 * KB, 1536, 6 * MB, 24 * GB),
    "sm_89": Gpu((8, 9), "RTX 4090", 128, 99 * KB, 100 * KB, 1536, 72 * MB, 24 * GB),
    "sm_90": Gpu((9, 0), "H100", 132, 227 * KB, 228 * KB, 2048, 50 * MB, 80 * GB),
    "sm_100": Gpu((10, 0), "B200", 148, 227 * KB, 228 * KB, 2048, 126 * MB, 180 * GB),
    "sm_120": Gpu((12, 0), "RTX 5090", 170, 99 * KB, 100 * KB, 1536, 96 * MB, 32 * GB),
}
