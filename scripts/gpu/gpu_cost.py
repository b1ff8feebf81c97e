"""Prints a lower bound for the time of a CUDA artifact's calls, counted without a GPU (``machine_code/bounds.py``).

    python scripts/gpu/gpu_cost.py out-cuda --gpu H200 --context 8192

A bound is not a time: what no GPU has timed is marked as not measured.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "helpers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "gpu_stand_in"))

import click
from machine_code.bounds import LAUNCH_SECONDS, cost_of

from eagle3.runner.artifact.opening import find_model, load_artifact
from eagle3.runner.system.gpus import GPUS
from eagle3.runner.system.tables import show_tables, table

NOT_MEASURED = {"int4_records": "records", "_fused_moe": "experts", "experts_small_m": "experts"}
"""The levers that have not been timed on a GPU, by a part of a kernel's name."""


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "))
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--gpu", "gpus", type=click.Choice(list(GPUS)), multiple=True, help="May be repeated.")
@click.option("--context", type=click.IntRange(1), help="Tokens in the KV caches. Default: caches are left out.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with each kernel's figures.")
def main(artifact: Path, gpus: tuple[str, ...], context: int | None, as_json: bool) -> None:
    model = find_model(artifact)
    try:
        found = cost_of(model, load_artifact(model, True).metadata, gpus, context or 0)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(found))
        return
    whole = "round: " + " + ".join(f"{count} {name}" for name, count in found["round"]["calls"].items())
    rows = (
        (name, part["launches"] if name == whole else part["launches"]["all"], gpu)
        + tuple(f"{bound[key] * 1e3:,.3f}" for key in ("limit", "bound", "bound_with_launches"))
        for name, part in (found["methods"] | {whole: found["round"]}).items()
        for gpu, bound in part["bounds"].items()
    )
    columns = ("call", "launches", "GPU", "memory's limit", "bound", f"with {LAUNCH_SECONDS * 1e6:.0f} us a launch")
    title = f"Lower bounds in ms (memory's limit: weights and the caches of {found['context']:,} tokens read once)"
    show_tables(str(model), (table(title, columns, rows, numbers={*columns} - {"call", "GPU"}),))
    kernels = {each["kernel"] for method in found["methods"].values() for each in method["kernels"]}
    for lever in sorted({lever for part, lever in NOT_MEASURED.items() if any(part in name for name in kernels)}):
        click.echo(f"{lever}: not measured")


if __name__ == "__main__":
    main()
