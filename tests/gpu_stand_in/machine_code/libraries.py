"""Reads the libraries of a CUDA artifact's methods, and says which GPU runs which of a kernel's images."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3.runner.artifact.cuda_library import read_library, runs_on, served
from eagle3.runner.artifact.cuda_weights import WeightTable
from eagle3.runner.artifact.gpu_needs import naming, weight_tables
from eagle3.runner.artifact.pte import read_pte
from eagle3.runner.system.gpus import BY_ARCH, excesses, launches_on


def cuda_delegates(model: Path) -> dict[str, list[tuple[WeightTable, bytes]]]:
    """Map each method to the weight table and the library of each of its CUDA delegates."""
    pte = read_pte(model)
    return {
        name: [(table, pte.named(table.library_key)) for table in tables] for name, tables in weight_tables(pte).items()
    }


def cuda_kernels(model: Path) -> dict[str, dict[str, bytes]]:
    """Map each method to its CUDA kernels: fatbins by name. Raises ValueError for a damaged library."""
    pte = read_pte(model)
    found: dict[str, dict[str, bytes]] = {}
    for name, tables in weight_tables(pte).items():
        with naming(pte, name):
            libraries = [read_library(pte.named(table.library_key)) for table in tables]
        found[name] = {kernel: fatbin for library in libraries for kernel, fatbin in library.kernels.items()}
    return found


def preferred(archs: list[str], capability: tuple[int, int] | None) -> str:
    """Return which of these machine codes CUDA's driver takes on a GPU of this compute capability: code for that GPU
    alone before code for its family.

    If the GPU runs none of them, it compiles the PTX, for which the first code stands here; so it does for None.
    """
    running = [arch for arch in archs if capability and runs_on("sass", arch, capability)]
    return max(running, key=lambda arch: (arch.endswith("a"), arch), default=archs[0])


def architectures(
    images: Mapping[str, list[tuple[str, str]]], launches: Mapping[str, list[dict[str, Any]]]
) -> dict[str, str | None]:
    """Map each architecture that all kernels have code for to the first line of ``excesses``, None if every launch
    fits. ``images``: (form, architecture) of each kernel's code (``cuda_library.images_of``)."""
    found = {}
    for arch in served(images.values()):
        gpu = BY_ARCH[arch]
        found[arch] = next(excesses(launches_on(launches, gpu.arch), arch, gpu.shared_memory_per_block), None)
    return found


def without_images(fatbin: bytes, arch: int) -> bytes:
    """Return a fatbin whose images for ``arch`` (80 is sm_80) are for a GPU that does not exist."""
    changed, (at, size) = bytearray(fatbin), struct.unpack_from("<HQ", fatbin, 6)
    end = at + size
    while at < end:
        entry_header, payload = struct.unpack_from("<IQ", fatbin, at + 4)
        if struct.unpack_from("<I", fatbin, at + 28) == (arch,):
            struct.pack_into("<I", changed, at + 28, 1000)
        at += entry_header + payload
    return bytes(changed)
