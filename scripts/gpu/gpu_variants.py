"""The small-M kernels and variants that ``gpu_tournament.py`` compares, and the linears on which they run.

A new kernel, or another way to launch one, is a line in ``VARIANTS``. Variants with the same ``format`` compute the
same products from the same weights. Variants with the same ``order`` add in the same order and give the same bits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from gpu_cubins import Kernel
from torch import Tensor

from eagle3.export.lowering.cuda.kernels import bf16, k_quants, small_m
from eagle3.export.lowering.cuda.kernels.int4.records import kernel as int4_records
from eagle3.export.lowering.cuda.kernels.int4.records import layout as record_layout
from eagle3.export.lowering.cuda.kernels.int4.tiles import kernel as int4
from eagle3.export.lowering.cuda.kernels.sums import GELU_TANH

ROUND = {"sliding_qkv": "", "sliding_o": "", "gate_up": GELU_TANH, "down": ""}
"""The linears of a layer of Gemma 4 31B, in the order of a round, with their activations."""
SIZES = {
    "sliding_qkv": (16384, 5376), "sliding_o": (5376, 8192), "gate_up": (43008, 5376), "down": (5376, 21504),
    "lm_head": (262144, 5376),
}  # fmt: skip
CLOSE = 2**-7
"""The largest permitted error of an output, as a share of the largest output."""
CHECKED = 1024
"""The number of outputs at each end, and of each half of a gated linear, that are compared with the plain product."""
Weight = tuple[Tensor, ...]
Linears = dict[str, tuple[int, int, str]]
"""The sizes [N, K] and the activations of linears, by name."""
GEMMA: Linears = {name: (*size, ROUND.get(name, "")) for name, size in SIZES.items()}
"""The linears of Gemma 4 31B that the tournament runs on."""
K_QUANTS = {"q4_k": 4, "q5_k": 5, "q6_k": 6}
"""The bits of a code by format. These formats run on ``down`` alone."""


@dataclass(frozen=True)
class Variant:
    """A variant of a kernel. ``lay_out`` converts the common weight to its layout; ``launch(kernel, x, weight, arrived,
    activation, following)`` runs it, where ``following`` is the weight of the next matmul. ``levers``: the names of the
    kernel's constants that make the variant."""

    name: str
    format: str
    order: str
    kernel: triton.JITFunction
    lay_out: Callable[..., Weight]
    launch: Callable[..., Tensor]
    rows: tuple[int, ...] = (4, 16)
    levers: frozenset[str] = frozenset()


def most_rows(x: Tensor) -> int:
    return 8 if x.shape[0] <= 8 else 16


def _tiled(
    kernel: Kernel, x: Tensor, weight: Weight, arrived: Tensor, activation: str, _following: Weight | None
) -> Tensor:
    qdata, codes, steps = weight
    given = qdata.chunk(2) if activation else [qdata]
    return int4._launch_int4(kernel, x, given, codes, steps, arrived, activation)


def _records(name: str, order: str = "records", rows: tuple[int, ...] = (4, 16), **asked: int) -> Variant:
    def launch(
        kernel: Kernel, x: Tensor, weight: Weight, arrived: Tensor, activation: str, following: Weight | None
    ) -> Tensor:
        (packed,), more = weight, dict[str, Any](asked)
        if more.pop("next", False):
            more["following"] = packed if following is None else following[0]
        return int4_records._launch_records(kernel, x, packed, arrived, activation, most_rows(x), **more)

    kernel, levers = int4_records.int4_records_small_m_kernel, frozenset(asked) - {"next", "FIRST"}
    levers |= {"OF_NEXT"} if "next" in asked else set()
    return Variant(name, "int4", order, kernel, lambda *parts: (record_layout.records(*parts),), launch, rows, levers)


def _bf16(
    kernel: Kernel, x: Tensor, weight: Weight, arrived: Tensor, activation: str, _following: Weight | None
) -> Tensor:
    return bf16._launch_bf16(kernel, x, *weight, arrived, activation)


def _int8(
    kernel: Kernel, x: Tensor, weight: Weight, arrived: Tensor, _activation: str, _following: Weight | None
) -> Tensor:
    return small_m._launch_int8(kernel, x, *weight, arrived)


def _k_quant(
    kernel: Kernel, x: Tensor, weight: Weight, arrived: Tensor, _activation: str, _following: Weight | None
) -> Tensor:
    return k_quants._launch_k_quant(kernel, x, *_with_high(weight), arrived)


def _with_high(weight: Weight) -> tuple[Any, ...]:
    """Return the four parts of a K-quant; Q4_K has no high bits."""
    qdata, *high, codes, steps = weight
    return qdata, *(high or [None]), codes, steps


VARIANTS = (
    Variant("tiled", "int4", "tiled", int4.int4_small_m_kernel, lambda q, *rest: (q, *int4.tiled(*rest)), _tiled),
    _records("records"),
    _records("records, 4 blocks ahead in L2", AHEAD=4),
    _records("records, the next in L2", rows=(4,), next=True),
    _records("records, early", rows=(4,), **int4_records.LEVERS),
    _records("records, early, the next in L2", rows=(4,), **int4_records.LEVERS, next=True),
    _records("records, early, the next and 4 blocks ahead in L2", rows=(4,), **int4_records.LEVERS, AHEAD=4, next=True),
    _records("records by bulk copies", BULK=True),
    _records("records by bulk copies, early, the next in L2", rows=(4,), BULK=True, EARLY=True, next=True),
    Variant("bf16", "bf16", "bf16", bf16._bf16_small_m_kernel, lambda w: (w,), _bf16, (4,)),
    Variant("int8", "int8", "int8", small_m._int8_small_m_kernel, lambda *parts: parts, _int8, (4,)),
    *(Variant(name, name, name, k_quants._k_quant_small_m_kernel, lambda *parts: parts, _k_quant) for name in K_QUANTS),
)


def made(format: str, n: int, k: int, device: str) -> Weight:
    """Return a random weight of a format, the same at each call: for INT4 the parts of a
    ``CudaCoalescedInt4Tensor``."""
    generator = None if device == "meta" else torch.Generator(device).manual_seed(n + k)

    def codes(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        least = torch.iinfo(dtype).min
        return torch.randint(least, least + 256, shape, dtype=dtype, device=device, generator=generator)

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, device=device, generator=generator)

    def steps(largest: float) -> Tensor:
        return (rand(n, k // 256) * largest / 255).half()

    if format == "bf16":
        return (torch.randn(n, k, device=device, generator=generator).bfloat16(),)
    if format == "int8":
        scale = rand(n, k // 32).bfloat16() / 100
        return codes(n, k, dtype=torch.int8), scale, codes(n, k // 32, dtype=torch.int8)
    if bits := K_QUANTS.get(format):
        tiles, blocks = -(-n // int4.TILE), k // int4.BLOCK
        high = [codes(n // k_quants.OF_WORD[bits], k // 2)] if bits > 4 else []
        scales = codes(tiles, blocks, 8, int4.TILE, 2, dtype=torch.int8 if bits == 6 else torch.uint8)
        step = rand(tiles, blocks, int4.TILE, 1 if bits == 6 else 2) / 1000
        return codes(n, k // 2), *high, scales, step.half()
    return codes(n, k // 2), codes(n, k // 32), steps(0.1), codes(n, k // 32), steps(15)


def dense(format: str, weight: Weight, rows: slice) -> Tensor:
    """Return some rows of a weight made by ``made`` as float32 [N, K]."""
    if format in K_QUANTS:
        return k_quants.dequantized(*_with_high(weight))[rows]
    weight = tuple(part[rows] for part in weight)
    if format == "bf16":
        return weight[0].float()
    if format == "int8":
        return small_m.int8_dequantized(*weight)
    return int4.dequantized([weight[0]], *int4.tiled(*weight[1:]))[0]


def cases(linears: Linears, variants: tuple[Variant, ...] | None = None) -> list[tuple[str, int, Variant]]:
    """Return all combinations of linear, number of rows and variant."""
    return [
        (linear, rows, variant)
        for linear, (_, _, activation) in linears.items()
        for variant in variants or VARIANTS
        for rows in variant.rows
        if not activation or variant.format in ("int4", "bf16")
        if linear == "down" or variant.format not in K_QUANTS
    ]
