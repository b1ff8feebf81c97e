"""An artifact of gemma4-tiny against llama.cpp's own EAGLE-3 decoding: the same checkpoints, prompts and threads.

llama.cpp comes with the sources of llama-cpp-python; those of 0.3.36 have EAGLE-3. With a C++ compiler and CMake (pip
install cmake), in any folder:

    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36
    tar xzf llama_cpp_python-0.3.36.tar.gz
    cmake -S llama_cpp_python-0.3.36/vendor/llama.cpp -B llama.cpp -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \\
        -DLLAMA_CURL=OFF -DLLAMA_USE_PREBUILT_UI=OFF
    cmake --build llama.cpp --parallel --target llama-server llama-quantize

Then:

    eagle3-export --target-model gemma4-tiny --backend xnnpack --with-decode --speculate --no-logits --output-dir out
    python scripts/bench_llama_cpp.py out llama.cpp --threads 2
"""

import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import click
from llama_server import CACHE_TYPES, WEIGHT_TYPES, Build, LlamaWay, Server, convert, epilog

from eagle3.runner import load
from eagle3.runner.batch import progress
from eagle3.runner.bench.figures import divergence, speeds, spread
from eagle3.runner.bench.machine import cores, machine, versions
from eagle3.runner.bench.measure import Outcome, measure, total
from eagle3.runner.bench.report import identity_text, rate_text, rendered, spread_text
from eagle3.runner.bench.ways import check_ways, make_workload, ways_of
from eagle3.runner.console.command import OneLineFailures, calm_stderr
from eagle3.runner.hosts.executorch_host import load_runtime
from eagle3.runner.options import Options

PROMPTS = Path(__file__).parent / "prompts.jsonl"
TARGET = "gemma4-tiny"


def use_threads(count: int) -> None:
    """For XNNPACK and ExecuTorch's attention."""
    load_runtime()
    with calm_stderr():
        from executorch.extension.pybindings.portable_lib import _unsafe_reset_threadpool

        _unsafe_reset_threadpool(count)


def decode_rates(outcome: Outcome) -> list[float]:
    """A pass each."""
    return [stats.decode_tokens_per_second for stats in outcome.stats()]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    return spread(one / other for one, other in zip(ours, theirs, strict=True))


def make_report(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """``outcomes``: ours and theirs without speculation, ours and theirs with it."""
    ours, theirs, ours_drafting, theirs_drafting = map(decode_rates, outcomes)
    best = max(theirs, theirs_drafting, key=median)
    first = [answer.result.token_ids for answer in outcomes[0].answers]
    ways = []
    for outcome, alone in zip(outcomes, (ours, theirs) * 2, strict=True):
        way = {"way": outcome.way.artifact, "chain_len": outcome.way.chain_len, **speeds(outcome.stats())}
        if outcome.way.chain_len:
            way["ratio_to_no_speculation"] = ratio(decode_rates(outcome), alone)
            rates = drafted_rates(outcome)
            way |= {"acceptance_rate_per_position": rates, "mean_acceptance_length": round(1 + sum(rates), 4)}
        ways.append(way | {"divergence": divergence(outcome.answers, first)})
    return {
        "ways": ways,
        "ours_to_llama_cpp": {
            "without_speculation": ratio(ours, theirs),
            "with_speculation": ratio(ours_drafting, theirs_drafting),
            "with_speculation_to_its_best": ratio(ours_drafting, best),
        },
    }


def drafted_rates(outcome: Outcome) -> list[float]:
    if isinstance(outcome.way, LlamaWay):
        return outcome.way.acceptance
    return [round(rate, 4) for rate in total(outcome.stats()).acceptance_rate_per_position]


def as_text(report: dict[str, Any]) -> str:
    rows = []
    for way in report["ways"]:
        rates, to_plain = way.get("acceptance_rate_per_position"), way.get("ratio_to_no_speculation")
        row = {"": way["way"], "chain length": str(way["chain_len"])}
        row["decode, tokens/s"] = rate_text(way["decode_tokens_per_second"])
        row["to its own plain"] = spread_text(to_plain, 2) if to_plain else "1"
        row["prompts too, tokens/s"] = rate_text(way["tokens_per_second"])
        row["acceptance by position"] = " ".join(f"{rate:.3f}" for rate in rates) if rates else "-"
        rows.append(row)
    lines = [
        f"ours to llama.cpp's, {name.replace('_', ' ')}: {spread_text(found, 2)}"
        for name, found in report["ours_to_llama_cpp"].items()
    ]
    first, *others = report["ways"]
    for way in others:
        other = f"{first['way']}, chain length {first['chain_len']}"
        lines.append(f"{way['way']}, chain length {way['chain_len']}: {identity_text(way['divergence'], other)}")
    asked = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in report["asked"].items())
    return "\n\n".join([f"{asked}; {report['machine']}", rendered(rows), "\n".join(lines)])


def measured(artifact: Path, server: Server, repeats: int, folder: Path | None) -> dict[str, Any]:
    """``folder`` has the GGUF files or takes them; None: they are made anew."""
    workload = make_workload(PROMPTS, {}, chat=False)
    use_threads(server.threads)
    with ExitStack() as stack:
        model = stack.enter_context(load(artifact, defer=True))
        if model.metadata.manifest.get("target") != TARGET:
            raise ValueError(f"{artifact} is of {model.metadata.manifest.get('target')}: export {TARGET} to compare")
        ways = ways_of(str(artifact), model, None)
        check_ways(ways, workload)
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        target, draft = convert(server.build, TARGET, folder or temporary, server.weights)
        turns = []
        for way, file in zip(ways, (None, draft), strict=True):
            turns += [way, stack.enter_context(server.started(model, way.chain_len, target, file, temporary))]
        with progress() as bar:
            task = bar.add_task("measuring", total=repeats * len(workload.prompts) * len(turns))
            outcomes, step_ms = measure(turns, workload, repeats, lambda: bar.advance(task))
        report = make_report(outcomes)
    asked = {"threads": server.threads, "type": server.weights, "cache_type": server.cache}
    asked |= {"prompts": len(workload.prompts), "new_tokens": Options.max_new_tokens, "passes": repeats}
    steps = {name: spread(ms[name] for ms in step_ms) for name in step_ms[0]}
    return {"asked": asked} | report | {"step_ms": steps, "machine": machine(None), "versions": versions()}


@click.command(cls=OneLineFailures, epilog=epilog(__doc__))
@click.argument("artifact", type=click.Path(path_type=Path))
@click.argument("llama_cpp", type=click.Path(path_type=Path))
@click.option("--threads", type=click.IntRange(1, cores()), default=cores(), show_default=True, help="Of either side.")
@click.option(
    "--type", "weights", type=click.Choice(WEIGHT_TYPES), default="f32", show_default=True, help="llama.cpp's weights."
)
@click.option(
    "--cache-type", type=click.Choice(CACHE_TYPES), default="f32", show_default=True, help="llama.cpp's KV caches."
)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Passes over all prompts.")
@click.option("--folder", type=click.Path(path_type=Path), help="Keep the GGUF files here.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    artifact: Path,
    llama_cpp: Path,
    threads: int,
    weights: str,
    cache_type: str,
    repeats: int,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Measure an ARTIFACT of gemma4-tiny and LLAMA_CPP, a folder with a build of it, in turn.

    Each prompt of scripts/prompts.jsonl is answered four ways in turn, greedily and up to 128 tokens: by the artifact
    and by llama-server, without speculation and with it. Nothing is kept from one prompt to the next. Decoding is timed
    from the first token to the last by either side's own clock, so no figure has HTTP in it; "prompts too" adds the
    time to the first token. A ratio is formed within a pass; medians over the passes, the least and the most. --type
    and --cache-type are llama.cpp's alone: the artifact's weights and caches are what it was exported with.
    """
    server = Server(Build.found(llama_cpp), threads, weights, cache_type)
    report = measured(artifact, server, repeats, folder)
    click.echo(json.dumps(report) if as_json else as_text(report))


if __name__ == "__main__":
    main()
