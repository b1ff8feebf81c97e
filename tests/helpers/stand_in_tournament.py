"""Launches every case of a small kernel tournament on the stand-in for the driver, which checks launches and computes
nothing.

python tests/helpers/stand_in_tournament.py FOLDER     FOLDER has the machine code; prints the number of launches
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts" / "gpu"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "gpu_stand_in"))

import click
import torch
from gpu_cubins import Cubins
from gpu_prefill import ROWS, calls, laid_out
from gpu_tournament import Run
from gpu_variants import ROUND, cases, made
from small_tournament import LINEARS
from stand_in_driver import H100, StandIn

from eagle3.export.lowering.cuda.kernels.sums import made_for_named


def main() -> None:
    device = StandIn()
    device.become(H100)
    cubins = Cubins(Path(sys.argv[1]), device, lambda: 0)
    run = Run(cubins, LINEARS, "cpu")
    with made_for_named("sm_90"):
        for linear, rows, variant in cases(LINEARS):
            n, k, activation = LINEARS[linear]
            weight = variant.lay_out(*made(variant.format, n, k, "cpu"))
            run.launch(variant, torch.zeros(rows, k).bfloat16(), weight, activation)
        order = list(LINEARS)
        inputs = {name: torch.zeros(4, LINEARS[name][1]).bfloat16() for name in order}
        for variant in {variant.name: variant for _, _, variant in cases(LINEARS)}.values():
            if variant.format == "int4":
                weights = {name: variant.lay_out(*made("int4", *LINEARS[name][:2], "cpu")) for name in order}
                run.layers_of(variant, order, inputs, [weights] * 4)()
    for linear, (n, k, _) in LINEARS.items():
        for rows in ROWS if linear in ROUND else ():
            _, weight = laid_out(n, k, "cpu")
            for call in calls(cubins, torch.zeros(rows, k).bfloat16(), weight, run.arrived).values():
                call()
    for early in (False, True):
        for call in run.gap_calls(early):
            call()
    click.echo(f"{device.calls('cuLaunchKernelEx')} launches")
    assert device.journal() == [], device.journal()


if __name__ == "__main__":
    main()
