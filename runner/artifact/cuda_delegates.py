"""Reads the weight tables of a program's CUDA delegates."""

from collections.abc import Iterator
from contextlib import contextmanager

from eagle3.runner.artifact.cuda_library import CUDA_BACKEND
from eagle3.runner.artifact.cuda_weights import WeightTable, decode_weight_table
from eagle3.runner.artifact.pte import Pte


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
