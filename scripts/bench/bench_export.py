"""Measures an export of Gemma 4 31B, or of a model for the CPU, with any number of full-width layers: seconds per stage
and peak memory. A CPU artifact is also run (``bench_steps.py``).

    python scripts/bench/bench_export.py --layers 6,12 --cuda-arch sm_90
    python scripts/bench/bench_export.py --layers 6 --cuda-arch sm_90 --draft dflash -- --chain-len 7
    python scripts/bench/bench_export.py --backend xnnpack --target qwen3-4B --qlinear 8da4w
    python scripts/bench/bench_export.py --backend mlx --target qwen3-4B

The command writes a synthetic checkpoint (random INT4 linears and INT8 embedding in the format of ExecuTorch's
quantize_and_save, or bfloat16 without cuda; a random bfloat16 head of a published shape) into a temporary
folder, exports it in a process of its own and samples that process's memory. RssAnon is the memory that the process and
its children hold, without files mapped into them. Multiples of six layers have the same share of full-attention layers
as the whole model. ``scripts/gpu/gpu_cost.py`` computes bounds for a round of a CUDA artifact, which --folder keeps.

--int4-layout may be repeated: then each layout is exported, from the same checkpoints. With --pack each artifact is
packed for a machine with a GPU and deleted, so that there is room for the next one:

    python scripts/bench/bench_export.py --layers 60 --cuda-arch sm_90 --folder wide --pack \\
        --int4-layout tiles --int4-layout records
"""

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

import click
from published import CPU_MODELS, EAGLE3, GEMMA4, HEADS, TARGET, gemma4_config, save_pair

from eagle3.export.configuration.config import INT4_LAYOUTS
from eagle3.runner.system.machine import linux_bytes

SAMPLE_SECONDS = 0.1
ARTIFACT = "artifact"
"""The name of an artifact's folder, if no layout names it."""
RECIPES = {"xnnpack": "8da4w", "mlx": "4w"}
"""The backends for small models, each with its default recipe."""
CARRY = Path(__file__).parents[1] / "gpu" / "gpu_carry.py"


def children(process: int) -> list[int]:
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return []


def held_gib(process: int, key: str) -> float:
    """Return a process's memory under Linux's name for it, 0 if the process has ended."""
    return (linux_bytes(f"/proc/{process}/status", key) or 0) / 2**30


def watched(command: list[str], stdout: IO[str] | None = None) -> tuple[dict[str, float], float]:
    """Run a command, which prints to ``stdout``. Returns peak memory in GiB and the seconds that it took.

    RssAnon includes child processes, and counts shared memory once per process. VmHWM is of the command's own process
    only. Raises ClickException if the command fails.
    """
    peaks = {"RssAnon": 0.0, "VmHWM": 0.0}
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=stdout)
    over = threading.Event()

    def sample() -> None:
        while not over.wait(SAMPLE_SECONDS):
            together = sum(held_gib(each, "RssAnon") for each in (process.pid, *children(process.pid)))
            peaks["RssAnon"] = max(peaks["RssAnon"], together)
            peaks["VmHWM"] = max(peaks["VmHWM"], held_gib(process.pid, "VmHWM"))

    watcher = threading.Thread(target=sample)
    watcher.start()
    code = process.wait()
    over.set()
    watcher.join()
    if code:
        raise click.ClickException(f"{' '.join(command)} failed with exit code {code}")
    return peaks, time.monotonic() - start


@click.command(epilog="\n\n".join(f"\b\n{part}" for part in __doc__.split("\n\n")[1:]))
@click.option("--backend", type=click.Choice(["cuda", *RECIPES]), default="cuda", show_default=True)
@click.option("--target", type=click.Choice(list(CPU_MODELS)), default="qwen3-4B", help="For xnnpack and mlx.")
@click.option("--layers", help="Numbers of layers, each a separate export. Default: 6,12; without cuda all layers.")
@click.option("--cuda-arch", help="The architecture, as for eagle3-export.")
@click.option("--draft", type=click.Choice(list(HEADS)), default=EAGLE3, help="Kind of head, for cuda.")
@click.option("--int4-layout", "layouts", type=click.Choice(INT4_LAYOUTS), multiple=True, help="For cuda; repeatable.")
@click.option("--qlinear", help="Recipe for target and draft. Default: 8da4w for xnnpack, 4w for mlx.")
@click.option("--max-seq-len", default=1024, show_default=True, help="Slots of the KV caches, for xnnpack and mlx.")
@click.option("--folder", type=click.Path(path_type=Path), help="Keep checkpoints and artifacts here.")
@click.option("--pack", is_flag=True, help="Pack each artifact in --folder (gpu_carry.py) and delete it, for cuda.")
@click.argument("flags", nargs=-1)
def main(
    backend: str,
    target: str,
    layers: str | None,
    cuda_arch: str | None,
    draft: str,
    layouts: tuple[str, ...],
    qlinear: str | None,
    max_seq_len: int,
    folder: Path | None,
    pack: bool,
    flags: tuple[str, ...],
) -> None:
    """Export synthetic checkpoints of a few full-width layers and report time and memory: Gemma 4 31B for a GPU,
    smaller models for a CPU or Apple silicon. FLAGS, after --, are further ones of eagle3-export."""
    is_small = backend in RECIPES
    if is_small and any((cuda_arch, draft != EAGLE3, layouts, pack)):
        raise click.UsageError("--cuda-arch, --draft, --int4-layout and --pack are for cuda: leave them out")
    if pack and folder is None:
        raise click.UsageError("--pack writes into --folder: name one")
    counts = [int(count) for count in layers.split(",")] if layers else [None] if is_small else [6, 12]
    with tempfile.TemporaryDirectory(dir=folder.parent if folder else None) as temporary:
        place = folder or Path(temporary)
        for count in counts:
            if is_small:
                own = place / f"{target}-{count or 'all'}"
                config = CPU_MODELS[target](*([count] if count else []))
                save_pair(own, target, config, EAGLE3)
                recipe, layer_count = qlinear or RECIPES[backend], config.num_hidden_layers
                show(exported_small(own, target, layer_count, backend, recipe, max_seq_len, *flags))
                if backend == "xnnpack":
                    show_run(run_on_cpu(own / ARTIFACT))
                continue
            own = place / str(count)
            save_pair(own, GEMMA4, gemma4_config(count), draft, unquantized=False)
            for layout in layouts or (None,):
                name = layout if layout and len(layouts) > 1 else ARTIFACT
                given = {"--cuda-arch": cuda_arch, "--int4-layout": layout}
                more = [part for flag, value in given.items() if value for part in (flag, value)]
                show(exported(own, count, GEMMA4, [*more, *flags], draft, name))
                if pack:
                    pack_and_delete(own / name)


def pack_and_delete(artifact: Path) -> None:
    """Pack an artifact into ``NAME.tar.xz`` beside it and delete its folder."""
    packed = artifact.with_name(f"{artifact.name}.tar.xz")
    done = subprocess.run([sys.executable, str(CARRY), "pack", str(artifact), str(packed)], stdout=sys.stderr)
    if done.returncode:
        raise click.ClickException(f"{artifact} was not packed: see above")
    shutil.rmtree(artifact)


def exported_small(
    place: Path, target: str, layers: int, backend: str, qlinear: str, max_seq_len: int, *more: str
) -> dict:
    flags = ["--backend", backend, "--qlinear", qlinear, "--draft-qlinear", qlinear, "--no-check"]
    flags += ["--with-decode"] if backend == "xnnpack" else []
    return exported(place, layers, target, [*flags, "--max-seq-len", str(max_seq_len), "--max-prefill", "128", *more])


def run_on_cpu(artifact: Path, *flags: str) -> dict[str, float]:
    """Return the result of ``bench_steps.measure``, run in a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("bench_steps.py")), str(artifact), *flags]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def exported(
    place: Path, layers: int, target: str, flags: list[str], draft: str = EAGLE3, name: str = ARTIFACT
) -> dict:
    """Export the target and the head in ``place`` into its folder ``name``. Return sizes, seconds and peak memory."""
    output = place / name
    command = [sys.executable, "-m", "eagle3.export.cli", "--target-model", target, "--overwrite"]
    command += ["--checkpoint", str(place / TARGET), "--draft", str(place / draft), "--output-dir", str(output)]
    peaks, seconds = watched([*command, *flags])
    record = json.loads((output / "export.json").read_text())
    weights = [sum(file.stat().st_size for file in (place / part).glob("*.safetensors")) for part in (TARGET, draft)]
    return {
        "layers": layers,
        "artifact": name,
        "weights_gib": [size / 2**30 for size in weights],
        "artifact_gib": sum(entry["bytes"] for entry in record["files"].values()) / 2**30,
        "seconds": seconds,
        "peaks": peaks,
        "stages": record["stages"],
    }


def show(result: dict) -> None:
    target, draft = result["weights_gib"]
    anonymous, resident = (result["peaks"][key] for key in ("RssAnon", "VmHWM"))
    click.echo(
        f"{result['artifact']}, {result['layers']} layers, weights {target:.2f} + {draft:.2f} GiB, artifact "
        f"{result['artifact_gib']:.2f} GiB: {result['seconds']:.0f} s, peak anonymous {anonymous:.2f} GiB, resident "
        f"{resident:.2f} GiB"
    )
    for stage in result["stages"]:
        click.echo(f"  {stage['stage']:<24} {stage['seconds']:>8.1f} s")


def show_run(run: dict[str, float]) -> None:
    click.echo(
        f"  loads in {run['load_seconds']:.1f} s, {run['private_mib']:,.0f} MiB private, {run['mapped_mib']:,.0f} MiB "
        f"mapped\n  decode {run['decode_ms']:.1f} ms, a verify {run['verify_ms']:.1f} ms "
        f"({run['verify_decodes']:.2f} decodes), a draft row {run['draft_row_ms']:.1f} ms, a round "
        f"{run['round_ms']:.1f} ms: {run['speedup']:.2f} times as fast as decoding"
    )


if __name__ == "__main__":
    main()
