"""Small launches of every kernel of this project, with K and positions split among programs."""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import NamedTuple
from unittest.mock import patch

import torch
from attention_products import made as made_product
from kernel_inputs import (
    choices,
    int4_experts_weights,
    int4_weight,
    int8_experts_weights,
    int8_weight,
    k_quant_weight,
    parts,
)

from eagle3.export.lowering.cuda.kernels import (
    advance,
    attention,
    attention_chunk,
    attention_sums,
    bf16,
    heads,
    int4_experts,
    int8_experts,
    int8_matmul,
    k_quant_matmul,
    k_quants,
    l2,
    large_m,
    recurrent,
    recurrent_block,
    small_m,
    sums,
)
from eagle3.export.lowering.cuda.kernels import choices as kernel_choices
from eagle3.export.lowering.cuda.kernels.int4.records import kernel as int4_records
from eagle3.export.lowering.cuda.kernels.int4.records import layout as record_layout
from eagle3.export.lowering.cuda.kernels.int4.records import matmul as int4_records_matmul
from eagle3.export.lowering.cuda.kernels.int4.tiles import kernel as int4
from eagle3.export.lowering.cuda.kernels.int4.tiles import matmul as int4_matmul
from eagle3.targets.attention import int8_codes
from eagle3.targets.spec import ROLLBACK_ROWS


class Small(NamedTuple):
    run: Callable[[], object]
    modules: tuple[ModuleType, ...]
    """Those whose kernels it launches."""


def _rows(m: int, k: int) -> torch.Tensor:
    torch.manual_seed(m + k)
    return torch.randn(m, k).bfloat16()


def bf16_product(activation: str = "", count: int | None = 2, outputs: int = 128) -> None:
    weight = torch.randn(outputs, 256).bfloat16()
    choice = replace(bf16.BF16, parts=count)
    bf16._launch_bf16(bf16._bf16_small_m_kernel, _rows(3, 256), weight, sums.counters(), activation, choice)


def int8_product(count: int | None = 2, outputs: int = 70) -> None:
    choice = replace(small_m.INT8, parts=count)
    weight = int8_weight(outputs, 512, 32)
    small_m._launch_int8(small_m._int8_small_m_kernel, _rows(3, 512), *weight, sums.counters(), choice)


def int4_product(activation: str = "", count: int | None = 2, outputs: int = 130, rows: int = 3) -> None:
    choice = replace(int4.INT4, parts=count)
    weight = parts(int4_weight(outputs, 512))
    given = _rows(rows, 512), *weight, sums.counters(), activation
    int4._launch_int4(int4.int4_small_m_kernel, *given, choice=choice)


def int4_records_product(activation: str = "", rows: int = 3) -> None:
    """Launch three programs for two tiles of three blocks, or for many rows two programs for three such tiles, so that
    programs share tiles and one has parts of both."""
    outputs = 128 if rows <= 8 else 192
    given = (
        _rows(rows, 768),
        record_layout.records(*int4_weight(outputs, 768)),
        sums.counters(),
        activation,
        max(8, rows),
    )
    with sums.made_for(1, False):
        int4_records._launch_records(int4_records.int4_records_small_m_kernel, *given)


def k_quant_product(count: int | None = 2, outputs: int = 70) -> None:
    packed, _ = k_quant_weight("Q5_K", outputs, 512)
    choice = replace(k_quants.CHOICES[5], parts=count)
    kernel = k_quants._k_quant_small_m_kernel
    k_quants._launch_k_quant(kernel, _rows(3, 512), *packed.parts, sums.counters(), choice=choice)


def int4_large() -> None:
    kernels = int4_matmul._int4_matmul_kernel, int4_matmul.int4_small_m_kernel
    int4_matmul._launch_matmul(*kernels, _rows(33, 512), *parts(int4_weight(130, 512)), sums.counters(), 2)


def int4_records_large() -> None:
    kernels = int4_records_matmul._int4_records_matmul_kernel, int4_records.int4_records_small_m_kernel
    given = _rows(33, 512), record_layout.records(*int4_weight(192, 512)), sums.counters()
    int4_records_matmul._launch_matmul(*kernels, *given, count=2)


def int8_large() -> None:
    kernel = int8_matmul._int8_matmul_kernel
    int8_matmul._launch_matmul(kernel, _rows(33, 512), *int8_weight(130, 512, 32), sums.counters(), 2)


def k_quant_large() -> None:
    packed, _ = k_quant_weight("Q5_K", 130, 512)
    kernel = k_quant_matmul._k_quant_matmul_kernel
    k_quant_matmul._launch_k_quant_matmul(kernel, _rows(33, 512), *packed.parts, sums.counters(), 2)


def attend(rows: int, last: int, slots: int, window: int = 0) -> None:
    """Launch attention with 2 key heads and 4 query heads, divided into parts for up to 16 rows. With a ``window`` the
    cache is a ring, and the last program to arrive adds the parts; otherwise another launch adds them."""
    query, keys, values = _rows(rows, 64).view(1, rows, 4, 16), *torch.randn(2, 1, 2, slots, 16).bfloat16()
    at = torch.arange(last + 1 - rows, last + 1)
    first = (at - window + 1).clamp(min=0) if window else torch.zeros_like(at)
    rest = first, at, sums.counters(), 0.25, window or slots, 16, 0.0, None
    kernels = attention._attention_kernel, attention.attention_sum_kernel
    attention.launch(kernels, query, keys, values, *rest, BLOCK_N=32)


def attend_in_chunk(**constants: int) -> None:
    """Launch attention of 41 rows of a prefill with 2 key heads and 4 query heads to a ring."""
    query, keys, values = _rows(41, 64).view(1, 41, 4, 16), *torch.randn(2, 1, 2, 128, 16).bfloat16()
    last = torch.arange(160, 201)
    rest = (last - 63).clamp(min=0), last, 0.25, 0.0, None
    attention_chunk.launch_chunk(attention_chunk._attention_chunk_kernel, query, keys, values, *rest, **constants)


def attend_to_product(rows: int, first: int, window: int = 0, int8: bool = False) -> None:
    """Launch attention whose queries, keys and values are rows of a matmul, from position ``first`` on, with 8 rows in
    a tile. With a ``window`` the cache is a ring. With ``int8`` it holds INT8 codes."""
    product, keys, values, begins, last, scale, longest, *made = made_product(rows, first, 2, 2, 16, window, True)
    query = torch.empty(1, rows, made[5], 16).bfloat16()
    given = query, keys, values, begins, last, sums.counters(), scale, longest, 8, 0.0, None
    scales = None, None
    if int8:
        (keys, *of_keys), (values, *of_values) = int8_codes(keys), int8_codes(values)
        given, scales = (query, keys, values, *given[3:]), (*of_keys, *of_values)
    kernels = attention._attention_kernel, attention.attention_sum_kernel
    attention.launch(kernels, *given, *scales, attention.Product(product, *made), BLOCK_N=64)


def experts_of(rows: int) -> None:
    """Launch 4 experts, of which each row chooses 2, with sizes of outputs and K that are not multiples of a tile."""
    x, weights, (chosen, factors) = _rows(rows, 96), int4_experts_weights(4, 96, 32), choices(rows, 4, 2)
    kernel = int4_experts.int4_experts_small_m_kernel
    inner = int4_experts._launch_experts(kernel, x, *weights[:2], chosen, factors, sums.SILU)
    int4_experts._launch_experts(kernel, inner, *weights[2:], chosen, factors)


def int8_experts_of(rows: int) -> None:
    x, (chosen, _) = _rows(rows, 96), choices(rows, 4, 2)
    kernel, weights = int8_experts._int8_experts_small_m_kernel, int8_experts_weights(4, 70, 96)
    int8_experts._launch_experts(kernel, x, *weights, chosen)


def recur(rows: int, first: int, committed: int, delta: bool = True, decays: int = 1) -> None:
    """Launch rows of 4 heads of which two share a key head, or a chunk if there are more than 16, and the advance of
    the committed position: of the gated delta rule, of Kimi's (24 ``decays``) or of Mamba 2."""
    torch.manual_seed(rows)
    query, key, value = torch.randn(2, rows, 24), torch.randn(2, rows, 24), torch.randn(4, rows, 40)
    query, key = (each / each.norm(dim=-1, keepdim=True) for each in (query, key))
    decay, beta, state = -torch.rand(4, rows, decays), torch.rand(4, rows), torch.randn(4, 24, 40)
    decay = decay if decays > 1 else decay[..., 0]
    changes = torch.randn(1, recurrent.SLOTS, 1, 2 * 24 + 4 * 40 + 4 * decays)
    changes[..., -4 * decays :] *= 0.1
    at, out = (torch.tensor([first]), torch.tensor([committed])), torch.empty(4, rows, 40)
    given = query, key, value, decay, beta if delta else None, state
    from_saved = torch.tensor([False]) if rows > ROLLBACK_ROWS else None
    positions = torch.arange(first, first + rows), at[1].clone(), torch.zeros(1, dtype=torch.int64), from_saved
    advance.launch(advance._advance_kernel, *positions, torch.empty(1, dtype=torch.int64))
    if rows > ROLLBACK_ROWS:
        kernels = recurrent._recurrent_chunk_kernel, recurrent._recurrent_rows_kernel
        recurrent.launch_chunk(kernels, *given, state.clone(), changes, *at, from_saved, out)
    else:
        recurrent.launch_rows(recurrent._recurrent_rows_kernel, *given, changes, *at, out)


EXPERTS = sums, small_m, int4, kernel_choices, int4_experts
SMALL_M = sums, small_m, l2, bf16, int4, k_quants
RECORDS = sums, small_m, l2, int4_records
LARGE_M = sums, small_m, int4, large_m, int4_matmul, int4_records_matmul, int8_matmul, k_quant_matmul
ATTENTION = attention, attention_chunk, attention_sums, heads, sums


def with_whole_tiles(product: Callable[..., None], multiprocessors: int, **given: object) -> Small:
    """Return a product on a GPU so small that some of its tiles have one program and the others two."""

    def run() -> None:
        divisions, programs = [], sums.Division.programs

        def seen(division: sums.Division, tiles: int) -> tuple[int, int]:
            divisions.append(division)
            return programs(division, tiles)

        with sums.made_for(multiprocessors, True), patch.object(sums.Division, "programs", seen):
            product(count=None, **given)
        assert divisions and all(division.whole and division.parts > 1 for division in divisions)

    return Small(run, SMALL_M)


SMALL = {
    "bf16": Small(bf16_product, SMALL_M),
    "bf16, gated": Small(lambda: bf16_product(sums.SILU, 1), SMALL_M),
    "int8": Small(int8_product, SMALL_M),
    "int4": Small(int4_product, SMALL_M),
    "int4, 16 rows": Small(lambda: int4_product(rows=16), SMALL_M),
    "int4 records": Small(int4_records_product, RECORDS),
    "int4 records, 16 rows": Small(lambda: int4_records_product(rows=16), RECORDS),
    "int4 records, gated": Small(lambda: int4_records_product(sums.SILU), RECORDS),
    "K-quants": Small(k_quant_product, SMALL_M),
    "bf16, whole tiles": with_whole_tiles(bf16_product, 1, outputs=192),
    "bf16, gated, whole tiles": with_whole_tiles(bf16_product, 2, outputs=384, activation=sums.SILU),
    "int8, whole tiles": with_whole_tiles(int8_product, 1, outputs=192),
    "int4, whole tiles": with_whole_tiles(int4_product, 1, outputs=384),
    "int4, gated, whole tiles": with_whole_tiles(int4_product, 2, outputs=768, activation=sums.GELU_TANH),
    "int4, gated, whole tiles, 16 rows": with_whole_tiles(
        int4_product, 2, outputs=768, activation=sums.GELU_TANH, rows=16
    ),
    "K-quants, whole tiles": with_whole_tiles(k_quant_product, 1, outputs=3 * k_quants.CHOICES[5].n),
    "experts": Small(lambda: experts_of(5), EXPERTS),
    "int8 experts": Small(lambda: int8_experts_of(5), (sums, small_m, kernel_choices, int8_experts)),
    "int4, many rows": Small(int4_large, LARGE_M),
    "int4 records, many rows": Small(int4_records_large, LARGE_M),
    "int8, many rows": Small(int8_large, LARGE_M),
    "K-quants, many rows": Small(k_quant_large, LARGE_M),
    "recurrent rows": Small(lambda: recur(16, 40, 24), (recurrent, recurrent_block, advance)),
    "recurrent chunk": Small(lambda: recur(41, 30, 19), (recurrent, recurrent_block, advance)),
    "rows of Mamba 2": Small(lambda: recur(16, 40, 24, delta=False), (recurrent, recurrent_block, advance)),
    "chunk of Mamba 2": Small(lambda: recur(41, 30, 19, delta=False), (recurrent, recurrent_block, advance)),
    "rows of Kimi": Small(lambda: recur(16, 40, 24, decays=24), (recurrent, recurrent_block, advance)),
    "chunk of Kimi": Small(lambda: recur(41, 30, 19, decays=24), (recurrent, recurrent_block, advance)),
    "attention": Small(lambda: attend(3, 200, 256), ATTENTION),
    "attention in one part": Small(lambda: attend(17, 31, 600), ATTENTION),
    "attention, a window": Small(lambda: attend(3, 300, 512, 256), ATTENTION),
    "attention, a window in one part": Small(lambda: attend(17, 31, 512, 256), ATTENTION),
    "attention of a chunk": Small(lambda: attend_in_chunk(BLOCK_M=64, ROWS=32, BLOCK_N=32), ATTENTION),
    "attention of a product": Small(lambda: attend_to_product(12, 116), ATTENTION),
    "attention of a product, a ring": Small(lambda: attend_to_product(4, 114, 64), ATTENTION),
    "attention of a product, codes": Small(lambda: attend_to_product(12, 116, int8=True), ATTENTION),
}
