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

import click
from bench_export import watched
from published import EAGLE3, HEADS, TARGET, TARGET_CONFIGS, save_pair


@click.command(epilog="\b\n" + __doc__.split("\n\n")[1])
@click.option("--target", type=click.Choice(list(TARGET_CONFIGS)), default="qwen3-4B", show_default=True)
@click.option("--layers", type=click.IntRange(1), help="The number of layers. Default: all.")
@click.option("--draft", type=click.Choice(list(HEADS)), default=EAGLE3, help="Kind of head.", show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), help="Keep the checkpoints here, and use those there.")
def main(target: str, layers: int | None, draft: str, folder: Path | None) -> None:
    """Measure how long a measurement of a head takes, and how much memory."""
    with tempfile.TemporaryDirectory() as temporary:
        place = folder or Path(temporary)
        save_pair(place, target, TARGET_CONFIGS[target](*([layers] if layers else [])), draft)
        command = [sys.executable, "-m", "eagle3.export.cli", "--fit-only", "--json", "--target-model", target]
        command += ["--checkpoint", str(place / TARGET), "--draft", str(place / draft), "--backend", "xnnpack"]
        with (place / "fit.json").open("w+") as printed:
            peaks, seconds = watched(command, printed)
            printed.seek(0)
            found = json.load(printed)
    text = found["target_seconds"]
    click.echo(
        f"{target}, {layers or 'all'} layers, {draft}: {seconds:.1f} s in all, of which the target over the text "
        f"{text} s and {len(found['readings'])} readings {found['seconds'] - text:.1f} s; at most "
        f"{peaks['RssAnon']:.2f} GiB; {found['verdict']}"
    )


if __name__ == "__main__":
    main()
