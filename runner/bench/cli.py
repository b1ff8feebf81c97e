"""``eagle3-bench``: measures acceptance, speed and where the time goes, over a file of prompts."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eagle3.runner.commands.flags import chain_length, options_from, text_flags
from eagle3.runner.console.command import OneLineFailures, cuda_graph_option, runtime_option, version_option
from eagle3.runner.hardware.threads import leave_threads_to_xnnpack
from eagle3.runner.options import AUTO

if TYPE_CHECKING:
    from eagle3.runner.model import Model

EPILOG = """
\b
Examples:
  eagle3-bench out --prompts scripts/prompts.jsonl
  eagle3-bench out --prompts scripts/prompts.jsonl --chain-len 1,2,3,auto --plot out.png
  eagle3-bench out --prompts edits.jsonl --ngram
  eagle3-bench out --prompts scripts/prompts.jsonl --context 128,512,1k --plot contexts.png
  eagle3-bench out --prompts questions.jsonl --chat --temperature 0.7 --seed 1 --markdown
  eagle3-bench out-int4 --prompts scripts/prompts.jsonl --compare out-int8
  eagle3-bench out --prompts scripts/prompts.jsonl --checkpoint targets/gemma4_tiny/target --json
  eagle3-bench out --profile
"""

HEADINGS = {
    "prompts": "Prompts and generation",
    "repeats": "Measurement",
    "runtime": "Running the artifact",
    "plot": "Report",
}


UNIT = 1024
"""The number of tokens that ``1k`` stands for."""


def chain_lengths(_ctx: click.Context, _param: click.Parameter, text: str | None) -> list[int | str] | None:
    """Parse a list of chain lengths: each once, in the order given."""
    if text is None:
        return None
    return list(dict.fromkeys(chain_length(part.strip()) for part in (text.split(",") if text else ())))


def contexts(_ctx: click.Context, _param: click.Parameter, text: str | None) -> list[int] | None:
    """Parse a list of contexts, in tokens or with a k for 1,024: each once, in ascending order."""
    if text is None:
        return None
    found = set()
    for part in (each.strip().lower() for each in text.split(",")):
        number, unit = (part[:-1], UNIT) if part.endswith("k") else (part, 1)
        if not (number.isascii() and number.isdigit() and int(number) > 0):
            raise click.BadParameter(f"{part!r} is no number of tokens: type for example 512,1k,4k")
        found.add(int(number) * unit)
    return sorted(found)


@click.command(cls=OneLineFailures, epilog=EPILOG, headings=HEADINGS)
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, exists=True, dir_okay=False, allow_dash=True),
    metavar="FILE.jsonl",
    help="A file as for eagle3-run, also those of MT-Bench, GSM8K and HumanEval. - reads stdin.",
)
@click.option("--chat", is_flag=True, help="Put the prompts into the model's chat template.")
@click.option(
    "--chain-len",
    "lengths",
    callback=chain_lengths,
    metavar=f"1,2,{AUTO}",
    help=f"Chain lengths, measured in turn; {AUTO} adapts to the fastest one. Default: the artifact's.",
)
@click.option(
    "--context",
    "lengths_of_context",
    callback=contexts,
    metavar="1k,4k",
    help="Make prompts of these lengths (1k is 1,024 tokens): a prompt, the others, half of the prompt again.",
)
@text_flags
@click.option("--ngram", is_flag=True, help="Measure each chain length with prompt lookup as well.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Passes over all prompts.")
@click.option(
    "--compare",
    type=click.Path(path_type=Path, exists=True),
    metavar="ARTIFACT",
    help="A second artifact to measure in turn with the first.",
)
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path, exists=True),
    help="The target's folder, to compare with transformers too.",
)
@click.option(
    "--profile",
    is_flag=True,
    help="Instead of prompts: show where each method spends its time, and how long reading its weights once takes.",
)
@runtime_option
@cuda_graph_option
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE.png", help="Plot acceptance and speed.")
@click.option("--markdown", is_flag=True, help="Print Markdown tables.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@version_option
def main(
    artifact: Path,
    prompts: Path | None,
    chat: bool,
    lengths: list[int | str] | None,
    lengths_of_context: list[int] | None,
    ngram: bool,
    repeats: int,
    compare: Path | None,
    checkpoint: Path | None,
    profile: bool,
    runtime: str,
    cuda_graph: str,
    plot: Path | None,
    markdown: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Measure an artifact of eagle3-export.

    Each prompt is run without speculation and with each chain length in turn; all prompts are run several times. The
    report has tokens per second and their ratios (median, minimum and maximum over the passes), acceptance under vLLM's
    names, and whether the tokens are the same.
    """
    if markdown and as_json:
        raise click.UsageError("give one of --markdown and --json")
    if profile == bool(prompts):
        raise click.UsageError("give one of --prompts and --profile")
    if prompts is None:
        print_profile(artifact, as_json)
        return
    options = options_from(given)
    if plot:
        from eagle3.runner.bench.plot import check_plot

        check_plot(plot)
    if checkpoint and not (checkpoint / "config.json").is_file():
        raise FileNotFoundError(f"{checkpoint / 'config.json'} is missing: --checkpoint needs a Hugging Face folder")

    from eagle3.runner import load

    with ExitStack() as stack:
        models = {str(artifact): stack.enter_context(load(artifact, runtime, defer=True, cuda_graph=cuda_graph))}
        if compare:
            name = f"{compare} again" if compare == artifact else str(compare)
            models[name] = stack.enter_context(load(compare, runtime, defer=True, cuda_graph=cuda_graph))
        report = measured(models, prompts, options, chat, lengths, repeats, checkpoint, ngram, lengths_of_context)
    if as_json:
        click.echo(json.dumps(report))
    else:
        from eagle3.runner.bench.report import as_markdown, as_text

        click.echo(as_markdown(report) if markdown else as_text(report))
    if plot:
        from eagle3.runner.bench.plot import draw, draw_contexts

        (draw_contexts if lengths_of_context else draw)(report, plot)


def print_profile(artifact: Path, as_json: bool) -> None:
    leave_threads_to_xnnpack()
    from eagle3.runner.bench.profile import profile
    from eagle3.runner.bench.report import profile_text

    found = profile(artifact)
    click.echo(json.dumps(found) if as_json else profile_text(found))


def measured(
    models: dict[str, "Model"],
    prompts: Path,
    options: dict[str, Any],
    chat: bool,
    lengths: list[int | str] | None,
    repeats: int,
    checkpoint: Path | None,
    ngram: bool = False,
    lengths_of_context: list[int] | None = None,
) -> dict[str, Any]:
    """Check all inputs, then measure. Returns the report."""
    from eagle3.runner.batch.batch import progress
    from eagle3.runner.bench.configurations import (
        check_configurations,
        check_greedy,
        check_same_tokens,
        configurations_of,
        make_workload,
    )
    from eagle3.runner.bench.contexts import with_contexts
    from eagle3.runner.bench.figures import make_report
    from eagle3.runner.bench.measure import measure

    workload = make_workload(prompts, options, chat)
    if lengths_of_context:
        workload = with_contexts(workload, lengths_of_context, list(models.values()))
    if checkpoint:
        check_greedy(workload)
    configurations = sum((configurations_of(name, model, lengths, ngram) for name, model in models.items()), [])
    if len(models) > 1:
        check_same_tokens(configurations[0], configurations[-1])
    check_configurations(configurations, workload)
    with progress() as bar:
        task = bar.add_task("measuring", total=repeats * len(workload.prompts) * len(configurations))
        outcomes, step_ms = measure(configurations, workload, repeats, lambda: bar.advance(task))
    report = make_report(outcomes, step_ms, workload)
    report["contexts"] = lengths_of_context or []
    if checkpoint:
        from eagle3.runner.bench.transformers_reference import add_transformers

        add_transformers(report, checkpoint, outcomes, step_ms)
    return report
