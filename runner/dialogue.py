"""A conversation on a terminal."""

import sys
from typing import Any

import click

from eagle3.runner.contract.console import one_line, tell
from eagle3.runner.conversation import Conversation
from eagle3.runner.model import Model
from eagle3.runner.summary import summary, table

HELP = "/reset forgets what was said, /exit or Ctrl-D leaves; Ctrl-C ends an answer."


def check_terminal() -> None:
    """Raise UsageError where nobody can answer."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError(
            "--chat without a prompt is a dialogue and wants a terminal: give --prompt TEXT (or --prompt - for stdin)"
        )


def run_dialogue(model: Model, system: str | None, show_stats: bool, options: dict[str, Any]) -> None:
    """Turn by turn until the input ends."""
    import readline  # noqa: F401 - lines are edited, and those before come back

    conversation = Conversation(model, system, **options)
    tell(HELP)
    while True:
        try:
            line = input("> ")
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.echo()
            continue
        if line.strip() == "/exit":
            return
        if line.strip() == "/reset":
            conversation.reset()
        elif line.startswith("/"):
            tell(f"{line.strip()} is no command. {HELP}")
        elif line.strip():
            _turn(conversation, line, show_stats)


def _turn(conversation: Conversation, line: str, show_stats: bool) -> None:
    """One answer, as it comes. What cannot be answered is told, and the dialogue goes on."""
    try:
        for piece in conversation.say(line):
            sys.stdout.write(piece.text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        pass
    except (ValueError, RuntimeError) as error:
        tell(f"Error: {one_line(error)} (/reset forgets what was said)")
        return
    click.echo()
    if show_stats:
        tell(f"{summary(conversation.result)}\n{table(conversation.result.stats)}")
