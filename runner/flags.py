"""The flags of a generation, for every command that has one."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from eagle3.runner.options import AUTO, Options

Command = TypeVar("Command", bound=Callable[..., Any])


def token_ids(_ctx: click.Context, _param: click.Parameter, text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise click.BadParameter(f"{text!r} is no list of token ids such as 1,2,3") from None


def chain_length(text: str) -> int | str:
    if text == AUTO:
        return text
    try:
        return int(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is neither a number of draft tokens nor {AUTO}") from None


def _chain_length(_ctx: click.Context, _param: click.Parameter, text: str | None) -> int | str | None:
    return None if text is None else chain_length(text)


def biases(_ctx: click.Context, _param: click.Parameter, given: tuple[str, ...]) -> dict[int, float] | None:
    try:
        return {int(token): float(bias) for token, bias in (each.split("=") for each in given)} or None
    except ValueError:
        raise click.BadParameter(f"{' '.join(given)!r}: expected TOKEN_ID=BIAS such as 17=-5") from None


SEED_HELP = """The same seed gives the same text, whatever --chain-len is. Default: one is drawn, and told. That of a
file of prompts is mixed with each line's number."""

chain_len_option = click.option(
    "--chain-len",
    callback=_chain_length,
    metavar=f"K|{AUTO}",
    help=f"Draft tokens a round, 0 for none; {AUTO}: as many as pay. Default: the artifact's.",
)
_TEXT_FLAGS = (
    click.option("--max-new-tokens", type=int, help=f"Default: {Options.max_new_tokens}."),
    click.option("--temperature", type=float, help="0, the default, is greedy decoding."),
    click.option("--top-k", type=int, help="Sample among the K likeliest tokens."),
    click.option("--top-p", type=float, help="Sample among the likeliest tokens that have this probability together."),
    click.option("--min-p", type=float, help="Sample among tokens with this share of the likeliest one's probability."),
    click.option("--seed", type=int, help=SEED_HELP),
    click.option("--repetition-penalty", type=float, help="Above 1: tokens that were there are less likely."),
    click.option(
        "--logit-bias", multiple=True, callback=biases, metavar="ID=BIAS", help="Added to a token's logit; repeatable."
    ),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable."),
    click.option(
        "--stop-token-ids", callback=token_ids, metavar="1,2", help="End at these tokens, beside the artifact's own."
    ),
    click.option("--ignore-eos", is_flag=True, default=None, help="Go on behind the artifact's end tokens."),
)


def generation_flags(command: Command) -> Command:
    """Adds the flags; the command gets ``**given``, for ``options_from``."""
    return chain_len_option(text_flags(command))


def text_flags(command: Command) -> Command:
    """``generation_flags`` without the chain length, on which the text does not depend."""
    for flag in reversed(_TEXT_FLAGS):
        command = flag(command)
    return command


def options_from(given: dict[str, Any]) -> dict[str, Any]:
    """What was given, as ``Model.stream`` takes it. Raises UsageError for values that make no sense."""
    options = {name: value for name, value in given.items() if value not in (None, ())}
    try:
        Options.of(**options)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    return options
