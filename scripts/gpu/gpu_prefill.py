"""The stage ``prefill`` of ``gpu_tournament.py``: the INT4 kernel of many rows, as portable code and with wgmma.

The portable code takes 64 rows a program and the other 128, as exports for GPUs without and with wgmma have them.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from bench_small_m import microseconds
from gpu_cubins import Compiling, Cubins, Kernel, Launching
from gpu_variants import CHECKED, CLOSE, ROUND, Linears, Weight, dense, made
from torch import Tensor

from eagle3.export.lowering.cuda.kernels.int4.tiles import kernel as int4
from eagle3.export.lowering.cuda.kernels.int4.tiles import matmul as int4_matmul
from eagle3.export.lowering.cuda.kernels.sums import made_for

ROWS = (512, 1024, 2048)
FORMS = {"portable": False, "sm_90a": True}
"""The forms of the code, and whether each has wgmma."""
PEAK = 989e12
"""FLOP/s of an H100 or H200 in bfloat16, without sparsity (NVIDIA's data sheet)."""
CALLS, MULTIPROCESSORS = 8, 132
KERNEL = int4_matmul._int4_matmul_kernel


def product(kernel: Kernel, x: Tensor, weight: Weight, arrived: Tensor, wgmma: bool) -> Tensor:
    qdata, codes, steps = weight
    with made_for(MULTIPROCESSORS, True, wgmma):
        return int4_matmul._launch_matmul(kernel, None, x, [qdata], codes, steps, arrived)


def laid_out(n: int, k: int, device: str) -> tuple[Weight, Weight]:
    """Return a random weight, as ``gpu_variants.made`` has it and in tiles."""
    common = made("int4", n, k, device)
    return common, (common[0], *int4.tiled(*common[1:]))


def compile_prefill(folder: Path, manifest: dict[str, Any], linears: Linears, arrived: Tensor) -> None:
    """Add the machine code of the stage to ``folder`` and ``manifest``."""
    for linear in linears.keys() & ROUND.keys():
        n, k, _ = linears[linear]
        _, weight = laid_out(n, k, "meta")
        for rows in ROWS:
            x = torch.empty(rows, k, dtype=torch.bfloat16, device="meta")
            for wgmma in FORMS.values():
                product(Compiling(KERNEL, folder, manifest, own=wgmma), x, weight, arrived, wgmma)


def run_prefill(cubins: Cubins, linears: Linears, arrived: Tensor, device: str, found: dict[str, Any]) -> None:
    """Check and time both forms on each linear; ``found`` gets the microseconds, FLOP/s and the share of ``PEAK``, or
    the error of a form that is wrong."""
    for linear in (name for name in ROUND if name in linears):
        n, k, _ = linears[linear]
        common, weight = laid_out(n, k, device)
        some = slice(max(0, n - CHECKED), n)
        right = dense("int4", tuple(part[some] for part in common)).bfloat16().float()
        for rows in ROWS:
            x = torch.randn(rows, k, device=device).bfloat16()
            expected = x.float() @ right.T
            for form, call in calls(cubins, x, weight, arrived).items():
                name = f"{linear}, {rows} rows, {form}"
                error = ((call()[:, some].float() - expected).abs().max() / expected.abs().max()).item()
                if not error < CLOSE or arrived.any():
                    arrived.zero_()
                    found[name] = {"error": error}
                    click.echo(f"prefill {name:48} an error of {error:.2g} of the largest output, or a counter is left")
                    continue
                us = microseconds([call] * CALLS)
                flops = 2e6 * rows * n * k / us
                found[name] = {"us": us, "flops": flops, "share_of_peak": flops / PEAK}
                click.echo(
                    f"prefill {name:48} {us:9.2f} us {flops / 1e12:6.1f} TFLOP/s, {flops / PEAK:.0%} of the peak"
                )


def calls(cubins: Cubins, x: Tensor, weight: Weight, arrived: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Return the calls of both forms, by form."""
    return {
        form: partial(product, Launching(KERNEL, cubins, own=wgmma), x, weight, arrived, wgmma)
        for form, wgmma in FORMS.items()
    }
