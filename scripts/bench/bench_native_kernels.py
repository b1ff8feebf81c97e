"""Times the native runner's attention beside ExecuTorch's ``custom_sdpa``, call by call in turn.

    python scripts/bench/bench_native_kernels.py                 # half a minute; needs g++ and CMake
    python scripts/bench/bench_native_kernels.py --threads 2

The shapes are the calls that artifacts make (``export/lowering/xnnpack``): of gemma4-tiny, and of qwen3-4B's widths at
100, 2,000 and 4,000 positions. A ratio below 1 means that the native runner's kernel is faster.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the matrix products of custom_sdpa have threads of their own otherwise

import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import executorch
import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401  (registers torch.ops.llama)
import torch
from executorch.extension.pybindings.portable_lib import _threadpool_get_thread_count, _unsafe_reset_threadpool

from eagle3.runner.system.command import OneLineFailures

HERE = Path(__file__).resolve().parent
PROJECT = f"""
cmake_minimum_required(VERSION 3.19)
project(bench CXX)
add_subdirectory("{HERE.parents[1] / "runner" / "native"}" native)
add_library(kernels SHARED "{HERE}/native_kernels.cpp" $<TARGET_OBJECTS:eagle3_kernels>)
target_include_directories(kernels PRIVATE "{HERE.parents[1] / "runner" / "native" / "operators"}")
target_compile_definitions(kernels PRIVATE ET_USE_THREADPOOL)
target_link_libraries(kernels PRIVATE eagle3)
"""
# name: batch, rows, query heads, heads of keys, head_dim, slots, first position, causal, with a mask
CALLS = {
    "gemma4-tiny, one row": (2, 2, 1, 1, 64, 1024, 100, False, False),
    "gemma4-tiny, a window of 4 rows of a ring": (1, 8, 2, 2, 64, 128, 0, False, True),
    "one row after 100": (8, 2, 2, 1, 128, 4224, 100, False, False),
    "one row after 4,000": (8, 2, 2, 1, 128, 4224, 4000, False, False),
    "a window of 4 rows after 100": (8, 4, 4, 1, 128, 4224, 100, True, False),
    "a window of 4 rows after 4,000": (8, 4, 4, 1, 128, 4224, 4000, True, False),
    "a chunk of 128 rows after 100": (8, 128, 4, 1, 128, 4224, 100, True, False),
    "a chunk of 128 rows after 2,000": (8, 128, 4, 1, 128, 4224, 2000, True, False),
    "a chunk of 128 rows after 4,000": (8, 128, 4, 1, 128, 4224, 4000, True, False),
    "a chunk of 512 rows at 0": (8, 512, 4, 1, 128, 4224, 0, True, False),
    "a chunk of 128 rows of a ring of 1,024": (1, 128, 32, 8, 128, 1024, 0, False, True),
}
Call = Callable[[], object]


def built(folder: Path) -> ctypes.CDLL:
    """Build the kernels as a library."""
    (folder / "CMakeLists.txt").write_text(PROJECT)
    prefix = f"-DCMAKE_PREFIX_PATH={Path(executorch.__path__[0])}"
    for command in (
        ["cmake", "-S", folder, "-B", folder / "build", prefix],
        ["cmake", "--build", folder / "build", "--target", "kernels"],
    ):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return ctypes.CDLL(str(folder / "build" / "libkernels.so"))


def both(library: ctypes.CDLL, shape: tuple[int, ...]) -> tuple[Call, Call]:
    """Return calls of the native kernel and of ``custom_sdpa`` with one input. Raises AssertionError if their outputs
    differ."""
    batch, rows, query_heads, heads, width, slots, start, causal, masked = shape
    query, out = (torch.randn(batch, rows, query_heads, width) for _ in range(2))
    key, value = torch.randn(2, batch, slots, heads, width)
    mask = torch.where(torch.rand(rows, slots) < 0.5, 0.0, -torch.inf) if masked else None
    sizes = (ctypes.c_int64 * 6)(*query.shape[:3], heads, width, slots)
    pointers = [None if each is None else ctypes.c_void_p(each.data_ptr()) for each in (query, key, value, mask, out)]
    scale = width**-0.5

    def native() -> torch.Tensor:
        library.attend(sizes, ctypes.c_int64(start), ctypes.c_bool(causal), ctypes.c_float(scale), *pointers)
        return out

    def theirs() -> torch.Tensor:
        return torch.ops.llama.custom_sdpa(query, key, value, start, mask, 0.0, bool(causal), scale)

    torch.testing.assert_close(native(), theirs(), rtol=1e-4, atol=1e-5)
    return native, theirs


def seconds(call: Call, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def compared(pair: tuple[Call, Call], repeats: int) -> tuple[float, float]:
    """Return the median milliseconds of both calls, measured in turn."""
    calls = max(1, int(0.005 / seconds(pair[1], 1)))  # a measurement takes 5 ms or more
    times = [[1000 * seconds(call, calls) for call in pair] for _ in range(repeats)]
    native, theirs = (statistics.median(each) for each in zip(*times, strict=True))
    return native, theirs


@click.command(cls=OneLineFailures, help=__doc__.partition("\n")[0])
@click.option("--threads", default=1, show_default=True)
@click.option("--repeats", default=25, show_default=True)
def main(threads: int, repeats: int) -> None:
    torch.manual_seed(0)
    _unsafe_reset_threadpool(threads)
    with tempfile.TemporaryDirectory() as folder:
        library = built(Path(folder))
        click.echo(f"{_threadpool_get_thread_count()} threads; milliseconds: native, custom_sdpa, ratio")
        for name, shape in CALLS.items():
            native, theirs = compared(both(library, shape), repeats)
            click.echo(f"{name:42}{native:9.3f}{theirs:9.3f}{native / theirs:7.2f}")


if __name__ == "__main__":
    main()
