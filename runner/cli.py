"""``eagle3-run``: one prompt through an artifact."""

import json
import sys
from pathlib import Path

import click

from eagle3.runner.contract.console import OneLineFailures, runtime_option, tell
from eagle3.runner.text_input import argument_text, read_text
from eagle3.runner.threads import leave_threads_to_xnnpack

EPILOG = """
\b
Examples:
  eagle3-run out --prompt "def main("
  eagle3-run out --prompt-tokens 2,45,17,300 --json
"""


def token_ids(_ctx: click.Context, _param: click.Parameter, text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise click.BadParameter(f"{text!r} is no list of token ids such as 1,2,3") from None


def utf8(_ctx: click.Context, _param: click.Parameter, text: str | None) -> str | None:
    try:
        return None if text is None else argument_text(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command(cls=OneLineFailures, epilog=EPILOG)
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--prompt", callback=utf8, metavar="TEXT")
@click.option("--prompt-file", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Text, UTF-8.")
@click.option("--prompt-tokens", callback=token_ids, metavar="1,2,3", help="Token ids, taken as they are.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option("--chain-len", type=click.IntRange(1), help="Draft tokens a round. Default: the artifact's.")
@click.option("--chat", is_flag=True, help="Put the prompt into the model's chat template.")
@runtime_option
@click.option("--verify", is_flag=True, help="Read every file first, however large, and compare it with export.json.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of text.")
@click.version_option(package_name="eagle3-export")
def main(
    artifact, prompt, prompt_file, prompt_tokens, max_new_tokens, chain_len, chat, runtime, verify, as_json
) -> None:
    """Generate from an artifact of eagle3-export: its folder or its model.pte.

    Text goes to stdout as it is accepted, statistics to stderr. The tokens are exactly greedy decoding's.
    """
    if sum(given is not None for given in (prompt, prompt_file, prompt_tokens)) != 1:
        raise click.UsageError("give one of --prompt, --prompt-file and --prompt-tokens")
    if chat and prompt_tokens is not None:
        raise click.UsageError("--chat puts text into a template: it does not go with --prompt-tokens")

    leave_threads_to_xnnpack()

    from eagle3.runner.artifact import open_artifact, open_session
    from eagle3.runner.loop import check_request
    from eagle3.runner.text import Text

    opened = open_artifact(artifact, verify, say=tell)
    text = None
    if prompt_tokens is None:
        text = Text(opened.folder)
        given = read_text(prompt_file) if prompt is None else prompt
        if not given:
            raise ValueError("the prompt is empty: give some text")
        prompt_tokens = text.encode_chat(given) if chat else text.encode(given)
    elif opened.tokenizer_file.is_file():
        text = Text(opened.folder)
    check_request(opened.metadata, prompt_tokens, max_new_tokens, chain_len)  # before the methods load
    session = open_session(opened, runtime)
    result, seconds = _generate(opened, session, prompt_tokens, text, as_json, max_new_tokens, chain_len)
    if as_json:
        record = {
            "token_ids": result.token_ids,
            "text": text.decode(result.token_ids) if text else None,
            "finish_reason": result.finish_reason,
            "stats": result.stats.as_json(),
        }
        click.echo(json.dumps(record))
    else:
        click.echo()
        tell(_summary(result, seconds))


def _generate(opened, session, prompt_tokens, text, as_json, max_new_tokens, chain_len):
    """Run to the end, printing as it goes unless ``as_json``; returns the generation and its seconds."""
    import time

    from eagle3.runner.loop import generate
    from eagle3.runner.text import TextStream

    stream = TextStream(text) if text else None
    start = time.perf_counter()
    steps = generate(session, prompt_tokens, max_new_tokens, chain_len)
    while True:
        try:
            fresh = next(steps)
        except StopIteration as end:
            if stream and not as_json:
                sys.stdout.write(stream.finish())
            return end.value, time.perf_counter() - start
        if not as_json:
            sys.stdout.write(stream.push(fresh) if stream else " ".join(map(str, fresh)) + " ")
            sys.stdout.flush()


def _summary(result, seconds: float) -> str:
    stats = result.stats
    rates = " ".join(f"{rate:.2f}" for rate in stats.acceptance_rate_per_position)
    return (
        f"{len(result.token_ids)} tokens in {seconds:.2f} s ({result.finish_reason}), "
        f"{stats.num_drafts} rounds, mean acceptance length {stats.mean_acceptance_length:.2f} (by position: {rates})"
    )
