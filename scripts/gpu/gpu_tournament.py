"""Times every kernel of few rows and its variants on one model's linears, checks their bits, and says which to choose.

    python scripts/gpu/gpu_tournament.py tournament.tar.xz     # without a GPU: machine code, to carry to one

The machine code is compiled by this machine's Triton; the other machine launches it through CUDA's driver, in the stage
``tournament`` of ``gpu_run.py``:

1. ``right``: outputs against the plain product, the bits of variants that add in the same order, and counters.
2. ``gaps``: the cost of a launch in a graph, from empty kernels in a row, with and without early launch.
3. ``alone``: each variant on each linear, over weights larger than any L2, timed twice; the difference is the noise.
4. ``layers``: the linears of 60 layers in a row, with waits where attention and norms are, as in a round.
5. ``prefill``: the INT4 kernel of many rows at 512, 1,024 and 2,048 rows, as portable code, which takes 64 rows a
   program, and with wgmma, which takes 128.
"""

import json
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
import triton
import triton.language as tl
from gpu_cubins import MANIFEST, Compiling, Cubins, Kernel, Launching
from gpu_variants import CHECKED, CLOSE, GEMMA, ROUND, Linears, Variant, Weight, cases, dense, made
from torch import Tensor

from eagle3.export.lowering.cuda.kernels.int4.tiles import kernel as int4
from eagle3.export.lowering.cuda.kernels.int4.tiles import matmul as int4_matmul
from eagle3.export.lowering.cuda.kernels.sums import counters, gated, made_for, made_for_named

DEVICE = "cuda"
LAYERS, COPIES, EMPTY = 60, 4, 500
COPIED = 1 << 30
"""The bytes of the copy whose speed is measured."""
WARM_UP_SECONDS = 1.0
"""The seconds of warm-up, because an idle GPU starts at a fraction of its clock."""
CYCLED = 512 << 20
"""The bytes of weights that calls use in turn, more than any L2 holds."""
WAITS = {"sliding_qkv": 10_000, "sliding_o": 2_000, "down": 2_000}
"""The nanoseconds of waiting after a linear, in place of attention and of norms."""
PREFILL_ROWS = (512, 1024, 2048)
FORMS = {"portable": False, "sm_90a": True}
"""The forms of a prefill's code, and whether each has wgmma."""
PEAK = 989e12
"""FLOP/s of an H100 or H200 in bfloat16, without sparsity (NVIDIA's data sheet)."""
PREFILL_CALLS, MULTIPROCESSORS = 8, 132
PREFILL_KERNEL = int4_matmul._int4_matmul_kernel
Facts = dict[str, Any]


@triton.jit
def wait_kernel(OUT, nanoseconds, EARLY: tl.constexpr):  # noqa: ANN001, ANN201
    # Runs for that many nanoseconds after its inputs are ready, like attention or a norm, and reads no memory.
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tl.inline_asm_elementwise(
        "{ .reg .u64 a, b, d; .reg .pred p; cvt.u64.u32 d, $1; mov.u64 a, %globaltimer; add.u64 d, d, a; "
        "again: mov.u64 b, %globaltimer; setp.lt.u64 p, b, d; @p bra again; mov.u32 $0, 0; }",
        "=r,r", [nanoseconds], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.store(OUT, 1, mask=tl.program_id(0) < 0)


def wait(kernel: Kernel, out: Tensor, nanoseconds: int, early: bool) -> None:
    kernel[(132,)](out, nanoseconds, EARLY=early, num_warps=4)


def compile_all(folder: Path, linears: Linears) -> dict[str, Any]:
    """Compile all launches into ``folder`` and return the manifest of kernels."""
    manifest: dict[str, Any] = {}
    arrived = counters("meta")
    with made_for_named("sm_90"):
        for linear, rows, variant in cases(linears):
            n, k, activation = linears[linear]
            weight = variant.lay_out(*made(variant.format, n, k, "meta"))
            for following in nexts(variant, linear, linears):
                x = torch.empty(rows, k, dtype=torch.bfloat16, device="meta")
                variant.launch(Compiling(variant.kernel, folder, manifest), x, weight, arrived, activation, following)
    for linear in linears.keys() & ROUND.keys():
        n, k, _ = linears[linear]
        _, weight = in_tiles(n, k, "meta")
        for rows in PREFILL_ROWS:
            x = torch.empty(rows, k, dtype=torch.bfloat16, device="meta")
            for wgmma in FORMS.values():
                product(Compiling(PREFILL_KERNEL, folder, manifest, own=wgmma), x, weight, arrived, wgmma)
    for early in (False, True):
        wait(Compiling(wait_kernel, folder, manifest), arrived, 0, early)
    (folder / MANIFEST).write_text(json.dumps({"linears": linears, "kernels": manifest}))
    return manifest


def nexts(variant: Variant, linear: str, linears: Linears) -> list[Weight | None]:
    """Return the weights that may follow a linear: None, and the weight of the next linear in a round."""
    if linear not in ROUND or variant.format != "int4":
        return [None]
    order = [name for name in ROUND if name in linears]
    n, k, _ = linears[order[(order.index(linear) + 1) % len(order)]]
    return [None, variant.lay_out(*made(variant.format, n, k, "meta"))]


class Tournament:
    """The steps on ``device``. A step returns its facts by the names of linear, rows and variant."""

    def __init__(self, cubins: Cubins, linears: Linears, device: str):
        self.cubins, self.linears, self.device = cubins, linears, device
        self.arrived = counters(device)
        self.bits: dict[tuple[str, int, str], Tensor] = {}
        """The first outputs by linear, rows and order of addition, which later variants must equal."""

    def launch(
        self, variant: Variant, x: Tensor, weight: Weight, activation: str, following: Weight | None = None
    ) -> Tensor:
        kernel = Launching(variant.kernel, self.cubins)
        return variant.launch(kernel, x, weight, self.arrived, activation, following)

    def right(self, variant: Variant) -> dict[str, str]:
        """Return the fault of a variant on each linear, "" if it has none."""
        found = {}
        for linear, rows, _ in cases(self.linears, (variant,)):
            n, k, activation = self.linears[linear]
            common = made(variant.format, n, k, self.device)
            found[name_of(linear, rows, variant)] = self.fault(variant, linear, rows, common, activation)
        return found

    def fault(self, variant: Variant, linear: str, rows: int, common: Weight, activation: str) -> str:
        k, weight = self.linears[linear][1], variant.lay_out(*common)
        x = torch.randn(rows, k, generator=torch.Generator().manual_seed(k)).bfloat16().to(self.device)
        out = self.launch(variant, x, weight, activation)
        some, expected = expected_of(variant.format, common, x, activation)
        error = ((out[:, some].float() - expected).abs().max() / expected.abs().max()).item()
        if not error < CLOSE:
            return f"an error of {error:.2g} of the largest output"
        if self.arrived.any():
            self.arrived.zero_()
            return "a counter was left"
        if rows <= 8 and not torch.equal(self.launch(variant, x[:1], weight, activation), out[:1]):
            return "a row alone has other bits"
        same = self.bits.setdefault((linear, rows, variant.order), out)
        return "" if torch.equal(same, out) else f"other bits than another variant that adds as {variant.order} do"

    def alone(self, variant: Variant) -> Facts:
        """Return two measurements in microseconds of each case."""
        found = {}
        for linear, rows, _ in cases(self.linears, (variant,)):
            n, k, activation = self.linears[linear]
            weight = variant.lay_out(*made(variant.format, n, k, self.device))
            size = sum(part.nbytes for part in weight)
            copies = [weight, *(tuple(part.clone() for part in weight) for _ in range(CYCLED // size))]
            x = torch.randn(rows, k).bfloat16().to(self.device)
            pairs = zip(copies, [*copies[1:], copies[0]], strict=True)
            calls = [partial(self.launch, variant, x, each, activation, after) for each, after in pairs]
            times = [round(microseconds(calls), 2) for _ in range(2)]
            found[name_of(linear, rows, variant)] = times
        return found

    def gaps(self) -> Facts:
        """Return the microseconds of an empty kernel in a row of them."""
        return {"early" if early else "plain": round(microseconds(self.gap_calls(early)), 3) for early in (False, True)}

    def gap_calls(self, early: bool) -> list[Callable[[], None]]:
        return [partial(wait, Launching(wait_kernel, self.cubins), self.arrived, 0, early)] * EMPTY

    def layers(self, variant: Variant) -> Facts:
        """Return the microseconds of the linears of ``LAYERS`` layers."""
        order = [linear for linear in ROUND if linear in self.linears]
        inputs = {name: torch.randn(4, self.linears[name][1]).bfloat16().to(self.device) for name in order}
        copies = [
            {name: variant.lay_out(*made("int4", *self.linears[name][:2], self.device)) for name in order}
            for _ in range(COPIES)
        ]
        us = microseconds([self.layers_of(variant, order, inputs, copies)], repeats=20)
        torch.cuda.empty_cache()
        return {"us": round(us, 1)}

    def layers_of(
        self, variant: Variant, order: list[str], inputs: dict[str, Tensor], copies: list[dict[str, Weight]]
    ) -> Callable[[], None]:
        steps = [(copies[layer % COPIES][name], name) for layer in range(LAYERS) for name in order]
        early = "early" in variant.name
        pause = Launching(wait_kernel, self.cubins)

        def run() -> None:
            for at, (weight, name) in enumerate(steps):
                following, _ = steps[(at + 1) % len(steps)]
                self.launch(variant, inputs[name], weight, self.linears[name][2], following)
                if name in WAITS:
                    wait(pause, self.arrived, WAITS[name], early)

        return run

    def prefill(self) -> Facts:
        """Return microseconds, FLOP/s and the share of ``PEAK`` of both forms, or the error of a form that is wrong."""
        found: Facts = {}
        for linear in (name for name in ROUND if name in self.linears):
            n, k, _ = self.linears[linear]
            common, weight = in_tiles(n, k, self.device)
            some = slice(max(0, n - CHECKED), n)
            right = dense("int4", common, some).bfloat16().float()
            for rows in PREFILL_ROWS:
                x = torch.randn(rows, k).bfloat16().to(self.device)
                expected = x.float() @ right.T
                for form, call in self.prefill_calls(x, weight).items():
                    name = f"{linear}, {rows} rows, {form}"
                    error = ((call()[:, some].float() - expected).abs().max() / expected.abs().max()).item()
                    if not error < CLOSE or self.arrived.any():
                        self.arrived.zero_()
                        found[name] = {"error": error}
                        continue
                    us = microseconds([call] * PREFILL_CALLS)
                    flops = 2e6 * rows * n * k / us
                    found[name] = {"us": us, "flops": flops, "share_of_peak": flops / PEAK}
        return found

    def prefill_calls(self, x: Tensor, weight: Weight) -> dict[str, Callable[[], Tensor]]:
        """Return the calls of both forms, by form."""
        return {
            form: partial(product, Launching(PREFILL_KERNEL, self.cubins, own=wgmma), x, weight, self.arrived, wgmma)
            for form, wgmma in FORMS.items()
        }


def choice(alone: dict[str, list[float]]) -> Facts:
    """Return the fastest variant of each linear, rows and format by the slower of two times, and its gain over the
    first variant listed."""
    chosen: Facts = {}
    for linear, rows, variant in cases(GEMMA):
        if timed := alone.get(name_of(linear, rows, variant)):
            chosen.setdefault(f"{linear}, {rows} rows, {variant.format}", {})[variant.name] = max(timed)
    return {
        name: {"choose": min(us, key=us.__getitem__), "gain": round(next(iter(us.values())) / min(us.values()), 3)}
        for name, us in chosen.items()
    }


def product(kernel: Kernel, x: Tensor, weight: Weight, arrived: Tensor, wgmma: bool) -> Tensor:
    qdata, codes, steps = weight
    with made_for(MULTIPROCESSORS, True, wgmma):
        return int4_matmul._launch_matmul(kernel, None, x, [qdata], codes, steps, arrived)


def in_tiles(n: int, k: int, device: str) -> tuple[Weight, Weight]:
    """Return a random weight, as ``gpu_variants.made`` has it and in tiles."""
    common = made("int4", n, k, device)
    return common, (common[0], *int4.tiled(*common[1:]))


def microseconds(calls: list[Callable[[], object]], repeats: int = 30) -> float:
    """Return the median time of a call. The calls run in turn from a CUDA graph, which leaves out the launch time of
    the host."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = [elapsed(graph.replay) for _ in range(repeats)]
    return 1e6 * statistics.median(times) / len(calls)


def elapsed(call: Callable[[], object]) -> float:
    """Return the seconds between two events around a call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end)


def copy_bandwidth() -> float:
    """Return the bytes per second, read and written, of a copy of 1 GiB, and leave the GPU at its full clock.

    The copies are not replayed by a CUDA graph, which would use a copy engine: 2.7 TB/s on an H200 instead of 4.25.
    """
    source = torch.empty(COPIED, dtype=torch.uint8, device="cuda")
    target, begin = torch.empty_like(source), time.monotonic()

    def ten() -> None:
        for _ in range(10):
            target.copy_(source)

    times: list[float] = []
    while time.monotonic() < begin + WARM_UP_SECONDS or len(times) < 2:
        times.append(elapsed(ten) / 10)
    return 2 * source.numel() / statistics.median(times[len(times) // 2 :])


def name_of(linear: str, rows: int, variant: Variant) -> str:
    return f"{linear}, {rows} rows, {variant.name}"


def expected_of(format: str, weight: Weight, x: Tensor, activation: str) -> tuple[slice, Tensor]:
    """Return the slice of outputs that are checked, the last ones, and their float32 values by the plain product."""
    outputs = weight[0].shape[0] // (2 if activation else 1)
    some = slice(max(0, outputs - CHECKED), outputs)

    def product(rows: slice) -> Tensor:
        return (x.float() @ dense(format, weight, rows).T).to(x.dtype)

    if not activation:
        return some, product(some).float()
    up = slice(some.start + outputs, some.stop + outputs)
    return some, gated(torch.cat([product(some), product(up)], 1), activation).float()


@click.command()
@click.argument("archive", type=click.Path(path_type=Path, dir_okay=False))
def main(archive: Path) -> None:
    """Compile every launch for sm_90 into ARCHIVE. No GPU is needed."""
    with tempfile.TemporaryDirectory() as folder:
        manifest = compile_all(Path(folder), GEMMA)
        with tarfile.open(archive, "w:xz") as packed:
            for file in sorted(Path(folder).iterdir()):
                packed.add(file, file.name)
    click.echo(f"{archive}: {len(manifest)} kernels, {archive.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
