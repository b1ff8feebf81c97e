"""Shows on a terminal how much of a long prompt has been read."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from eagle3.runner.model import Model

PATIENCE = 1.0
"""Seconds after which the line appears, so that short prompts show none."""
INTERVAL = 0.1


@contextmanager
def prompt_progress(model: Model) -> Iterator[None]:
    """Show, within this context, a line on stderr with the number of the prompt's tokens that the model's caches hold.
    Nothing is shown if stderr is not a terminal."""
    console, over = Console(stderr=True), threading.Event()
    if not console.is_terminal:
        yield
        return

    def show() -> None:
        if over.wait(PATIENCE):
            return
        columns = TextColumn("reading the prompt"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
            task = bar.add_task("", total=None)
            while not over.wait(INTERVAL):
                if (stream := model.current) is not None:
                    held = min(len(model.cached.tokens), stream.prompt_tokens)
                    bar.update(task, total=stream.prompt_tokens, completed=held, refresh=True)

    shown = threading.Thread(target=show, daemon=True)
    shown.start()
    try:
        yield
    finally:
        over.set()
        shown.join()
