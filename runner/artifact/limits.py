"""Finds the architectures that allow the threads, registers and shared memory of a CUDA artifact's blocks.

The exporter recorded each launch (``export.json``). Code for one architecture also runs on later ones, and some of them
allow less shared memory: 99 KB on sm_86, sm_89 and sm_120, 163 KB on sm_80.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3.runner.artifact.cuda_library import runs_on
from eagle3.runner.artifact.record import read_export
from eagle3.runner.contract import LAUNCHES
from eagle3.runner.hardware.gpus import GPUS, excesses, gpus_of


def recorded_launches(model: Path) -> dict[str, list[dict[str, Any]]]:
    """Map each method to its launches, as recorded beside a ``model.pte``; {} if they are not recorded."""
    try:
        methods = read_export(model.parent)[LAUNCHES]
        return {name: list(method["launches"]) for name, method in methods.items()}
    except (LookupError, TypeError, AttributeError):
        return {}


def architectures(
    images: Mapping[str, list[tuple[str, str]]], launches: Mapping[str, list[dict[str, Any]]]
) -> dict[str, str | None]:
    """Map each architecture that all kernels have code for to the first line of ``excesses``, None if every launch
    fits. ``images``: (form, architecture) of each kernel's code (``cuda_library.images_of``)."""
    found = {}
    for arch in dict.fromkeys(f"sm_{gpu.arch}" for gpu in GPUS.values()):
        gpu, *_ = gpus_of(arch)
        if all(any(runs_on(*image, gpu.capability) for image in each) for each in images.values()):
            found[arch] = next(excesses(launches, arch, gpu.shared_memory_per_block), None)
    return found
