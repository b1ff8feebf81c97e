"""On which architectures what a CUDA artifact's kernels take is there: threads, registers and shared memory of a block.

The exporter recorded each launch (``export.json``). Machine code and PTX of an architecture run on later ones too, some
of which allow less shared memory: 99 KB on sm_86, sm_89 and sm_120 where sm_80 allows 163.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3.runner.artifact.cuda_library import runs_on
from eagle3.runner.artifact.record import read_export
from eagle3.runner.contract import LAUNCHES
from eagle3.runner.hardware.gpus import GPUS, excesses, gpus_of


def recorded_launches(model: Path) -> dict[str, list[dict[str, Any]]]:
    """Method to its launches, as the record beside a ``model.pte`` has them; empty where it has none."""
    try:
        methods = read_export(model.parent)[LAUNCHES]
        return {name: list(method["launches"]) for name, method in methods.items()}
    except (LookupError, TypeError, AttributeError):
        return {}


def architectures(
    images: Mapping[str, list[tuple[str, str]]], launches: Mapping[str, list[dict[str, Any]]]
) -> dict[str, str | None]:
    """Each architecture of the table that all kernels have code for, and what it has not for a launch, None where it
    has everything. ``images``: form and architecture of each kernel's code (``cuda.images_of``)."""
    found = {}
    for arch in dict.fromkeys(f"sm_{gpu.arch}" for gpu in GPUS.values()):
        gpu, *_ = gpus_of(arch)
        if all(any(runs_on(*image, gpu.capability) for image in each) for each in images.values()):
            found[arch] = next(excesses(launches, arch, gpu.shared_memory_per_block), None)
    return found
