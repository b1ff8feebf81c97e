"""Measures an export of Gemma 4 31B, or of a model for the CPU, with any number of full-width layers: seconds per stage
and peak memory.

    python scripts/bench/bench_export.py --layers 12 --cuda-arch sm_90

The command writes a synthetic checkpoint (random INT4 linears and INT8 embedding in the format of ExecuTorch's
quantize_and_save, a random bfloat16 draft head of the published head's shape) into a temporary folder, exports it in a
process of its own and samples that process's memory. RssAnon is the memory that the process and its children hold,
without files mapped into them. Weights are random, so only the artifact's size and speed are meaningful. Multiples of
six layers have the same share of full-attention layers as the whole model. ``scripts/gpu/gpu_cost.py`` computes bounds
for a round of a CUDA artifact, which --folder keeps.

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
from cpu_models import CPU_MODELS, held_by, run_text, save_cpu_target
from published_heads import HEADS
from published_widths import gemma4_config, random_weight, save_target
from transformers import Gemma4TextConfig, PreTrainedConfig

from eagle3.export.configuration.config import INT4_LAYOUTS

SAMPLE_SECONDS = 0.1
TARGET, EAGLE3 = "target", "eagle3"
"""Names of the folders of checkpoints; a head's folder is named after its kind."""
ARTIFACT = "artifact"
"""The name of an artifact's folder, if no layout names it."""
CARRY = Path(__file__).parents[1] / "gpu" / "gpu_carry.py"


def children(process: int) -> list[int]:
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return []


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
            own = held_by(process.pid, *peaks)
            with_others = sum(held_by(child, "RssAnon")["RssAnon"] for child in children(process.pid)) + own["RssAnon"]
            peaks["RssAnon"] = max(peaks["RssAnon"], with_others)
            peaks["VmHWM"] = max(peaks["VmHWM"], own["VmHWM"])

    watcher = threading.Thread(target=sample)
    watcher.start()
    code = process.wait()
    over.set()
    watcher.join()
    if code:
        raise click.ClickException(f"{' '.join(command)} failed with exit code {code}")
    return peaks, time.monotonic() - start


@click.command()
@click.option("--backend", type=click.Choice(["cuda", "xnnpack"]), default="cuda", show_default=True)
@click.option(
    "--target",
    type=click.Choice(list(CPU_MODELS)),
    default="qwen3-4B",
    show_default=True,
    help="The target, for xnnpack.",
)
@click.option("--layers", help="Numbers of layers, each a separate export. Default: 6,12; for xnnpack all layers.")
@click.option("--cuda-arch", help="The architecture, as for eagle3-export.")
@click.option(
    "--draft", type=click.Choice(list(HEADS)), default=EAGLE3, help="Kind of head, for cuda.", show_default=True
)
@click.option("--chain-len", type=int, help="The chain length, as for eagle3-export; only for cuda.")
@click.option("--verify-rows", type=int, help="The most rows of a verify window; only for cuda.")
@click.option(
    "--int4-layout",
    "int4_layouts",
    type=click.Choice(INT4_LAYOUTS),
    multiple=True,
    help="The layout of INT4 weights; only for cuda. May be repeated.",
)
@click.option("--qlinear", default="8da4w", show_default=True, help="Recipe for target and draft, for xnnpack.")
@click.option("--max-seq-len", default=1024, show_default=True, help="Slots of the KV caches, for xnnpack.")
@click.option("--acceptance", default=3.0, show_default=True, help="Assumed acceptance length, for xnnpack.")
@click.option("--unquantized", is_flag=True, help="Write a bfloat16 checkpoint, which the export quantizes, for cuda.")
@click.option("--folder", type=click.Path(path_type=Path), help="Keep checkpoints and artifacts here.")
@click.option("--pack", is_flag=True, help="Pack each artifact in --folder (gpu_carry.py) and delete it, for cuda.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    backend: str,
    target: str,
    layers: str | None,
    cuda_arch: str | None,
    draft: str,
    chain_len: int | None,
    verify_rows: int | None,
    int4_layouts: tuple[str, ...],
    qlinear: str,
    max_seq_len: int,
    acceptance: float,
    unquantized: bool,
    folder: Path | None,
    pack: bool,
    as_json: bool,
) -> None:
    """Export synthetic checkpoints of a few full-width layers and report time and memory: Gemma 4 31B for a GPU,
    smaller models for a CPU. The CPU artifacts are also run.

    \b
    Examples:
      python scripts/bench/bench_export.py --layers 6,12 --cuda-arch sm_90
      python scripts/bench/bench_export.py --layers 6 --cuda-arch sm_90 --draft dflash
      python scripts/bench/bench_export.py --layers 6 --cuda-arch sm_90 --int4-layout records
      python scripts/bench/bench_export.py --backend xnnpack --target qwen3-4B --qlinear 8da4w
    """
    for_cuda = cuda_arch, draft != EAGLE3, chain_len, verify_rows, int4_layouts, unquantized, pack
    if backend == "xnnpack" and any(for_cuda):
        raise click.UsageError(
            "--cuda-arch, --draft, --chain-len, --verify-rows, --int4-layout, --unquantized and --pack are for cuda: "
            "leave them out"
        )
    if pack and folder is None:
        raise click.UsageError("--pack writes into --folder: name one")
    results: list[dict] = []
    counts = [int(count) for count in layers.split(",")] if layers else [None] if backend == "xnnpack" else [6, 12]
    given = {"--cuda-arch": cuda_arch, "--chain-len": chain_len, "--verify-rows": verify_rows}
    flags = [part for flag, value in given.items() if value for part in (flag, str(value))]

    def add(result: dict) -> None:
        results.append(result)
        if not as_json:
            show(result)

    with tempfile.TemporaryDirectory(dir=folder.parent if folder else None) as temporary:
        place = folder or Path(temporary)
        for count in counts:
            if backend == "xnnpack":
                own = place / f"{target}-{count or 'all'}"
                add(measure_on_cpu(target, count, qlinear, max_seq_len, acceptance, own))
                continue
            for layout in int4_layouts or (None,):
                name = layout if layout and len(int4_layouts) > 1 else ARTIFACT
                more = ("--int4-layout", layout) if layout else ()
                add(measure(count, [*flags, *more], place / str(count), unquantized, draft, name))
                if pack:
                    pack_and_delete(place / str(count) / name)
    if as_json:
        click.echo(json.dumps(results))


def pack_and_delete(artifact: Path) -> None:
    """Pack an artifact into ``NAME.tar.xz`` beside it and delete its folder."""
    packed = artifact.with_name(f"{artifact.name}.tar.xz")
    done = subprocess.run([sys.executable, str(CARRY), "pack", str(artifact), str(packed)], stdout=sys.stderr)
    if done.returncode:
        raise click.ClickException(f"{artifact} was not packed: see above")
    shutil.rmtree(artifact)


def measure(layers: int, flags: list[str], place: Path, unquantized: bool, draft: str, name: str) -> dict:
    """Export a target of ``layers`` layers with a head of the kind ``draft`` for a GPU, into the folder ``name``."""
    save_for_gpu(place, gemma4_config(layers), draft, unquantized)
    return exported(place, layers, "gemma4-31B", flags, draft, name)


def save_for_gpu(place: Path, config: Gemma4TextConfig, draft: str, unquantized: bool) -> None:
    """Write target and draft into ``place`` unless they are already there."""
    if not (place / TARGET / "config.json").is_file():
        (place / TARGET).mkdir(parents=True, exist_ok=True)
        save_target(place / TARGET, config, unquantized)
    save_head(place, draft, config)


def save_head(place: Path, kind: str, config: PreTrainedConfig) -> None:
    """Write a head of the kind into a folder of its name in ``place``, unless it is already there."""
    if not (place / kind / "config.json").is_file():
        HEADS[kind](config).save(place / kind)


def measure_on_cpu(
    target: str, layers: int | None, qlinear: str, max_seq_len: int, acceptance: float, place: Path
) -> dict:
    """Export a model for the CPU, then measure a run of it in a process of its own."""
    config = CPU_MODELS[target](*([layers] if layers else []))
    save_for_cpu(place, target, config)
    result = exported_for_cpu(place, target, config.num_hidden_layers, qlinear, max_seq_len)
    return result | {"run": run_on_cpu(place / ARTIFACT, "--acceptance", str(acceptance))}


def save_for_cpu(place: Path, target: str, config: PreTrainedConfig, draft: str = EAGLE3) -> None:
    """Write target and draft into ``place`` unless they are already there."""
    if not (place / TARGET / "config.json").is_file():
        (place / TARGET).mkdir(parents=True, exist_ok=True)
        save_cpu_target(place / TARGET, target, config, random_weight)
    save_head(place, draft, config)


def exported_for_cpu(place: Path, target: str, layers: int, qlinear: str, max_seq_len: int, *more: str) -> dict:
    flags = ["--backend", "xnnpack", "--qlinear", qlinear, "--draft-qlinear", qlinear, "--with-decode", "--no-check"]
    return exported(place, layers, target, [*flags, "--max-seq-len", str(max_seq_len), "--max-prefill", "128", *more])


def run_on_cpu(artifact: Path, *flags: str) -> dict[str, float]:
    """Return the result of ``cpu_models.measure``, run in a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("cpu_models.py")), str(artifact), *flags]
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
        "target_gib": round(weights[0] / 2**30, 2),
        "draft_gib": round(weights[1] / 2**30, 2),
        "seconds": round(seconds),
        "peak_anonymous_gib": round(peaks["RssAnon"], 2),
        "peak_resident_gib": round(peaks["VmHWM"], 2),
        "artifact_gib": round(sum(entry["bytes"] for entry in record["files"].values()) / 2**30, 2),
        "stages": {stage["stage"]: stage["seconds"] for stage in record["stages"]},
        "packages": record["manifest"]["packages"],
    }


def show(result: dict) -> None:
    click.echo(
        f"{result['artifact']}, {result['layers']} layers, weights {result['target_gib']} + {result['draft_gib']} GiB: "
        f"{result['seconds']} s,"
        f" peak anonymous {result['peak_anonymous_gib']} GiB, resident {result['peak_resident_gib']} GiB"
    )
    for stage, seconds in result["stages"].items():
        click.echo(f"  {stage:<24} {seconds:>8.1f} s")
    if "run" in result:
        click.echo(run_text(result["run"]))


if __name__ == "__main__":
    main()
