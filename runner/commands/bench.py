"""``eagle3-bench``: measures speed and acceptance over a file of prompts, and compares the tokens."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from eagle3.runner.commands.flags import chain_length, options_from, text_flags
from eagle3.runner.options import AUTO
from eagle3.runner.system.command import OneLineFailures, cuda_graph_option, runtime_option, version_option

EPILOG = """
\b
Examples:
  eagle3-bench out --prompts scripts/prompts.jsonl
  eagle3-bench out --prompts scripts/prompts.jsonl --chain-len 1,2,3,auto
  eagle3-bench out --prompts edits.jsonl --ngram
  eagle3-bench out --prompts scripts/prompts.jsonl --context 128,512,1k
  eagle3-bench out --prompts questions.jsonl --chat --temperature 0.7 --seed 1 --markdown
  eagle3-bench out-int4 --prompts scripts/prompts.jsonl --compare out-int8
  eagle3-bench out --prompts scripts/prompts.jsonl --json
"""

HEADINGS = {
    "prompts": "Prompts and generation",
    "repeats": "Measurement",
    "runtime": "Running the artifact",
    "markdown": "Report",
}


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
        number, unit = (part[:-1], 1024) if part.endswith("k") else (part, 1)
        if not (number.isascii() and number.isdigit() and int(number) > 0):
            raise click.BadParameter(f"{part!r} is no number of tokens: type for example 512,1k,4k")
        found.add(int(number) * unit)
    return sorted(found)


@click.command(cls=OneLineFailures, epilog=EPILOG, headings=HEADINGS)
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, exists=True, dir_okay=False, allow_dash=True),
    required=True,
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
@runtime_option
@cuda_graph_option
@click.option("--markdown", is_flag=True, help="Print Markdown tables.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@version_option
def main(
    artifact: Path,
    prompts: Path,
    chat: bool,
    lengths: list[int | str] | None,
    lengths_of_context: list[int] | None,
    ngram: bool,
    repeats: int,
    compare: Path | None,
    runtime: str,
    cuda_graph: str,
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
    options = options_from(given)
    from eagle3.runner import load

    with ExitStack() as stack:
        models = {str(artifact): stack.enter_context(load(artifact, runtime, defer=True, cuda_graph=cuda_graph))}
        if compare:
            name = f"{compare} again" if compare == artifact else str(compare)
            models[name] = stack.enter_context(load(compare, runtime, defer=True, cuda_graph=cuda_graph))

        from eagle3.runner.commands.bench_figures import measured  # imports torch: behind the check of the artifacts
        from eagle3.runner.commands.bench_report import as_markdown, as_text

        report = measured(models, prompts, options, chat, lengths, repeats, ngram, lengths_of_context)
    click.echo(json.dumps(report) if as_json else as_markdown(report) if markdown else as_text(report))
