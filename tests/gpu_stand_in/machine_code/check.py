"""Checks the code of a CUDA artifact for faults that a GPU or a runtime would show only when it runs. Needs no GPU.

1. Barriers: each kernel's PTX must order the accesses to memory that threads share (``barriers.py``).
2. Blocks: threads, registers and shared memory must fit the GPUs that the artifact is for (``runner/system/gpus.py``).
3. Constants: each constant must be on the same device as its weight (``constants.py``).
4. Symbols: the runtimes must have every symbol that a library needs (``runtime_symbols.py``).
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from machine_code.barriers import faults as barrier_faults
from machine_code.constant_devices import constant_devices, constant_faults
from machine_code.libraries import architectures
from machine_code.runtime_symbols import lacking
from machine_code.sass import Usage, read_usages

from eagle3.runner.artifact.cuda_library import images_of, read_library
from eagle3.runner.artifact.cuda_weights import WeightTable
from eagle3.runner.system.gpus import excesses, gpus_of


@dataclass(frozen=True)
class Found:
    """A fault. ``check`` is "barriers", "blocks", "constants" or "symbols"; ``what`` is a sentence for the user."""

    check: str
    method: str
    what: str


def check_code(
    delegates: Mapping[str, list[tuple[WeightTable, bytes]]],
    launches: Mapping[str, list[dict[str, Any]]],
    arch: str | None,
) -> dict[str, Any]:
    """Run the four checks.

    Args:
        delegates: the weight tables and libraries of each method
        launches: the launches that the exporter recorded (``artifact/gpu_needs.recorded_launches``)
        arch: the architecture that the artifact says it was compiled for

    Returns ``faults``; ``methods``, the number of things checked in each; ``runs_on``, each architecture that has code
    and the resource that it lacks.

    Raises:
        ValueError: a damaged library
        FileNotFoundError: no ``cuobjdump`` to read PTX with
    """
    libraries = {method: [read_library(code) for _, code in parts] for method, parts in delegates.items()}
    kernels = {
        method: {name: code for library in found for name, code in library.kernels.items()}
        for method, found in libraries.items()
    }
    usages = read_usages(code for named in kernels.values() for code in named.values())
    taken = {method: list(_taken(kernels[method], usages, launches.get(method, []))) for method in kernels}
    images = {
        f"{method} {name}": images_of(f"kernel {name} of {method}", code, arch)
        for method, named in kernels.items()
        for name, code in named.items()
    }
    runs_on = architectures(images, taken)
    found = [
        *_barriers(kernels, usages),
        *_blocks(kernels, usages, launches, taken, runs_on, arch),
        *_constants(delegates),
        *(
            Found("symbols", method, f"the library of {method} needs {line}")
            for method, members in libraries.items()
            for library in members
            for line in lacking(library.needs, library.asks_for)
        ),
    ]
    return {
        "methods": {
            method: _counted(named, usages, taken[method], delegates[method]) for method, named in kernels.items()
        },
        "runs_on": runs_on,
        "faults": [asdict(fault) for fault in dict.fromkeys(found)],
    }


def _counted(
    named: Mapping[str, bytes],
    usages: Mapping[bytes, Usage],
    taken: list[dict[str, Any]],
    parts: list[tuple[WeightTable, bytes]],
) -> dict[str, Any]:
    return {
        "kernels": len(named),
        "kernels_with_ptx": sum(bool(usages[code].ptx) for code in named.values()),
        "constants": sum(len(table.weights) for table, _ in parts),
        "symbols": sum(len(read_library(code).needs) for _, code in parts),
        "most_threads": max((entry["threads"] for entry in taken), default=0),
        "most_registers": max((entry["registers"] for entry in taken), default=0),
        "most_shared_bytes": max((entry.get("shared_bytes", 0) for entry in taken), default=0),
        "spill_bytes": {name: usages[code].spill_bytes for name, code in named.items() if usages[code].spill_bytes},
    }


def _taken(
    named: Mapping[str, bytes], usages: Mapping[bytes, Usage], launches: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield the resources of a block of each kernel, from its code and the shared memory that its launches add."""
    given: dict[str, int] = {}
    for entry in launches:
        given[entry["kernel"]] = max(entry["shared_bytes"], given.get(entry["kernel"], 0))
    for name, code in named.items():
        usage = usages[code]
        shared = usage.shared_bytes + given.get(name, 0)
        yield {"kernel": name, "threads": usage.threads, "registers": usage.registers, "shared_bytes": shared}


def _barriers(kernels: Mapping[str, Mapping[str, bytes]], usages: Mapping[bytes, Usage]) -> Iterator[Found]:
    known: dict[str, list[str]] = {}
    for method, named in kernels.items():
        for name, code in named.items():
            for ptx in usages[code].ptx:
                if ptx not in known:
                    known[ptx] = _lines(ptx)
                for line in known[ptx]:
                    yield Found("barriers", method, f"in kernel {name} of {method} {line}")


def _lines(ptx: str) -> list[str]:
    """Return a line for each fault in ``ptx``. PTX that cannot be read counts as a fault."""
    try:
        return list(map(str, barrier_faults(ptx)))
    except ValueError as error:
        return [str(error)]


def _blocks(
    kernels: Mapping[str, Mapping[str, bytes]],
    usages: Mapping[bytes, Usage],
    launches: Mapping[str, list[dict[str, Any]]],
    taken: Mapping[str, list[dict[str, Any]]],
    runs_on: Mapping[str, str | None],
    arch: str | None,
) -> Iterator[Found]:
    """Yield the faults of blocks on the artifact's architecture, and of kernels that differ from ``export.json``."""
    for gpu in gpus_of(arch)[:1]:
        if arch not in runs_on:
            yield Found("blocks", "", f"a kernel has no code for {arch}, the artifact's architecture")
        for method, entries in taken.items():
            for line in excesses({method: entries}, f"sm_{gpu.arch}", gpu.shared_memory_per_block):
                yield Found("blocks", method, line)
    for method, entries in launches.items():
        for entry in entries:
            code = kernels.get(method, {}).get(entry["kernel"])
            if code is None:
                yield Found("blocks", method, f"{method} has no kernel {entry['kernel']}, which export.json has")
            elif usages[code].threads not in (0, entry["threads"]):
                told = f"{entry['threads']} threads in export.json, {usages[code].threads} in its code"
                yield Found("blocks", method, f"kernel {entry['kernel']} of {method} has {told}")


def _constants(delegates: Mapping[str, list[tuple[WeightTable, bytes]]]) -> Iterator[Found]:
    for method, parts in delegates.items():
        for table, code in parts:
            try:
                devices = constant_devices(code)
            except ValueError as error:
                yield Found("constants", method, f"{method}: {error}")
                continue
            for line in constant_faults(method, table, devices):
                yield Found("constants", method, line)
