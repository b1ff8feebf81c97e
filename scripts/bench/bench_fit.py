"""Measures the time and the memory that ``eagle3-fit`` takes at published widths, with random weights.

    python scripts/bench/bench_fit.py --target qwen3-4B --draft eagle3
    python scripts/bench/bench_fit.py --target gemma4-31B --layers 6 --draft dflash

The command writes a bfloat16 checkpoint and a head into a folder, runs ``eagle3-export --fit-only`` on them in a
process of its own, and samples that process's memory. A head of random weights is no pair: readings with two
changes are tried as well, more than of a head that fits.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from bench_export import FULL_LAYERS, TARGET, save_for_cpu, save_for_gpu, watched
from cpu_models import CPU_MODELS
from published_heads import HEADS
from published_widths import gemma4_config

GEMMA4 = "gemma4-31B"


@click.command()
@click.option("--target", type=click.Choice([*CPU_MODELS, GEMMA4]), default="qwen3-4B", show_default=True)
@click.option("--layers", type=click.IntRange(1), help="The number of layers. Default: all.")
@click.option("--draft", type=click.Choice(list(HEADS)), default="eagle3", help="Kind of head.", show_default=True)
@click.option(
    "--folder", type=click.Path(path_type=Path), help="Keep the checkpoints here, and use those that are there."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(target: str, layers: int | None, draft: str, folder: Path | None, as_json: bool) -> None:
    """Measure how long a measurement of a head takes, and how much memory.

    \b
    Examples:
      python scripts/bench/bench_fit.py --target qwen3-4B --draft eagle3
      python scripts/bench/bench_fit.py --target gemma4-31B --layers 6
    """
    with tempfile.TemporaryDirectory() as temporary:
        place = folder or Path(temporary)
        save(place, target, layers, draft)
        result = measure(place, target, draft)
    if as_json:
        click.echo(json.dumps(result))
        return
    click.echo(
        f"{target}, {layers or 'all'} layers, {draft}: {result['seconds']} s in all, of which the target over the text "
        f"{result['target_seconds']} s and {result['readings']} readings {result['readings_seconds']} s; at most "
        f"{result['peak_anonymous_gib']} GiB"
    )


def save(place: Path, target: str, layers: int | None, draft: str) -> None:
    """Write the checkpoints that are not in ``place`` yet."""
    if target == GEMMA4:
        save_for_gpu(place, gemma4_config(layers or FULL_LAYERS), draft, unquantized=True)
    else:
        save_for_cpu(place, target, CPU_MODELS[target](*([layers] if layers else [])), draft)


def measure(place: Path, target: str, draft: str) -> dict[str, Any]:
    """Measure the head, and return seconds, peak memory and what the measurement found."""
    command = [sys.executable, "-m", "eagle3.export.cli", "--fit-only", "--json", "--target-model", target]
    command += ["--checkpoint", str(place / TARGET), "--draft", str(place / draft), "--backend", "xnnpack"]
    with (place / "fit.json").open("w+") as printed:
        peaks, seconds = watched(command, printed)
        printed.seek(0)
        found = json.load(printed)
    return {
        "target": target,
        "draft": draft,
        "seconds": round(seconds, 1),
        "target_seconds": found["target_seconds"],
        "readings": len(found["readings"]),
        "readings_seconds": round(found["seconds"] - found["target_seconds"], 1),
        "peak_anonymous_gib": round(peaks["RssAnon"], 2),
        "peak_resident_gib": round(peaks["VmHWM"], 2),
        "verdict": found["verdict"],
    }


if __name__ == "__main__":
    main()
