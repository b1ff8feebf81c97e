"""Computes the GPU memory that a CUDA artifact needs, without reading its weights, and reads the launches that the
exporter recorded (``export.json``).

It also reads the weight tables of a program's CUDA delegates.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle3.runner.artifact.cuda_library import CUDA_BACKEND
from eagle3.runner.artifact.cuda_weights import WeightTable, decode_weight_table
from eagle3.runner.artifact.pte import Pte
from eagle3.runner.artifact.record import read_export
from eagle3.runner.contract import LAUNCHES, SPECULATE, TARGET_VERIFY, WORKSPACE
from eagle3.runner.system.gpus import CONTEXT_BYTES

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


def weight_tables(pte: Pte) -> dict[str, list[WeightTable]]:
    """Map each method to the weight tables of its CUDA delegates."""
    tables = {}
    for plan in pte.program.execution_plan:
        blobs = [pte.delegate_blob(delegate) for delegate in plan.delegates if delegate.id == CUDA_BACKEND]
        if blobs:
            with naming(pte, plan.name):
                tables[plan.name] = [decode_weight_table(blob) for blob in blobs]
    return tables


@contextmanager
def naming(pte: Pte, method: str) -> Iterator[None]:
    """Add the file and the method to the message of a ValueError raised inside."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{pte.path}, method {method}: {error}") from error
