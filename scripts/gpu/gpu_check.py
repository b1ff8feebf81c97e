"""Makes the checks and measurements that need an NVIDIA GPU, in stages of at most 8 minutes.

    python scripts/gpu/gpu_check.py                                # all stages
    python scripts/gpu/gpu_check.py --only wide --only round       # wide makes the artifact for round and prefill
    python scripts/gpu/gpu_check.py --only tiny --elsewhere out    # with gemma4-tiny's artifact made on another machine
    python scripts/gpu/gpu_check.py --only round --wide out        # with Gemma 4 31B's (bench_export.py, gpu_carry.py)
    python scripts/gpu/gpu_check.py --only round --wide out-tiles --wide out-records    # compares two artifacts of it

tiny      compares gemma4-tiny with eager greedy decoding by the same weights, token for token, and reports the first
          divergence and the margin of the two best logits there. The artifact is made elsewhere (or here without using
          the GPU) and with the GPU; each runs with CUDA graphs and without
wide      exports a few full-width layers of Gemma 4 31B with synthetic INT4 weights, using this GPU, and runs them;
          with --wide runs those
kernels   checks the small-M kernels, and compares them with copy bandwidth at 1 to 16 rows, on every linear of that
          model
round     times a round of the full-width layers, with CUDA graphs and without, and each of its kernels
prefill   times chunks of several lengths through those layers
soak      generates with the artifacts of --elsewhere for 10,000 rounds, and compares memory at both ends

Steps end as ok, failed, or not run with the reason: no GPU, no time left, or a feature that this PyTorch or this
machine lacks. The JSON is written after each step, so an interrupted run loses nothing; the log of every export is
beside it. The exit code is 1 if a step failed.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import torch
from gpu_artifacts import GRAPHS, Check, export, labelled, made, opened
from gpu_rounds import GIB, measure_rounds, prefill
from gpu_soak import soak
from gpu_steps import Facts, NotRun, Report, met

PROMPTS = Path(__file__).parents[1] / "prompts.jsonl"

# --- tiny


def tiny(check: Check) -> None:
    native, named = check.work / "tiny-native", check.work / "tiny-named"
    if not check.elsewhere:
        check.report.step("export without the GPU", lambda _facts: export_named(check, named))
    for label, folder in labelled(check.elsewhere or (named,)).items():
        _run_tiny(check, f"{label}made without the GPU", folder)
    check.report.step("export with the GPU", lambda facts: facts.update(export(check, native, *TINY)))
    _run_tiny(check, "made with the GPU", native)


TINY = ("--target-model", "gemma4-tiny")


def export_named(check: Check, output: Path) -> None:
    from eagle3.export.lowering.cuda.backend import local_arch
    from eagle3.export.lowering.cuda.named_gpu import check_named_versions

    try:
        check_named_versions()
    except ValueError as error:
        raise NotRun(error) from error
    export(check, output, *TINY, "--cuda-arch", local_arch(), hidden=True)


def _run_tiny(check: Check, made: str, folder: Path) -> None:
    for graphs, how in GRAPHS.items():
        check.report.step(f"{made}, {how}", lambda facts, graphs=graphs: run_tiny(facts, folder, graphs))


def run_tiny(facts: Facts, folder: Path, graphs: str) -> None:
    with opened(folder, graphs, facts) as session:
        from gpu_greedy import EagerGreedy, compare

        from eagle3.runner.text.text import Text

        text = Text(folder)
        prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()[:8]]
        facts |= compare(session, EagerGreedy(), [text.encode(prompt) for prompt in prompts])


# --- wide


def wide(check: Check) -> None:
    if not check.given:
        check.report.step(f"checkpoint of {check.layers} full-width layers", lambda _facts: write_layers(check))
        check.report.step("export with the GPU", lambda facts: facts.update(export_layers(check)))
    for label, artifact in check.artifacts.items():
        check.report.step(f"{label}runs", lambda facts, artifact=artifact: run_layers(facts, artifact))


def write_layers(check: Check) -> None:
    import published

    target, draft = (check.wide / name for name in ("target", "draft"))
    if (draft / "config.json").is_file():
        raise NotRun(f"it is there, in {check.wide}")
    target.mkdir(parents=True, exist_ok=True)
    config = published.gemma4_config(check.layers)
    published.save_target(target, config)
    published.eagle3(config).save(draft)


def export_layers(check: Check) -> Facts:
    target, draft = (str(check.wide / name) for name in ("target", "draft"))
    flags = ("--target-model", "gemma4-31B", "--checkpoint", target, "--draft", draft)
    return export(check, check.made_here, *flags)


def run_layers(facts: Facts, artifact: Path) -> None:
    from eagle3.runner.commands.program import inspect_program
    from eagle3.runner.loop.generation import complete

    with opened(artifact, "auto", facts) as session:
        torch.cuda.reset_peak_memory_stats()
        prompt = torch.randint(3, session.metadata.vocab_size, (256,)).tolist()
        complete(session, prompt, max_new_tokens=16)  # loads kernels and captures graphs
        start = time.perf_counter()
        result = complete(session, prompt, max_new_tokens=128)
        facts["tokens/s"] = round(len(result.token_ids) / (time.perf_counter() - start), 1)
        facts["GPU memory GiB"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
        found = inspect_program(made(artifact) / "model.pte", session.metadata)["gpu_memory"]
        facts["counted GiB"] = round((found["total"] - found["context"]) / GIB, 2)


# --- kernels


def kernels(check: Check) -> None:
    import bench_small_m

    names = dict.fromkeys((bench_small_m.GOAL_LINEAR, *bench_small_m.LINEARS))
    for name in names:
        check.report.step(name, lambda facts, name=name: facts.update(time_kernel(name, check.copied)))


def time_kernel(name: str, copied: float) -> Facts:
    import bench_small_m as bench

    timing = bench.time_linear(name, copied, dequantizing=False)
    torch.cuda.empty_cache()
    share, growth = timing.copy_share[8], timing.growth
    goals = (
        (f"{bench.GOAL_SHARE:.0%} of copy bandwidth", share >= bench.GOAL_SHARE),
        (f"8 rows in {bench.GOAL_GROWTH} x the time of 1", growth <= bench.GOAL_GROWTH),
    )
    return {
        "copy, TB/s": round(copied / 1e12, 3),
        "us at 1 to 16 rows": [round(timing.us[rows], 1) for rows in sorted(timing.us)],
        "of copy bandwidth at 8": round(share, 3),
        "8 rows / 1 row": round(growth, 3),
        "goals": met(goals),
    }


STAGES: dict[str, Callable[[Check], None]] = {
    "tiny": tiny,
    "wide": wide,
    "kernels": kernels,
    "round": measure_rounds,
    "prefill": prefill,
    "soak": lambda check: soak(check, PROMPTS),
}


@click.command(epilog="Example: python scripts/gpu/gpu_check.py --only wide --only round --layers 6")
@click.option("--only", type=click.Choice(list(STAGES)), multiple=True, help="Run this stage; may be repeated. [all]")
@click.option("--layers", default=4, show_default=True, help="Full-width layers of Gemma 4 31B.")
@click.option(
    "--elsewhere", type=click.Path(path_type=Path, exists=True), multiple=True,
    help="gemma4-tiny exported without a GPU; may be repeated.",
)  # fmt: skip
@click.option(
    "--wide",
    "given",
    type=click.Path(path_type=Path, exists=True),
    multiple=True,
    help="Gemma 4 31B, or some layers, exported before; may be repeated, to compare artifacts.",
)
@click.option(
    "--output-dir", type=click.Path(path_type=Path, file_okay=False), default="gpu_check", show_default=True,
    help="For gpu_check.json and the exports' logs.",
)  # fmt: skip
@click.option("--work", type=click.Path(path_type=Path, file_okay=False), help="Keep checkpoints and artifacts here.")
def main(
    only: tuple[str, ...],
    layers: int,
    elsewhere: Path | None,
    given: Path | None,
    output_dir: Path,
    work: Path | None,
) -> None:
    """Make the checks and measurements that need a GPU on this machine."""
    here, unable = torch.cuda.is_available(), None
    if not here:
        unable = "this needs an NVIDIA GPU and PyTorch's CUDA build, and found none"
        click.echo(unable)
    machine = this_machine(here)
    click.echo("  ".join(f"{key} {value}" for key, value in machine.items()))
    work = work or Path(tempfile.gettempdir()) / "eagle3-gpu-check"
    work.mkdir(parents=True, exist_ok=True)
    report = Report(output_dir, machine, unable)
    check = Check(report, work.resolve(), elsewhere, layers, given)
    for name, run in STAGES.items():
        if not only or name in only:
            report.stage(name, lambda run=run: run(check))
    sys.exit(1 if report.failed else 0)


def this_machine(with_gpu: bool) -> Facts:
    machine = {"gpu": torch.cuda.get_device_name()} if with_gpu else {"gpu": None}
    machine |= {"torch": str(torch.__version__), "cuda": torch.version.cuda}
    try:
        import triton

        machine["triton"] = triton.__version__
    except ImportError:
        machine["triton"] = None
    return machine


if __name__ == "__main__":
    main()
