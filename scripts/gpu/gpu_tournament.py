"""Times every small-M kernel and its variants on one model's linears, checks their bits, and prints which to choose.

    python scripts/gpu/gpu_tournament.py make tournament.tar.xz     # here, without a GPU: machine code, to carry to one
    python scripts/gpu/gpu_tournament.py run tournament.tar.xz      # there; needs torch and this project's sources

The machine code is compiled by this machine's Triton; the other machine launches it through CUDA's driver. A run has
these stages:

1. ``right``: outputs against the plain product, the bits of variants that add in the same order, and counters.
2. ``gaps``: the cost of a launch in a graph, from empty kernels in a row, with and without early launch.
3. ``alone``: each variant on each linear, over weights larger than any L2, timed twice; the difference is the noise.
4. ``resident``: the same over one weight that fits into L2, which leaves out the time of memory.
5. ``layers``: the linears of 60 layers in a row, with waits where attention and norms are, as in a round.
6. ``prefill``: the INT4 kernel of many rows at 512, 1,024 and 2,048 rows, portable and with wgmma (``gpu_prefill.py``).
"""

import json
import tarfile
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
import triton
import triton.language as tl
from bench_small_m import CYCLED, copy_bandwidth, microseconds
from gpu_cubins import MANIFEST, Compiling, Cubins, Driver, Kernel, Launching
from gpu_prefill import compile_prefill, run_prefill
from gpu_variants import CHECKED, CLOSE, GEMMA, ROUND, VARIANTS, Linears, Variant, Weight, cases, dense, made
from torch import Tensor

from eagle3.export.lowering.cuda.kernels.sums import counters, gated, made_for_named

STAGES = ("right", "gaps", "alone", "resident", "layers", "prefill")
LAYERS, COPIES, EMPTY = 60, 4, 500
HELD = 30e6
"""The most bytes of a weight that certainly fits into L2."""
WAITS = {"sliding_qkv": 10_000, "sliding_o": 2_000, "down": 2_000}
"""The nanoseconds of waiting after a linear, in place of attention and of norms."""


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
    """Compile all launches into ``folder`` and return the manifest."""
    manifest: dict[str, Any] = {}
    arrived = counters("meta")
    with made_for_named("sm_90"):
        for linear, rows, variant in cases(linears):
            n, k, activation = linears[linear]
            weight = variant.lay_out(*made(variant.format, n, k, "meta"))
            for following in nexts(variant, linear, linears):
                x = torch.empty(rows, k, dtype=torch.bfloat16, device="meta")
                variant.launch(Compiling(variant.kernel, folder, manifest), x, weight, arrived, activation, following)
    compile_prefill(folder, manifest, linears, arrived)
    for early in (False, True):
        wait(Compiling(wait_kernel, folder, manifest), arrived, 0, early)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return manifest


def nexts(variant: Variant, linear: str, linears: Linears) -> list[Weight | None]:
    """Return the weights that may follow a linear: None, and the weight of the next linear in a round."""
    if linear not in ROUND or variant.format != "int4":
        return [None]
    order = [name for name in ROUND if name in linears]
    n, k, _ = linears[order[(order.index(linear) + 1) % len(order)]]
    return [None, variant.lay_out(*made(variant.format, n, k, "meta"))]


class Run:
    """The stages of a run on ``device``, whose results are collected in ``found``."""

    def __init__(self, cubins: Cubins, linears: Linears, device: str = "cuda"):
        self.cubins, self.linears, self.device = cubins, linears, device
        self.arrived = counters(device)
        self.found: dict[str, Any] = {stage: {} for stage in STAGES}

    def launch(
        self, variant: Variant, x: Tensor, weight: Weight, activation: str, following: Weight | None = None
    ) -> Tensor:
        kernel = Launching(variant.kernel, self.cubins)
        return variant.launch(kernel, x, weight, self.arrived, activation, following)

    def right(self) -> None:
        """Check each variant. A wrong variant is recorded and not timed; no error is raised."""
        for linear, (n, k, activation) in self.linears.items():
            for format in dict.fromkeys(variant.format for variant in VARIANTS):
                common = made(format, n, k, self.device)
                bits: dict[tuple[str, int], Tensor] = {}
                for _, rows, variant in cases({linear: self.linears[linear]}):
                    if variant.format == format:
                        weight = variant.lay_out(*common)
                        fault = self.fault(variant, rows, weight, common, activation, bits)
                        self.found["right"][name_of(linear, rows, variant)] = fault
                        click.echo(f"right  {name_of(linear, rows, variant):50} {fault or 'right'}")

    def fault(
        self, variant: Variant, rows: int, weight: Weight, common: Weight, activation: str,
        bits: dict[tuple[str, int], Tensor],
    ) -> str:  # fmt: skip
        """Return the fault of a variant, "" if it has none. ``bits``: the outputs so far, by order and rows."""
        k = dense_columns(variant.format, common)
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
        same = bits.setdefault((variant.order, rows), out)
        return "" if torch.equal(same, out) else f"other bits than another variant that adds as {variant.order} do"

    def alone(self) -> None:
        for linear, (n, k, activation) in self.linears.items():
            for _, rows, variant in cases({linear: self.linears[linear]}):
                name = name_of(linear, rows, variant)
                if self.found["right"].get(name):
                    continue
                weight = variant.lay_out(*made(variant.format, n, k, self.device))
                size = sum(part.nbytes for part in weight)
                copies = [weight, *(tuple(part.clone() for part in weight) for _ in range(CYCLED // size))]
                x = torch.randn(rows, k, device=self.device).bfloat16()
                pairs = zip(copies, [*copies[1:], copies[0]], strict=True)
                calls = [partial(self.launch, variant, x, each, activation, after) for each, after in pairs]
                times = [microseconds(calls) for _ in range(2)]
                self.found["alone"][name] = {"us": times, "bytes": size}
                click.echo(f"alone  {name:50} {times[0]:8.2f} {times[1]:8.2f} us {size / times[1] / 1e6:6.2f} TB/s")

    def gaps(self) -> None:
        for early in (False, True):
            us = microseconds(self.gap_calls(early))
            self.found["gaps"]["early" if early else "plain"] = us
            click.echo(f"gaps   {'early' if early else 'plain':50} {us:8.2f} us a kernel")

    def gap_calls(self, early: bool) -> list[Callable[[], None]]:
        return [partial(wait, Launching(wait_kernel, self.cubins), self.arrived, 0, early)] * EMPTY

    def resident(self) -> None:
        for linear, rows, variant in cases(self.linears):
            n, k, activation = self.linears[linear]
            name = name_of(linear, rows, variant)
            weight = variant.lay_out(*made(variant.format, n, k, "meta"))
            if sum(part.nbytes for part in weight) > HELD or self.found["right"].get(name):
                continue
            weight = variant.lay_out(*made(variant.format, n, k, self.device))
            x = torch.randn(rows, k, device=self.device).bfloat16()
            us = microseconds([partial(self.launch, variant, x, weight, activation, weight)] * 20)
            self.found["resident"][name] = us
            click.echo(f"resident {name:48} {us:8.2f} us")

    def layers(self) -> None:
        order = [linear for linear in ROUND if linear in self.linears]
        inputs = {name: torch.randn(4, self.linears[name][1], device=self.device).bfloat16() for name in order}
        for variant in VARIANTS:
            if variant.format != "int4" or any(self.found["right"].get(name_of(name, 4, variant)) for name in order):
                continue
            copies = [
                {name: variant.lay_out(*made("int4", *self.linears[name][:2], self.device)) for name in order}
                for _ in range(COPIES)
            ]
            us = microseconds([self.layers_of(variant, order, inputs, copies)], repeats=20)
            self.found["layers"][variant.name] = us
            click.echo(f"layers {variant.name:50} {us:8.1f} us for {LAYERS} layers")
            del copies
            torch.cuda.empty_cache()

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

    def prefill(self) -> None:
        run_prefill(self.cubins, self.linears, self.arrived, self.device, self.found["prefill"])

    def choice(self) -> dict[str, dict[str, Any]]:
        """Return the fastest correct variant of each linear and number of rows, with its gain over the first one
        listed."""
        chosen: dict[str, dict[str, Any]] = {}
        for linear, rows, variant in cases(self.linears):
            timed = self.found["alone"].get(name_of(linear, rows, variant))
            if timed is None:
                continue
            of = chosen.setdefault(f"{linear}, {rows} rows, {variant.format}", {"us": {}})
            of["us"][variant.name] = max(timed["us"])
        for of in chosen.values():
            of["choose"] = min(of["us"], key=of["us"].__getitem__)
            of["gain"] = next(iter(of["us"].values())) / of["us"][of["choose"]]
        return chosen


def name_of(linear: str, rows: int, variant: Variant) -> str:
    return f"{linear}, {rows} rows, {variant.name}"


def dense_columns(format: str, weight: Weight) -> int:
    return weight[0].shape[1] * (2 if format == "int4" else 1)


def expected_of(format: str, weight: Weight, x: Tensor, activation: str) -> tuple[slice, Tensor]:
    """Return the slice of outputs that are checked, the last ones, and their float32 values by the plain product."""
    outputs = weight[0].shape[0] // (2 if activation else 1)
    some = slice(max(0, outputs - CHECKED), outputs)

    def product(rows: slice) -> Tensor:
        return (x.float() @ dense(format, tuple(part[rows] for part in weight)).T).to(x.dtype)

    if not activation:
        return some, product(some).float()
    up = slice(some.start + outputs, some.stop + outputs)
    return some, gated(torch.cat([product(some), product(up)], 1), activation).float()


@click.group()
def main() -> None:
    """Compare small-M kernels on a GPU of another machine."""


@main.command("make")
@click.argument("archive", type=click.Path(path_type=Path, dir_okay=False))
def make(archive: Path) -> None:
    """Compile every launch for sm_90 into ARCHIVE. No GPU is needed."""
    with tempfile.TemporaryDirectory() as folder:
        manifest = compile_all(Path(folder), GEMMA)
        with tarfile.open(archive, "w:xz") as packed:
            for file in sorted(Path(folder).iterdir()):
                packed.add(file, file.name)
    click.echo(f"{archive}: {len(manifest)} kernels, {archive.stat().st_size / 1e6:.2f} MB")


@main.command("run")
@click.argument("archive", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("stages", nargs=-1, type=click.Choice(STAGES))
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write what was found here.")
def run_all(archive: Path, stages: tuple[str, ...], json_file: Path | None) -> None:
    """Run STAGES (default: all) on this machine's GPU, and print which variants to choose."""
    if not torch.cuda.is_available():
        raise click.ClickException("there is no CUDA GPU here: take the archive to one")
    with tempfile.TemporaryDirectory() as folder, tarfile.open(archive) as packed, made_for_named("sm_90"):
        packed.extractall(folder, filter="data")
        cubins = Cubins(Path(folder), Driver(), lambda: torch.cuda.current_stream().cuda_stream)
        torch.zeros(1, device="cuda")  # creates a context
        bandwidth, device = copy_bandwidth(), torch.cuda.get_device_name()
        click.echo(f"{device}: a copy moves {bandwidth / 1e12:.2f} TB/s")
        found = Run(cubins, GEMMA)
        for stage in stages or STAGES:
            try:
                getattr(found, stage)()
            except (RuntimeError, ValueError) as error:  # the next stage still runs
                click.echo(f"{stage}: {error}")
            result = {"device": device, "copy_bytes_per_s": bandwidth, **found.found, "choice": found.choice()}
            if json_file:
                json_file.write_text(json.dumps(result, indent=1) + "\n")
    for name, of in found.choice().items():
        click.echo(f"choose {name:40} {of['choose']} ({of['gain']:.2f} times as fast as {next(iter(of['us']))})")


if __name__ == "__main__":
    main()
