"""Prints what a CUDA artifact's calls take at least, counted without a GPU (``machine_code/bounds.py``), and what its
matmuls should take on the GPU on which their kernels were timed alone (``gpu_estimate.py``).

    python scripts/gpu/gpu_cost.py out-cuda --gpu H200 --context 8192
    python scripts/gpu/gpu_cost.py out-cuda --times found/A.json      # after a tournament
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "gpu_stand_in"))

import click
from gpu_estimate import TIMES, estimate, read_times
from machine_code.bounds import LAUNCH_SECONDS, cost_of
from rich.table import Table

from eagle3.runner.artifact.opening import find_model, load_artifact
from eagle3.runner.system.gpus import GPUS
from eagle3.runner.system.tables import show_tables, table

NOT_MEASURED = "not measured"


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "))
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--gpu", "gpus", type=click.Choice(list(GPUS)), multiple=True, help="May be repeated.")
@click.option("--context", type=click.IntRange(1), help="Tokens in the KV caches. Default: caches are left out.")
@click.option("--times", type=click.Path(path_type=Path, exists=True), default=TIMES, help="Times of kernels alone.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with each kernel's figures.")
def main(artifact: Path, gpus: tuple[str, ...], context: int | None, times: Path, as_json: bool) -> None:
    model = find_model(artifact)
    try:
        found = cost_of(model, load_artifact(model, True).metadata, gpus, context or 0)
        measured = read_times(times)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    found["estimate"] = estimate(found, measured)
    if as_json:
        click.echo(json.dumps(found))
        return
    show_tables(str(model), (bounds_table(found),))
    if found["estimate"]:
        show_tables(f"Measured alone: {measured.about}", (estimate_table(found["estimate"]),))
        click.echo("Estimates are fitted to times of these kernels alone, none to a round.")
    else:
        click.echo(f"No estimate: kernels were timed on an {measured.gpu}, type --gpu {measured.gpu!r}")


def bounds_table(found: Mapping[str, Any]) -> Table:
    whole = "round: " + " + ".join(f"{count} {name}" for name, count in found["round"]["calls"].items())
    rows = (
        (name, part["launches"] if name == whole else part["launches"]["all"], gpu)
        + tuple(f"{bound[key] * 1e3:,.3f}" for key in ("limit", "bound", "bound_with_launches"))
        for name, part in (found["methods"] | {whole: found["round"]}).items()
        for gpu, bound in part["bounds"].items()
    )
    columns = ("call", "launches", "GPU", "memory's limit", "bound", f"with {LAUNCH_SECONDS * 1e6:.0f} us a launch")
    title = f"Lower bounds in ms (memory's limit: weights and the caches of {found['context']:,} tokens read once)"
    return table(title, columns, rows, numbers={*columns} - {"call", "GPU"})


def estimate_table(estimate: Mapping[str, Any]) -> Table:
    rows = (
        (name, part["launches"], f"{part['bound'] * 1e3:,.3f}", _milliseconds(part["seconds"]))
        for name, part in estimate["parts"].items()
    )
    columns = ("kernels of a round", "launches", "bound", "estimate")
    return table(f"The round on an {estimate['gpu']}, ms", columns, rows, numbers={*columns} - {"kernels of a round"})


def _milliseconds(seconds: float | None) -> str:
    return NOT_MEASURED if seconds is None else f"{seconds * 1e3:,.3f}"


if __name__ == "__main__":
    main()
