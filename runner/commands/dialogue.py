"""Runs a conversation on a terminal."""

import codecs
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from eagle3.runner.commands.printing import print_pieces, summary, table
from eagle3.runner.conversation import Conversation
from eagle3.runner.model import Model
from eagle3.runner.session_file import Saved, check_can_save
from eagle3.runner.system.command import one_line, tell
from eagle3.runner.system.machine import size_text

HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C ends a reply."


def check_terminal() -> None:
    """Raise UsageError if stdin or stdout is not a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError(
            "--chat without a prompt is a dialogue and needs a terminal: give --prompt TEXT (or --prompt - for stdin)"
        )


@contextmanager
def kept(model: Model, system: str | None, file: Path | None, options: dict[str, Any]) -> Iterator[Conversation]:
    """Yield a conversation; the one in ``file``, if there is such a file. It is written there at the end, however it
    comes."""
    conversation = Conversation(model, system, **options)
    if file is None:
        yield conversation
        return
    check_can_save(model.metadata)
    if file.exists():
        tell(_said(file, conversation.resume(file)))
    elif not file.parent.is_dir():
        raise ValueError(f"{file.parent} is no folder: --session writes {file.name} there, make it first")
    try:
        yield conversation
    finally:
        if conversation.messages:
            tell(_said(file, conversation.save(file)))


def _said(file: Path, saved: Saved) -> str:
    return f"{file}: {saved.tokens:,} tokens, {size_text(saved.bytes)}"


def run_dialogue(conversation: Conversation, show_stats: bool) -> None:
    """Run turns until the input ends."""
    take_utf8()
    model = conversation.model
    # This imports transformers now, since an interrupted import cannot be repeated.
    model.encode([{"role": "user", "content": "."}])
    tell(HELP)
    while True:
        try:
            if not _turn(conversation, input("> "), show_stats):
                return
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:  # at the prompt, or just before or after a reply
            click.echo()


def take_utf8() -> None:
    """Read typed text as UTF-8 if the locale's encoding is ASCII. Otherwise Python would keep the bytes of an "é" as
    surrogates or stop there, and readline would take them for keys held with Meta.

    Bytes that cannot be decoded become surrogates, which ``check_unicode`` reports in one line. Importing readline
    gives line editing and history.
    """
    import readline

    for setting in ("input-meta on", "output-meta on", "convert-meta off"):
        readline.parse_and_bind(f"set {setting}")
    if isinstance(sys.stdin, io.TextIOWrapper):
        ascii_alone = codecs.lookup(sys.stdin.encoding).name == "ascii"
        sys.stdin.reconfigure(encoding="utf-8" if ascii_alone else None, errors="surrogateescape")


def _turn(conversation: Conversation, line: str, show_stats: bool) -> bool:
    """Execute a line of input. Returns False if the dialogue is to end."""
    if line.strip() == "/exit":
        return False
    if line.strip() == "/reset":
        conversation.reset()
    elif line.startswith("/"):
        tell(f"{line.strip()} is not a command. {HELP}")
    elif line.strip():
        _reply(conversation, line, show_stats)
    return True


def _reply(conversation: Conversation, line: str, show_stats: bool) -> None:
    """Print the reply to a line while it is generated. After an error the dialogue continues."""
    try:
        print_pieces(conversation.model, conversation.say(line), lambda piece: piece.text)
    except KeyboardInterrupt:
        pass
    except (ValueError, RuntimeError) as error:
        tell(f"Error: {one_line(error)} (/reset forgets the conversation)")
        return
    click.echo()
    if show_stats and conversation.result is not None:
        tell(f"{summary(conversation.result)}\n{table(conversation.result.stats)}")
