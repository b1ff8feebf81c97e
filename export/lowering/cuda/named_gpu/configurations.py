"""Which configuration of a kernel written by hand is compiled, where none can be timed.

Taken is the first that fits the GPU and spills no registers of: those that load ahead, most elements first; the same
tiles with other numbers of warps, two stages; those that do not load ahead, and they with other numbers of warps. Where
all spill, the least of the spills is taken.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from copy import copy
from math import prod
from pathlib import Path
from typing import Any

import triton
from triton import Config

HARMLESS = 16  # bytes of stack a thread, which the compiler takes for itself here and there
WARPS, STAGES = (4, 8), (2, 1)


def in_flight(config: Config) -> int:
    """Elements of the tiles that are loaded ahead."""
    return prod(size for name, size in config.kwargs.items() if "BLOCK" in name) * (config.num_stages - 1)


def candidates(configs: list[Config]) -> Iterator[Config]:
    """In the order in which they are tried."""
    ranked, known = sorted(configs, key=in_flight, reverse=True), set()
    for stages in STAGES:
        for config in ranked:
            if (in_flight(config) > 0) == (stages > 1):
                known.add((str(config.kwargs), config.num_warps, config.num_stages))
                yield config
        for config in ranked:
            for warps in WARPS:
                key = str(config.kwargs), warps, stages
                if key not in known:
                    known.add(key)
                    other = copy(config)
                    other.num_warps, other.num_stages = warps, stages
                    yield other


def stack(cubin: bytes) -> int:
    """Bytes of memory that a thread of the compiled kernel has for what its registers do not hold."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage)[1])


def best(configs: list[Config], compiled: Callable[[Config], Any | None]) -> Any | None:
    """What one of the configurations is ``compiled`` to: Inductor's result, with the ``kernel``; None where none fits,
    as for each that does not."""
    spilling = []
    for config in candidates(configs):
        result = compiled(config)
        if result is None:
            continue
        spilled = stack(result.kernel.asm["cubin"])
        if spilled <= HARMLESS:
            return result
        spilling.append((spilled, result))
    return min(spilling, key=lambda found: found[0])[1] if spilling else None
