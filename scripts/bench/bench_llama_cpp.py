"""Compares an artifact of gemma4-tiny with the fastest setting of llama.cpp's own EAGLE-3: same checkpoints, prompts,
threads.

llama.cpp comes with the sources of llama-cpp-python; those of 0.3.36 have EAGLE-3. With a C++ compiler and CMake (pip
install cmake), in any folder:

    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36
    tar xzf llama_cpp_python-0.3.36.tar.gz
    cmake -S llama_cpp_python-0.3.36/vendor/llama.cpp -B llama.cpp -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \\
        -DLLAMA_CURL=OFF -DLLAMA_USE_PREBUILT_UI=OFF
    cmake --build llama.cpp --parallel --target llama-server llama-quantize

Then:

    eagle3-export --target-model gemma4-tiny --backend xnnpack --with-decode --speculate --no-logits --output-dir out
    python scripts/bench/bench_llama_cpp.py out llama.cpp --threads 2
"""

import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import click
from llama_build import WEIGHT_TYPES, Build, convert, epilog
from llama_search import PEERS, SEARCH_TOKENS, TURNS, grid, measure_beside, search
from llama_server import CACHE_TYPES, LlamaCppConfiguration, Server, Setting

from eagle3.runner import load
from eagle3.runner.batch.batch import progress
from eagle3.runner.bench.figures import divergence, speeds, spread
from eagle3.runner.bench.machine import cores, machine, versions
from eagle3.runner.bench.measure import Outcome, check_configurations, configurations_of, make_workload, total
from eagle3.runner.bench.report import identity_text, rate_text, rendered, spread_text
from eagle3.runner.console.command import OneLineFailures, calm_stderr
from eagle3.runner.hosts.executorch_host import load_runtime
from eagle3.runner.model import Model
from eagle3.runner.options import Options

PROMPTS = Path(__file__).parents[1] / "prompts.jsonl"
TARGET = "gemma4-tiny"


def use_threads(count: int) -> None:
    """Set the threads of XNNPACK and of ExecuTorch's attention."""
    load_runtime()
    with calm_stderr():
        from executorch.extension.pybindings.portable_lib import _unsafe_reset_threadpool

        _unsafe_reset_threadpool(count)


def decode_rates(outcome: Outcome) -> list[float]:
    """Return the tokens per second of each pass, without the time of the prompts."""
    return [stats.decode_tokens_per_second for stats in outcome.stats()]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    return spread(one / other for one, other in zip(ours, theirs, strict=True))


def make_report(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the report. ``outcomes``: ours without speculation and with it, then llama.cpp's; for each type of weight,
    the outcome without speculation is first."""
    ours, ours_drafting, *theirs = outcomes
    configurations, first = [], [completion.result.token_ids for completion in ours.completions]
    for outcome in outcomes:
        if not outcome.configuration.chain_len:
            alone = outcome
        figures = {
            "way": outcome.configuration.artifact,
            "chain_len": outcome.configuration.chain_len,
            **speeds(outcome.stats()),
        }
        if outcome.configuration.chain_len:
            figures["ratio_to_no_speculation"] = ratio(decode_rates(outcome), decode_rates(alone))
            rates = drafted_rates(outcome)
            figures |= {"acceptance_rate_per_position": rates, "mean_acceptance_length": round(1 + sum(rates), 4)}
        configurations.append(figures | {"divergence": divergence(outcome.completions, first)})
    found = {}
    for weights in dict.fromkeys(outcome.configuration.setting.weights for outcome in theirs):
        plain, *drafting = (outcome for outcome in theirs if outcome.configuration.setting.weights == weights)
        fastest, best = fastest_of(drafting), fastest_of([*drafting, plain])
        found[weights] = {
            "best_setting": asdict(best.configuration.setting),
            "without_speculation": ratio(decode_rates(ours), decode_rates(plain)),
            "with_speculation": ratio(decode_rates(ours_drafting), decode_rates(fastest)),
            "with_speculation_to_its_best": ratio(decode_rates(ours_drafting), decode_rates(best)),
        }
    return {"ways": configurations, "ours_to_llama_cpp": found}


def fastest_of(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome with the fastest median of its passes, the first of several equal ones."""
    return max(outcomes, key=lambda outcome: median(decode_rates(outcome)))


def drafted_rates(outcome: Outcome) -> list[float]:
    if isinstance(outcome.configuration, LlamaCppConfiguration):
        return outcome.configuration.acceptance
    return [round(rate, 4) for rate in total(outcome.stats()).acceptance_rate_per_position]


def as_text(report: dict[str, Any]) -> str:
    rows = []
    for figures in report["ways"]:
        rates, to_plain = figures.get("acceptance_rate_per_position"), figures.get("ratio_to_no_speculation")
        row = {"": figures["way"], "chain length": str(figures["chain_len"])}
        row["decode, tokens/s"] = rate_text(figures["decode_tokens_per_second"])
        row["to no speculation"] = spread_text(to_plain, 2) if to_plain else "1"
        row["prompts too, tokens/s"] = rate_text(figures["tokens_per_second"])
        row["acceptance by position"] = " ".join(f"{rate:.3f}" for rate in rates) if rates else "-"
        rows.append(row)
    lines = []
    for weights, found in report["ours_to_llama_cpp"].items():
        lines.append(f"llama.cpp at its best: {Setting(**found['best_setting'])}")
        for name in ("without_speculation", "with_speculation", "with_speculation_to_its_best"):
            lines.append(f"ours to llama.cpp {weights}, {name.replace('_', ' ')}: {spread_text(found[name], 2)}")
    first, *others = report["ways"]
    for figures in others:
        other = f"{first['way']}, chain length {first['chain_len']}"
        lines.append(
            f"{figures['way']}, chain length {figures['chain_len']}: {identity_text(figures['divergence'], other)}"
        )
    asked = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in report["asked"].items())
    lines += failure_lines(report["search"])
    tables = rendered(rows), rendered(search_cells(report["search"]))
    return "\n\n".join([f"{asked}; {report['machine']}", *tables, "\n".join(lines)])


def search_cells(tried: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the table of settings with speculation: a column per chain length, a row per combination of the other
    settings."""
    drafting = [(Setting(**each["setting"]), each) for each in tried if each["setting"]["chain_len"]]
    lengths = {str(setting.chain_len): "-" for setting, _ in drafting}
    rows: dict[str, dict[str, str]] = {}
    for setting, each in drafting:
        name = f"{setting.weights}, {setting.drafting}"
        row = rows.setdefault(name, {"tokens/s (the faster of two runs) by chain length": name} | lengths)
        if "failure" not in each:
            row[str(setting.chain_len)] = f"{each['decode_tokens_per_second']:.0f}"
    return list(rows.values())


def failure_lines(tried: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each reason of a failure, with all settings that failed for it."""
    left_out: dict[str, list[str]] = {}
    for each in tried:
        if "failure" in each:
            left_out.setdefault(each["failure"], []).append(str(Setting(**each["setting"])))
    return [f"left out: {'; '.join(settings)}: {reason}" for reason, settings in left_out.items()]


def types_beside(model: Model, asked: Sequence[str]) -> Sequence[str]:
    """Return the types of weight in ``asked``, or else those of the same width as the artifact's recipe."""
    recipe = model.metadata.manifest.get("qlinear")
    if not asked and recipe not in PEERS:
        raise ValueError(f"llama.cpp has no type of weight beside --qlinear {recipe}: give --type")
    return tuple(dict.fromkeys(asked)) or PEERS[recipe]


def measured(
    artifact: Path, build: Build, threads: int, weights: Sequence[str], cache: str, repeats: int, folder: Path | None
) -> dict[str, Any]:
    """Return the measurements. ``folder`` keeps the GGUF files for later runs; None makes them in a temporary
    folder."""
    workload = make_workload(PROMPTS, {}, chat=False)
    briefly = make_workload(PROMPTS, {"max_new_tokens": SEARCH_TOKENS}, chat=False)
    use_threads(threads)
    with ExitStack() as stack:
        model = stack.enter_context(load(artifact, defer=True))
        if model.metadata.manifest.get("target") != TARGET:
            raise ValueError(
                f"{artifact} has the target {model.metadata.manifest.get('target')}: export {TARGET} instead"
            )
        weights = types_beside(model, weights)
        configurations = configurations_of(str(artifact), model, None)
        check_configurations(configurations, workload)
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        files = convert(build, TARGET, folder or temporary, weights)
        server = Server(build, files, threads, cache, model, temporary)
        with progress() as bar:
            settings = sum(map(grid, weights), [])
            trying = bar.add_task("trying settings", total=TURNS * len(settings))
            tried = search(settings, server.started, briefly, lambda: bar.advance(trying))
            measuring = bar.add_task("measuring", total=None)
            outcomes, step_ms, tried = measure_beside(
                configurations, tried, server.started, workload, repeats, lambda: bar.advance(measuring)
            )
        report = make_report(outcomes) | {"search": [each.as_json() for each in tried]}
    asked = {"threads": threads, "types": " ".join(weights), "cache_type": cache}
    asked |= {"prompts": len(workload.prompts), "new_tokens": Options.max_new_tokens, "passes": repeats}
    asked |= {"new_tokens_of_the_search": SEARCH_TOKENS}
    steps = {name: spread(ms[name] for ms in step_ms) for name in step_ms[0]}
    return {"asked": asked} | report | {"step_ms": steps, "machine": machine(None), "versions": versions()}


@click.command(cls=OneLineFailures, epilog=epilog(__doc__))
@click.argument("artifact", type=click.Path(path_type=Path))
@click.argument("llama_cpp", type=click.Path(path_type=Path))
@click.option(
    "--threads", type=click.IntRange(1, cores()), default=cores(), show_default=True, help="Threads of each side."
)
@click.option(
    "--type",
    "weights",
    type=click.Choice(WEIGHT_TYPES),
    multiple=True,
    help="llama.cpp's type of weights; repeatable. Default: f32 for float32, q8_0 for 8da8w, q4_0 and q4_k_m "
    "for 8da4w.",
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
    weights: Sequence[str],
    cache_type: str,
    repeats: int,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Measure an ARTIFACT of gemma4-tiny beside LLAMA_CPP, a folder with a build of it, at its fastest settings.

    First, llama-server answers all prompts of scripts/prompts.jsonl once, up to 64 tokens each, in every setting: draft
    in f32 or q8_0, chain length 1 to 7, backend sampling of the draft on or off. Then these take turns with each
    prompt, greedily and up to 128 tokens: the artifact without and with speculation and, for each --type, llama-server
    without speculation and in its four fastest settings. The best setting is the one with the best median over the
    passes. A setting whose server fails is named and left out.

    Nothing is kept from one prompt to the next. Decoding is timed from the first token to the last by either side's own
    clock, so no figure includes HTTP; "prompts too" adds the time to the first token. Ratios are computed within a
    pass. Figures are medians over the passes, with minimum and maximum. --type and --cache-type apply only to
    llama.cpp: the artifact keeps the weights and caches of its export.
    """
    build = Build.found(llama_cpp)
    report = measured(artifact, build, threads, weights, cache_type, repeats, folder)
    click.echo(json.dumps(report) if as_json else as_text(report))


if __name__ == "__main__":
    main()
