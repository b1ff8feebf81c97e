"""Reads the CUDA delegates of a program: the weight table and the library of each."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eagle3.runner.artifact.cuda_library import CUDA_BACKEND, read_library
from eagle3.runner.artifact.cuda_weights import WeightTable, decode_weight_table
from eagle3.runner.artifact.pte import Pte, read_pte


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
