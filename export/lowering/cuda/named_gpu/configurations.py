"""Chooses the configuration of a hand-written kernel when none can be timed.

Four groups are tried in this order: configurations that load ahead, those with most elements first; the same tiles with
two stages and other numbers of warps; configurations that do not load ahead; and the same tiles with other numbers of
warps. The choice is the first of a group that spills no registers and leaves room for a second program on a
multiprocessor. If a group has none, it is the first of the group that spills no registers. If all configurations of all
groups spill, the choice is the one with the fewest spilled bytes.

A kernel with one configuration keeps it. If it spills, it gets the registers that are left. The assembler limits 256
threads to 128 registers each to leave room for a second program, even if shared memory has no room for one.
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

from eagle3.runner.system.gpus import REGISTERS, Gpu

WARPS, STAGES = (4, 8), (2, 1)
MOST_REGISTERS = 255
"""The most registers of a thread, on any architecture."""


def in_flight(config: Config) -> int:
    """Return the number of elements that are loaded ahead."""
    return prod(size for name, size in config.kwargs.items() if "BLOCK" in name) * (config.num_stages - 1)


def groups(configs: list[Config]) -> Iterator[list[Config]]:
    """Yield the groups of configurations in the order in which they are tried."""
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
    """Return the registers and the spilled bytes per thread of a compiled kernel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listed = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+)", listed), re.search(r"STACK:(\d+)", listed)
    assert registers is not None and stack is not None, listed
    return int(registers[1]), int(stack[1])


def best(configs: list[Config], compiled: Callable[[Config], CompileResult | None], gpu: Gpu) -> CompileResult | None:
    """Return Inductor's result for the chosen configuration; None if no configuration fits. ``compiled`` compiles a
    configuration and returns None if it does not fit."""
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
    """Return Inductor's result for the only configuration; None if it does not fit. If it spills, it is also compiled
    with all registers that the programs on a multiprocessor leave, and the better result is returned."""
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
