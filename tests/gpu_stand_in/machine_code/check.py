"""Checks the code of a CUDA artifact for faults that a GPU or a runtime would show only when it runs. Needs no GPU.

1. Barriers: each kernel's PTX must order the accesses to memory that threads share (``barriers.py``).
2. Blocks: threads, registers and shared memory must fit the artifact's GPU (``runner/system/gpus.py``), without spills.
3. Symbols: the runtimes must have every symbol that a library needs (``runtime_symbols.py``).

That each constant is on its weight's device is what PyTorch's container checks (``stand_in_artifact_faults.py``).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from machine_code.barriers import faults as barrier_faults
from machine_code.libraries import architectures
from machine_code.runtime_symbols import lacking
from machine_code.sass import Usage, read_usages

from eagle3.runner.artifact.cuda_library import images_of, read_library
from eagle3.runner.system.gpus import BY_ARCH, archs_of, excesses, launches_on

Kernels = Mapping[str, Mapping[str, bytes]]
"""The fatbins of a method's kernels, by method and name."""


def check_code(
    libraries: Mapping[str, bytes], launches: Mapping[str, list[dict[str, Any]]], arch: str
) -> tuple[list[str], dict[str, str | None]]:
    """Return a line for each fault, and each architecture that has code with the resource that it lacks.

    Args:
        libraries: the library of each method
        launches: the launches that the exporter recorded (``artifact/gpu_needs.recorded_launches``)
        arch: the architecture, or the list, that the artifact says it was compiled for

    Raises:
        ValueError: a damaged library
        FileNotFoundError: no ``cuobjdump`` to read PTX with
    """
    read = {method: read_library(code) for method, code in libraries.items()}
    kernels = {method: library.kernels for method, library in read.items()}
    usages = read_usages(code for named in kernels.values() for code in named.values())
    taken = {method: list(_taken(kernels[method], usages, launches.get(method, []))) for method in kernels}
    runs_on = architectures(
        {
            f"{method} {name}": images_of(f"kernel {name} of {method}", code, arch)
            for method, named in kernels.items()
            for name, code in named.items()
        },
        taken,
    )
    found = [*_barriers(kernels, usages), *_blocks(kernels, usages, launches, taken, runs_on, arch)]
    for method, library in read.items():
        found += (f"the library of {method} needs {line}" for line in lacking(library.needs, library.asks_for))
    return list(dict.fromkeys(found)), runs_on


def _taken(
    named: Mapping[str, bytes], usages: Mapping[bytes, Usage], launches: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield the resources of a block of each kernel, from its code and the shared memory that its launches add."""
    given: dict[str, dict[str, Any]] = {}
    for entry in launches:
        given[entry["kernel"]] = max(entry, given.get(entry["kernel"], entry), key=lambda each: each["shared_bytes"])
    for name, code in named.items():
        usage, entry = usages[code], given.get(name, {})
        own = {"kernel": name, "threads": usage.threads, "registers": usage.registers}
        cards = [card | {"shared_bytes": usage.shared_bytes + card["shared_bytes"]} for card in entry.get("cards", ())]
        yield own | {"shared_bytes": usage.shared_bytes + entry.get("shared_bytes", 0), "cards": cards}


def _barriers(kernels: Kernels, usages: Mapping[bytes, Usage]) -> Iterator[str]:
    known: dict[str, list[str]] = {}
    for method, named in kernels.items():
        for name, code in named.items():
            for ptx in usages[code].ptx:
                if ptx not in known:
                    known[ptx] = list(map(str, barrier_faults(ptx)))
                for line in known[ptx]:
                    yield f"in kernel {name} of {method} {line}"


def _blocks(
    kernels: Kernels,
    usages: Mapping[bytes, Usage],
    launches: Mapping[str, list[dict[str, Any]]],
    taken: Mapping[str, list[dict[str, Any]]],
    runs_on: Mapping[str, str | None],
    arch: str,
) -> Iterator[str]:
    """Yield the faults of blocks on the artifact's architectures, and of kernels that differ from ``export.json``."""
    for each in archs_of(arch):
        gpu = BY_ARCH[each]
        if each not in runs_on:
            yield f"a kernel has no code for {each}, the artifact's architecture"
        yield from excesses(launches_on(taken, gpu.arch), each, gpu.shared_memory_per_block)
    for method, named in kernels.items():
        for name, code in named.items():
            if spilled := usages[code].spill_bytes:
                yield f"kernel {name} of {method} spills {spilled} bytes"
    for method, entries in launches.items():
        for entry in entries:
            code = kernels.get(method, {}).get(entry["kernel"])
            if code is None:
                yield f"{method} has no kernel {entry['kernel']}, which export.json has"
            elif usages[code].threads not in {0, *(each["threads"] for each in (entry, *entry.get("cards", ())))}:
                told = f"{entry['threads']} threads in export.json, {usages[code].threads} in its code"
                yield f"kernel {entry['kernel']} of {method} has {told}"
