"""Measures how fast a GPU reads weights once: by loads, and by bulk copies through a ring (``read_probe.cu``).

Nothing is computed but an xor, so this is the ceiling of a matmul of few rows. It is measured over 4 GiB and over 65
MB at a time, the size of a linear of Gemma 4 31B, in a CUDA graph as in a round.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_cubins import MOST_SHARED, Driver
from gpu_tournament import elapsed

CASES = {
    "bulk_4x8192": (8192, 32768, 288), "bulk_8x8192": (8192, 65536, 288), "bulk_12x16384": (16384, 196608, 288),
    "ldg_2": (8192, 0, 256), "ldg_8": (32768, 0, 256),
}  # fmt: skip
"""The bytes of a block, the bytes of shared memory, and the threads of each kernel."""
MULTIPROCESSORS, SHARED_OF_ONE = 132, 227 << 10
SIZE, APART, READS = 4 << 30, 96 << 20, 40
"""The bytes that are read at once, and the distance and number of the reads of 65 MB, which together exceed any L2."""
PART = 66846720 // (MULTIPROCESSORS * 32768) * (MULTIPROCESSORS * 32768)


def read_speeds(code: Path) -> dict[str, dict[str, float]]:
    """Return TB/s of both sizes by kernel and programs on a multiprocessor. ``code``: the cubin of the kernels."""
    driver, module, found = Driver(), ctypes.c_void_p(), {}
    memory, some = torch.empty(SIZE, dtype=torch.uint8, device="cuda"), torch.randint(256, (1 << 24,)).byte()
    for begin in range(0, SIZE, len(some)):
        memory[begin : begin + len(some)].copy_(some[: SIZE - begin])
    out = torch.zeros(4, dtype=torch.int32, device="cuda")
    driver.cuModuleLoadData(ctypes.byref(module), code.read_bytes())
    for name, (block, shared, threads) in CASES.items():
        function = ctypes.c_void_p()
        driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
        if shared:
            driver.cuFuncSetAttribute(function, MOST_SHARED, shared)

        def read(programs: int, size: int, offset: int = 0, of: tuple = (function, block, shared, threads)) -> None:
            function, block, shared, threads = of
            given = memory.data_ptr() + offset, out.data_ptr(), size // block
            held = [ctypes.c_void_p(each) for each in given]
            places = (ctypes.c_void_p * 3)(*(ctypes.addressof(each) for each in held))
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            grid = MULTIPROCESSORS * programs, 1, 1
            driver.cuLaunchKernel(function, *grid, threads, 1, 1, shared, stream, places, None)

        for programs in (1, 2, 3, 4):
            if not shared or programs * (shared + 2048) <= SHARED_OF_ONE:
                found[f"{name}, {programs}"] = speeds_of(read, programs)
    return found


def speeds_of(read: Callable[..., None], programs: int) -> dict[str, float]:
    whole = min(elapsed(lambda: read(programs, SIZE)) for _ in range(15))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(min(READS, (SIZE - PART) // APART + 1)):
            read(programs, PART, number * APART)
    parts = min(elapsed(graph.replay) for _ in range(15)) / min(READS, (SIZE - PART) // APART + 1)
    return {"4 GiB": round(SIZE / whole / 1e12, 3), "65 MB": round(PART / parts / 1e12, 3)}
