"""Times the operations of a CPU artifact by the number of rows: XNNPACK's matmuls, ExecuTorch's attention.

    python scripts/bench/bench_cpu_kernels.py                       # qwen3-4B's MLP, llama3.1-8B's attention; 2 minutes
    python scripts/bench/bench_cpu_kernels.py --keys 4000

If the last column is near 1, a verify window of four rows costs little more than one row. Times rise in steps, because
XNNPACK's kernels process 5, 7 or another number of rows at a time, depending on the processor. A chain length that
fills such a tile has the lowest cost per token. 4-bit linears are split along K for verify windows of four rows, as an
export does it, except in the rows named "unsplit". float16 is measured only here, and an export does not offer it. It
is measured on eight linears without the conversions to and from float32 that a model would need around each.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # set before torch is imported, since XNNPACK has threads of its own

import statistics
import time
from collections.abc import Callable

import click
import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401  (registers torch.ops.llama)
import torch
from torch import nn
from torch.export import Dim

from eagle3.export.lowering.xnnpack.full_attention import FullAttention
from eagle3.export.lowering.xnnpack.llm_ops_attention import heads_as_rows, heads_together, repeated_rows, rows_as_heads
from eagle3.export.lowering.xnnpack.lowering import lower
from eagle3.export.lowering.xnnpack.quantization import Recipe, quantize
from eagle3.export.lowering.xnnpack.split_k import split_wide_linears
from eagle3.runner.hosts.executorch_host import load_runtime
from eagle3.runner.system.command import OneLineFailures, calm_stderr
from eagle3.targets.attention import KVCacheShape

LAYERS, HIDDEN, INTERMEDIATE = 4, 2560, 9728  # larger than the processor's caches
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
RECIPES = {
    "float32": None,
    "float16": None,
    "8da8w": Recipe("8da8w", "none", 0),
    "8da4w, groups of 32": Recipe("8da4w", "none", 32),
    "8da4w, groups of 32, unsplit": Recipe("8da4w", "none", 32),
    "8da4w, groups of 256": Recipe("8da4w", "none", 256),
    "8da4w, groups of 256, unsplit": Recipe("8da4w", "none", 256),
}
ROWS, WINDOW = range(1, 9), 4
Times = dict[int, float]
"""The milliseconds of a call, by its number of rows."""


class Mlps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = ((HIDDEN, INTERMEDIATE), (INTERMEDIATE, HIDDEN)) * LAYERS
        self.linears = nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            x = linear(x)
        return x


Calls = Callable[[int], Callable[[], object]]
"""Makes a call for a number of rows."""


def product(name: str) -> Calls:
    """Lower the linears by a recipe."""
    dtype = torch.float16 if name == "float16" else torch.float32
    model, recipe = Mlps().eval().requires_grad_(False).to(dtype), RECIPES[name]
    if recipe:
        quantize(model, recipe, spare=set())
    if "unsplit" not in name:
        split_wide_linears(model, WINDOW)
    example = torch.randn(1, 3, HIDDEN, dtype=dtype)
    rows = {1: Dim("rows", min=1, max=max(ROWS))}
    program = torch.export.export(model, (example,), dynamic_shapes=(rows,), strict=False)
    execute = lowered(program)

    def call(rows: int) -> Callable[[], object]:
        x = torch.randn(1, rows, HIDDEN, dtype=dtype)
        return lambda: execute([x])

    return call


def lowered(program: torch.export.ExportedProgram) -> Callable[[list[torch.Tensor]], object]:
    """Return a function that executes the lowered program."""
    made = lower({"forward": program}, {})
    buffer = made.buffer
    with calm_stderr():
        method = load_runtime().load_program(buffer).load_method("forward")
    return lambda given: (method.execute(given), len(buffer))  # keeps ``buffer`` alive, since ``method`` does not


def attention(keys: int, window: bool = False, together: int = 1) -> Calls:
    """Make calls of one layer's attention after ``keys`` positions, or of a sliding layer's, whose ring has ``keys``
    slots and a mask. ``together`` heads are computed as rows of one head."""
    cache = [torch.randn(1, keys if window else keys + max(ROWS), KV_HEADS, HEAD_DIM) for _ in range(2)]

    def call(rows: int) -> Callable[[], object]:
        query, mask = torch.randn(1, rows, HEADS, HEAD_DIM), torch.zeros(rows, keys)
        given = (0, repeated_rows(mask, together), 0.0, False) if window else (keys, None, 0.0, True)

        def attend() -> torch.Tensor:
            found = torch.ops.llama.custom_sdpa(heads_as_rows(query, together), *cache, *given, HEAD_DIM**-0.5)
            return rows_as_heads(found, together)

        return attend

    return call


class FullLayer(nn.Module):
    """The attention of a layer, as in an export."""

    def __init__(self, slots: int):
        super().__init__()
        self.attention = FullAttention(KVCacheShape(KV_HEADS, HEAD_DIM, slots, heads=HEADS))

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, input_pos: torch.Tensor
    ) -> torch.Tensor:
        return self.attention(query, key, value, self.attention.rows(input_pos), HEAD_DIM**-0.5)


def exported_attention(keys: int) -> Calls:
    """Like ``attention``, as in an export, which computes several rows by XNNPACK's products over the used slots."""

    def call(rows: int) -> Callable[[], object]:
        shapes = [(1, rows, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        given = [*map(torch.randn, shapes), torch.arange(keys, keys + rows)]
        program = torch.export.export(FullLayer(keys + max(ROWS)), tuple(given), strict=False)
        execute = lowered(program)
        return lambda: execute(given)

    return call


def int8_attention(keys: int) -> Calls:
    """Like ``attention``, for keys and values in 8 bits with a scale for each token and head, which the export does not
    offer. The quantization of the query is not timed."""

    def quantized(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        codes = torch.randint(-128, 128, shape, dtype=torch.int8)
        return codes, torch.zeros(*shape[:-1], 1, dtype=torch.int8), torch.full((*shape[:-1], 1), 0.01)

    cache = [quantized(1, keys + max(ROWS), KV_HEADS, HEAD_DIM) for _ in range(2)]

    def call(rows: int) -> Callable[[], object]:
        codes, zeros, scales = zip(quantized(1, rows, HEADS, HEAD_DIM), *cache, strict=True)
        of_each = (part for pair in zip(zeros, scales, strict=True) for part in pair)
        given = *codes, keys, None, 0.0, True, HEAD_DIM**-0.5, *of_each
        return lambda: torch.ops.llama.custom_quantized_sdpa(*given)

    return call


def measured(make: Calls, repeats: int) -> Times:
    """Return the median times. The numbers of rows are measured in turn."""
    calls, times = {rows: make(rows) for rows in ROWS}, {rows: [] for rows in ROWS}
    for _ in range(repeats):
        for rows, call in calls.items():
            call()  # the first call with a shape plans memory, so step_milliseconds cannot be used
            start = time.perf_counter()
            call()
            times[rows].append(1000 * (time.perf_counter() - start))
    return {rows: statistics.median(found) for rows, found in times.items()}


def show(title: str, times: dict[str, Times]) -> None:
    width = max(map(len, times))
    click.echo(f"\n{title}\n{'':{width}}  " + "".join(f"{rows:>8}" for rows in ROWS) + "   4 rows to 1")
    for name, found in times.items():
        click.echo(
            f"{name:{width}}  " + "".join(f"{found[rows]:8.2f}" for rows in ROWS) + f"{found[4] / found[1]:14.2f}"
        )


@click.command(cls=OneLineFailures, help=__doc__.partition("\n")[0])
@click.option("--keys", default=1000, show_default=True, help="Positions before the rows.")
@click.option("--repeats", default=25, show_default=True)
def main(keys: int, repeats: int) -> None:
    torch.manual_seed(0)
    products = {name: measured(product(name), repeats) for name in RECIPES}
    ways = {"float32": attention(keys), "float32, as an export has it": exported_attention(keys)}
    ways |= {"int8": int8_attention(keys), "float32, a ring": attention(keys, window=True)}
    ways |= {"float32, a ring, heads as rows": attention(keys, window=True, together=heads_together(HEADS, KV_HEADS))}
    attentions = {name: measured(way, repeats) for name, way in ways.items()}
    show(f"{2 * LAYERS} linears of {HIDDEN} x {INTERMEDIATE}: ms by rows", products)
    show(f"Attention of {HEADS} heads, {KV_HEADS} of keys, over {keys} positions: ms by rows", attentions)


if __name__ == "__main__":
    main()
