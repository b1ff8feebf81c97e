"""A conversation on a terminal."""

import codecs
import io
import sys
from typing import Any

import click

from eagle3.runner.console.command import one_line, tell
from eagle3.runner.conversation import Conversation
from eagle3.runner.model import Model
from eagle3.runner.printing import print_pieces
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
    take_utf8()
    conversation = Conversation(model, system, **options)
    model.encode([{"role": "user", "content": "."}])  # a first answer's imports: none interrupted can be had again
    tell(HELP)
    while True:
        try:
            if not _turn(conversation, input("> "), show_stats):
                return
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:  # at the prompt, or where an answer is about to begin or has just ended
            click.echo()


def take_utf8() -> None:
    """Take what is typed as UTF-8 where the locale's encoding is ASCII: Python would keep the bytes of an "é" as
    surrogates, or stop there, and readline would take them for keys held with Meta.

    Bytes that the encoding lacks become surrogates, of which ``check_unicode`` tells in a line. Lines are edited, and
    those before come back.
    """
    import readline

    for setting in ("input-meta on", "output-meta on", "convert-meta off"):
        readline.parse_and_bind(f"set {setting}")
    if isinstance(sys.stdin, io.TextIOWrapper):
        ascii_alone = codecs.lookup(sys.stdin.encoding).name == "ascii"
        sys.stdin.reconfigure(encoding="utf-8" if ascii_alone else None, errors="surrogateescape")


def _turn(conversation: Conversation, line: str, show_stats: bool) -> bool:
    """Do what a line asks for. Returns whether the dialogue goes on."""
    if line.strip() == "/exit":
        return False
    if line.strip() == "/reset":
        conversation.reset()
    elif line.startswith("/"):
        tell(f"{line.strip()} is no command. {HELP}")
    elif line.strip():
        _answer(conversation, line, show_stats)
    return True


def _answer(conversation: Conversation, line: str, show_stats: bool) -> None:
    """One answer, as it comes. What cannot be answered is told, and the dialogue goes on."""
    try:
        print_pieces(conversation.say(line), lambda piece: piece.text)
    except KeyboardInterrupt:
        pass
    except (ValueError, RuntimeError) as error:
        tell(f"Error: {one_line(error)} (/reset forgets what was said)")
        return
    click.echo()
    if show_stats and conversation.result is not None:
        tell(f"{summary(conversation.result)}\n{table(conversation.result.stats)}")
