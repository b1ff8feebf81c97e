"""Which configuration of a kernel written by hand is compiled, where none can be timed.

Four groups are tried: those that load ahead, most elements first; the same tiles with other numbers of warps and two
stages; those that do not load ahead, and they with other numbers of warps. Taken is the first of a group that spills no
registers and leaves room for a second program on a multiprocessor, or else the first that spills none. Where all spill,
the least of the spills is taken.

A kernel with one configuration keeps it. If that spills, it is given the registers that are left: the assembler keeps
256 threads to 128 for the sake of a second program, also where shared memory has no room for one.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from copy import copy
from itertools import product
from math import prod
from pathlib import Path

import triton
from torch._inductor.runtime.triton_heuristics import CompileResult
from triton import Config

from eagle3.runner.hardware.gpus import REGISTERS, Gpu

WARPS, STAGES = (4, 8), (2, 1)
MOST_REGISTERS = 255
"""Of a thread, on any architecture."""


def in_flight(config: Config) -> int:
    """Elements of the tiles that are loaded ahead."""
    return prod(size for name, size in config.kwargs.items() if "BLOCK" in name) * (config.num_stages - 1)


def groups(configs: list[Config]) -> Iterator[list[Config]]:
    """In the order in which they are tried."""
    ranked, known = sorted(configs, key=in_flight, reverse=True), set()
    for stages in STAGES:
        given = [config for config in ranked if (in_flight(config) > 0) == (stages > 1)]
        known |= {(str(config.kwargs), config.num_warps, config.num_stages) for config in given}
        yield given
        others = []
        for config, warps in product(ranked, WARPS):
            key = str(config.kwargs), warps, stages
            if key not in known:
                known.add(key)
                others.append(copy(config))
                others[-1].num_warps, others[-1].num_stages = warps, stages
        yield others


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread of the compiled kernel, and bytes of memory for what they do not hold."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listed = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+)", listed), re.search(r"STACK:(\d+)", listed)
    assert registers is not None and stack is not None, listed
    return int(registers[1]), int(stack[1])


def best(configs: list[Config], compiled: Callable[[Config], CompileResult | None], gpu: Gpu) -> CompileResult | None:
    """What one of the configurations is ``compiled`` to: Inductor's result, with the ``kernel``; None where none fits,
    as for each that does not."""
    least: CompileResult | None = None
    fewest = 0
    for group in groups(configs):
        alone: CompileResult | None = None
        for config in group:
            result = compiled(config)
            if result is None:
                continue
            metadata = result.kernel.metadata
            registers, spilled = usage(result.kernel.asm["cubin"])
            if spilled:
                least, fewest = (result, spilled) if least is None or spilled < fewest else (least, fewest)
                continue
            if gpu.resident(registers, metadata.shared, 32 * metadata.num_warps) > 1:
                return result
            alone = alone or result
        if alone is not None:
            return alone
    return least


def only(config: Config, compiled: Callable[[Config], CompileResult | None], gpu: Gpu) -> CompileResult | None:
    """As ``best``, of one configuration: with more registers a thread if it spills and the programs that run at a time
    on a multiprocessor leave them."""
    result = compiled(config)
    if result is None:
        return None
    metadata = result.kernel.metadata
    registers, spilled = usage(result.kernel.asm["cubin"])
    threads = 32 * metadata.num_warps
    programs = max(1, gpu.resident(registers, metadata.shared, threads))
    most = min(MOST_REGISTERS, REGISTERS // (programs * threads) // 8 * 8)
    if not spilled or most <= registers:
        return result
    roomier = copy(config)
    roomier.maxnreg = most
    return min(filter(None, (result, compiled(roomier))), key=lambda found: usage(found.kernel.asm["cubin"])[1])
