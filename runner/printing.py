"""Prints a generation's text on stdout while it is generated."""

import sys
from collections.abc import Callable, Iterable

import click

from eagle3.runner.model import Piece


def print_pieces(pieces: Iterable[Piece], written: Callable[[Piece], str]) -> None:
    """Print ``written(piece)`` for each piece. An exception in the middle of a line also ends the line, so that the
    error message begins on a line of its own."""
    last = "\n"
    try:
        for piece in pieces:
            text = written(piece)
            sys.stdout.write(text)
            sys.stdout.flush()
            last = text[-1:] or last
    except OSError:  # stdout itself: it takes no line end either
        raise
    except Exception:
        if last != "\n":
            click.echo()
        raise
