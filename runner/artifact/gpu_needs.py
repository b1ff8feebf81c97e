"""Computes the GPU memory and the shared memory per block that a CUDA artifact needs, without reading its weights.

The exporter recorded each launch (``export.json``). Code for one architecture also runs on later ones, and some of them
allow less shared memory a block: 99 KB on sm_86, sm_89 and sm_120, 163 KB on sm_80.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from eagle3.runner.artifact.cuda_library import runs_on
from eagle3.runner.artifact.cuda_weights import WeightTable
from eagle3.runner.artifact.record import read_export
from eagle3.runner.contract import LAUNCHES, SPECULATE, TARGET_VERIFY, WORKSPACE
from eagle3.runner.hardware.gpus import BY_ARCH, CONTEXT_BYTES, excesses

CACHES = ("cache", "kept_state")
"""Parts of the names of what a run keeps: KV caches, and the states of recurrent and convolution layers."""


def gpu_memory(model: Path, tables: Iterable[WeightTable]) -> dict[str, Any]:
    """Return the bytes of ``weights``, ``caches``, ``workspace``, ``context`` and their ``total``. ``workspace`` is
    None if the exporter did not record it."""
    kept = {key: weight for table in tables for key, weight in table.storages().items() if weight.device == "cuda"}
    caches = sum(weight.storage_bytes for weight in kept.values() if any(name in weight.name for name in CACHES))
    found = {
        "weights": sum(weight.storage_bytes for weight in kept.values()) - caches,
        "caches": caches,
        "workspace": workspace_of(model),
        "context": CONTEXT_BYTES,
    }
    return found | {"total": sum(filter(None, found.values()))}


def workspace_of(model: Path) -> int | None:
    """Return the bytes of intermediate tensors, as recorded beside a ``model.pte``; None if they are not recorded."""
    try:
        methods = read_export(model.parent)[LAUNCHES]
        return _workspace({name: method[WORKSPACE] for name, method in methods.items()})
    except (LookupError, TypeError, AttributeError):
        return None


def _workspace(methods: Mapping[str, int]) -> int:
    """Return the total workspace. Methods run one at a time and share one memory pool, but a captured method has a pool
    of its own."""
    captured = SPECULATE if SPECULATE in methods else TARGET_VERIFY
    return max(methods.values()) + methods[captured]


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
    for arch, gpu in BY_ARCH.items():
        if all(any(runs_on(*image, gpu.capability) for image in each) for each in images.values()):
            found[arch] = next(excesses(launches, arch, gpu.shared_memory_per_block), None)
    return found
