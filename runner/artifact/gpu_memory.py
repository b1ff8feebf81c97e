"""What a run of a CUDA artifact takes of a GPU's memory: read from its files, none of the weights among them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from eagle3.runner.artifact.cuda_weights import WeightTable
from eagle3.runner.artifact.record import read_export
from eagle3.runner.contract import LAUNCHES, SPECULATE, TARGET_VERIFY, WORKSPACE
from eagle3.runner.hardware.gpus import CONTEXT_BYTES


def gpu_memory(model: Path, tables: Iterable[WeightTable]) -> dict[str, Any]:
    """Bytes of ``weights``, ``caches``, ``workspace`` (None where the exporter did not record it), ``context`` and
    their ``total``."""
    kept = {key: weight for table in tables for key, weight in table.storages().items() if weight.device == "cuda"}
    caches = sum(weight.storage_bytes for weight in kept.values() if "cache" in weight.name)
    found = {
        "weights": sum(weight.storage_bytes for weight in kept.values()) - caches,
        "caches": caches,
        "workspace": workspace_of(model),
        "context": CONTEXT_BYTES,
    }
    return found | {"total": sum(filter(None, found.values()))}


def workspace_of(model: Path) -> int | None:
    """Bytes of intermediate tensors, as the record beside a ``model.pte`` has them; None where it does not."""
    try:
        methods = read_export(model.parent)[LAUNCHES]
        return _workspace({name: method[WORKSPACE] for name, method in methods.items()})
    except (LookupError, TypeError, AttributeError):
        return None


def _workspace(methods: Mapping[str, int]) -> int:
    """Methods run one at a time and take turns at one pool, but a round that was captured keeps its own."""
    captured = SPECULATE if SPECULATE in methods else TARGET_VERIFY
    return max(methods.values()) + methods[captured]
