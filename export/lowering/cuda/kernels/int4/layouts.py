"""The layouts of INT4 weights. ``--int4-layout`` names one of ``LAYOUTS``; nothing else depends on that name.

A layout is a folder here: ``tensor.py`` with the class of its weights, ``kernel.py`` and ``matmul.py`` with its matmuls
of few and of many rows. Weights are loaded in tiles, the first layout. ``pack`` then packs those that another layout
can hold, once linears are merged.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from eagle3.export.lowering.cuda.kernels.int4.records import kernel as records
from eagle3.export.lowering.cuda.kernels.int4.records.layout import fits
from eagle3.export.lowering.cuda.kernels.int4.records.matmul import int4_records_matmul
from eagle3.export.lowering.cuda.kernels.int4.records.tensor import RecordsInt4Tensor, pack_records
from eagle3.export.lowering.cuda.kernels.int4.tiles.kernel import int4_small_m
from eagle3.export.lowering.cuda.kernels.int4.tiles.matmul import int4_matmul
from eagle3.export.lowering.cuda.kernels.int4.tiles.tensor import TiledInt4Tensor
from eagle3.export.lowering.cuda.kernels.product import Product


@dataclass(frozen=True)
class Layout:
    product: Product
    pack: Callable[[nn.Module, Path], dict[str, int]] | None = None
    """Packs the weights of a model in place, into files on the disk of a folder, and returns their number by layout.
    None for the layout in which weights are loaded."""
    parts: Callable[[int, int, int, int], int | None] = lambda _n, _k, _group, _most_rows: None
    """Returns how many programs may share a tile of a weight [n, k]; None if the weight keeps its tiles."""
    early: bool = False
    """True if a round's kernels begin before those in front of them have ended, and ask L2 for the weights that come
    next, on GPUs that can do so."""


def _parts_of_records(n: int, k: int, group: int, most_rows: int) -> int | None:
    return records.shares_here(n, k, most_rows).parts if fits(n, k, group) else None


LAYOUTS = {
    "tiles": Layout(Product(TiledInt4Tensor, int4_small_m, int4_matmul, lambda weight: weight.parts, gate="tile")),
    "records": Layout(
        Product(
            RecordsInt4Tensor,
            records.int4_records_small_m,
            int4_records_matmul,
            lambda weight: (weight.qdata,),
            by_limit=True,
            gate="halves",
            asks_l2=True,
        ),
        pack_records,
        _parts_of_records,
        early=True,
    ),
}


def layout_of(name: str | None) -> Layout:
    """Return the layout that ``--int4-layout`` names; without the flag, the first."""
    return LAYOUTS[name] if name else next(iter(LAYOUTS.values()))
