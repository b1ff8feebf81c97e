"""The command-line flags for generation options, shared by the commands that generate."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import click

from eagle3.runner.options import AUTO, Options

Command = TypeVar("Command", bound=Callable[..., Any])


class Size(click.ParamType):
    """Accepts a number of bytes, with K, M, G or T behind it for thousands, millions and so on."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401 - click's
        text = str(value).strip().upper().removesuffix("B")
        power = " KMGT".find(text[-1:]) if text else 0
        with suppress(ValueError, OverflowError):
            size = float(text[:-1] if power > 0 else text) * 1000 ** max(power, 0)
            if size >= 0:
                return round(size)
        return self.fail(f"{value!r} is no size such as 500M or 2G", param, ctx)


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


SEED_HELP = """The same seed gives the same text, whatever --chain-len is. Default: a random one, which is printed. For
a file of prompts it is mixed with each line's number."""

chain_len_option = click.option(
    "--chain-len",
    callback=_chain_length,
    metavar=f"K|{AUTO}",
    help=f"Draft tokens per round, 0 for none; {AUTO} adapts to the fastest number. Default: the artifact's.",
)
ngram_option = click.option(
    "--ngram/--no-ngram",
    default=None,
    help="Let prompt lookup propose tokens too, in rounds where that is faster. Default: the artifact decides.",
)
_TEXT_FLAGS = (
    click.option("--max-new-tokens", type=int, help=f"Default: {Options.max_new_tokens}."),
    click.option("--min-tokens", type=int, help="Do not end before this many tokens."),
    click.option("--temperature", type=float, help="0, the default, is greedy decoding."),
    click.option("--top-k", type=int, help="Sample among the K most likely tokens."),
    click.option("--top-p", type=float, help="Sample among the most likely tokens with this total probability."),
    click.option("--min-p", type=float, help="Sample among tokens with at least this share of the top probability."),
    click.option("--seed", type=int, help=SEED_HELP),
    click.option("--repetition-penalty", type=float, help="Above 1: tokens already in the text become less likely."),
    click.option(
        "--logit-bias", multiple=True, callback=biases, metavar="ID=BIAS", help="Added to a token's logit; repeatable."
    ),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable."),
    click.option(
        "--stop-token-ids",
        callback=token_ids,
        metavar="1,2",
        help="End at these tokens, besides the artifact's end tokens.",
    ),
    click.option("--ignore-eos", is_flag=True, default=None, help="Do not end at the artifact's end tokens."),
)


def generation_flags(command: Command) -> Command:
    """Add the flags to a command. The command gets them as ``**given``, for ``options_from``."""
    return chain_len_option(ngram_option(text_flags(command)))


def text_flags(command: Command) -> Command:
    """Add the flags except ``--chain-len`` and ``--ngram``, on which the text does not depend."""
    for flag in reversed(_TEXT_FLAGS):
        command = flag(command)
    return command


def options_from(given: dict[str, Any]) -> dict[str, Any]:
    """Return the flags that were given, as options of ``Model.stream``. Raises UsageError for invalid values."""
    options = {name: value for name, value in given.items() if value not in (None, ())}
    try:
        Options.of(**options)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    return options
