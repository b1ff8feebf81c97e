"""``eagle3-run``: runs prompts through an artifact."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eagle3.runner.commands.flags import generation_flags, options_from, token_ids
from eagle3.runner.system.command import (
    OneLineFailures,
    cuda_graph_option,
    packed_weights_option,
    runtime_option,
    tell,
    version_option,
)
from eagle3.runner.system.text_input import argument_text, read_text

if TYPE_CHECKING:
    from eagle3.runner.model import Model, Piece, Prompt, Result

EPILOG = """
\b
Examples:
  eagle3-run out --prompt "def main("
  eagle3-run out --prompt "def main(" --temperature 0.7 --top-p 0.95 --seed 1 --stats
  eagle3-run out --chat --system "You are brief."
  git diff | eagle3-run out --chat --prompt -
  eagle3-run out --prompts questions.jsonl --output results.jsonl --keep-going
  eagle3-run out --prompts million.jsonl --output results.jsonl --ray 8
  eagle3-run out --prompt-tokens 2,45,17,300 --json
"""


def utf8(_ctx: click.Context, _param: click.Parameter, text: str | None) -> str | None:
    try:
        return None if text is None else argument_text(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
HEADINGS = {
    "prompt": "Prompts",
    "chain_len": "Generation",
    "logprobs": "Results",
    "runtime": "Running the artifact",
}


@click.command(cls=OneLineFailures, epilog=EPILOG, headings=HEADINGS)
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--prompt", callback=utf8, metavar="TEXT", help="The prompt; - reads it from stdin.")
@click.option("--prompt-file", type=FILE, help="The prompt, as a text file in UTF-8.")
@click.option("--prompt-tokens", callback=token_ids, metavar="1,2,3", help="The prompt as token ids, used as they are.")
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, exists=True, dir_okay=False, allow_dash=True),
    metavar="FILE.jsonl",
    help="A file of JSON lines, each a prompt with options of its own; prints JSON lines. - reads stdin.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="File for the results of --prompts; results that it already holds are not run again. Default: stdout.",
)
@click.option(
    "--keep-going", is_flag=True, help="With --prompts: run the others if some cannot be run, and exit with code 1."
)
@click.option(
    "--ray",
    "replicas",
    type=click.IntRange(1),
    metavar="N",
    help="With --prompts: run on N replicas of a Ray cluster, which have a GPU each for a CUDA artifact.",
)
@click.option(
    "--chat", is_flag=True, help="Apply the model's chat template to the prompt; without a prompt, hold a dialogue."
)
@click.option("--system", callback=utf8, metavar="TEXT", help="The system prompt of --chat.")
@click.option(
    "--session",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Keep the dialogue of --chat in FILE: take up what it holds, and write it at the end.",
)
@generation_flags
@click.option(
    "--logprobs", type=int, metavar="N", help="With --json or --prompts: log-probabilities of the tokens and the top N."
)
@click.option("--stats", is_flag=True, help="Print statistics and times to stderr.")
@click.option(
    "--verify-lossless",
    is_flag=True,
    help="Generate again without speculation and compare; exit code 1 if a token differs.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of text.")
@runtime_option
@cuda_graph_option
@packed_weights_option
@click.option("--verify", is_flag=True, help="Read every file first, however large, and compare it with export.json.")
@version_option
def main(
    artifact: Path,
    prompt: str | None,
    prompt_file: Path | None,
    prompt_tokens: list[int] | None,
    prompts: Path | None,
    output: Path | None,
    keep_going: bool,
    replicas: int | None,
    chat: bool,
    system: str | None,
    session: Path | None,
    stats: bool,
    verify_lossless: bool,
    runtime: str,
    cuda_graph: str,
    packed_weights: Path | None,
    verify: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Generate from an artifact of eagle3-export: its folder or its model.pte.

    Text is printed to stdout as soon as it is accepted, statistics to stderr. The tokens are exactly those of decoding
    without speculation: greedy decoding, or, with --temperature, sampling with the same seed.
    """
    sources = [each for each in (prompt, prompt_file, prompt_tokens, prompts) if each is not None]
    dialogue = chat and not sources
    if len(sources) != 1 and not dialogue:
        raise click.UsageError("give one of --prompt, --prompt-file, --prompt-tokens and --prompts, or --chat")
    _check_flags(prompt_tokens, prompts, output, chat, system, verify_lossless and (dialogue or prompts is not None))
    if keep_going and prompts is None:
        raise click.UsageError("--keep-going is for the prompts of a file: give them with --prompts")
    if session is not None and (not chat or prompts is not None or verify_lossless):
        raise click.UsageError(
            "--session keeps a dialogue: type --chat, with --prompt or without, and no other prompts"
        )
    if replicas is not None:
        _check_ray(prompts)
    if given["logprobs"] is not None and prompts is None and not (as_json and sources):
        raise click.UsageError("--logprobs are shown with --json only: type --json as well")
    options = options_from(given)  # includes logprobs
    if dialogue:
        from eagle3.runner.commands.dialogue import check_terminal, kept, run_dialogue

        check_terminal()

    from eagle3.runner import load

    with load(artifact, runtime, verify, not dialogue, cuda_graph, packed_weights) as model:
        if dialogue:
            with kept(model, system, session, options) as conversation:
                run_dialogue(conversation, stats)
        elif prompts is not None:
            from eagle3.runner.commands.batch import run_batch

            compute = None
            if replicas is not None:
                from eagle3.runner.commands.batch_ray import over_ray

                compute = over_ray(artifact, replicas, {"runtime": runtime, "cuda_graph": cuda_graph})
            run_batch(model, prompts, output, chat, system, options, keep_going, stats, compute)
        else:
            asked: Prompt | None = prompt_tokens
            if asked is None:
                text = read_text(prompt_file) if prompt in (None, "-") else prompt
                if session is not None:
                    _turn(model, text, system, session, as_json, stats, options)
                    return
                asked = _messages(text, system) if chat else text
            result = _print(model, asked, as_json, options)
            _tell(model, result, stats, verify_lossless, as_json)


def _check_flags(
    prompt_tokens: list[int] | None,
    prompts: Path | None,
    output: Path | None,
    chat: bool,
    system: str | None,
    lossless_of_many: bool,
) -> None:
    """Raise UsageError for flags that do not go together."""
    if chat and prompt_tokens is not None:
        raise click.UsageError("--chat puts text into a template: it does not go with --prompt-tokens")
    if system is not None and not chat:
        raise click.UsageError("--system is for --chat: type --chat as well")
    if output is not None and prompts is None:
        raise click.UsageError("--output takes the results of --prompts: type > FILE for a single result")
    if lossless_of_many:
        raise click.UsageError("--verify-lossless is for one prompt: give it by --prompt")


def _check_ray(prompts: Path | None) -> None:
    if prompts is None:
        raise click.UsageError("--ray is for the prompts of a file: give them with --prompts")
    if importlib.util.find_spec("ray") is None:
        raise click.ClickException("ray is not installed: type pip install 'eagle3-export[ray]'")


def _messages(text: str, system: str | None) -> list[dict[str, str]]:
    if not text:
        raise ValueError("the prompt is empty: give some text")
    messages = [{"role": "user", "content": text}]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def _turn(
    model: "Model",
    text: str,
    system: str | None,
    session: Path,
    as_json: bool,
    stats: bool,
    options: dict[str, Any],
) -> None:
    """Generate one turn of the dialogue in the file ``session``, and write it back."""
    from eagle3.runner.commands.dialogue import kept

    with kept(model, system, session, options) as conversation:
        result = _print(model, [*conversation.messages, *_messages(text, None)], as_json, options)
        conversation.add(text, result)
    _tell(model, result, stats, False, as_json)


def _print(model: "Model", prompt: "Prompt", as_json: bool, options: dict[str, Any]) -> "Result":
    """Generate, printing the text on the way unless ``as_json``. An interruption keeps the tokens so far."""
    from eagle3.runner.commands.printing import print_pieces

    def written(piece: "Piece") -> str:
        if as_json:
            return ""
        return piece.text if model.has_text else " ".join(map(str, piece.token_ids)) + " "

    with model.stream(prompt, **options) as stream:
        try:
            print_pieces(model, stream, written)
        except KeyboardInterrupt:
            stream.close()
    return stream.result


def _tell(model: "Model", result: "Result", stats: bool, verify_lossless: bool, as_json: bool) -> None:
    from eagle3.runner.commands.printing import summary, table
    from eagle3.runner.options import AUTO

    again = model.replay(result) if verify_lossless else None
    if as_json:
        click.echo(json.dumps(result.as_json() | ({"lossless": again.as_json()} if again else {})))
    else:
        click.echo()
        tell(summary(result))
        if result.options.chain_len == AUTO and model.chain.note:
            tell(model.chain.note)
    if note := model.acceptance_note(result):
        tell(note)
    if stats:
        tell(table(result.stats))
    if again and not as_json:
        from eagle3.runner.loop.lossless import lines

        for line in lines(again, (lambda token: model.text.decode([token])) if model.has_text else None):
            tell(line)
    if again and again.divergence:
        sys.exit(1)
    if result.finish_reason == "abort":
        sys.exit(130)
